"""Recorded and made-up workloads, replayed against the real prefix cache. Only `live` imports torch, and only to load
an engine.
"""

from __future__ import annotations

from radixkv_traces.assert_cached import assert_cached

__all__ = ["assert_cached"]
