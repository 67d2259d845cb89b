"""A cache that a recorder watches, a mirror of what it tells, and the time, for the tests of recorders."""

from __future__ import annotations

from typing import Any

from radixkv.cache import PrefixCache
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from tests.telemetry.expected import assert_tells_the_truth

OFFSET = 1000.0  # seconds between the cache's clock and the recorder's


def watched(
    num_blocks: int = 16, block_size: int = 4, **options: Any
) -> tuple[PrefixCache, Recorder, Mirror, list[float]]:
    """A cache, who watches it, what was told, and the time."""
    now = [0.0]
    cache = PrefixCache(num_blocks, block_size, clock=lambda: now[0])
    recorder = Recorder(clock=lambda: now[0] + OFFSET, **options)
    recorder.attach(cache)
    return cache, recorder, Mirror(), now


def tell(cache: PrefixCache, recorder: Recorder, mirror: Mirror) -> None:
    mirror.apply(recorder.collect())
    cache.check()
    assert_tells_the_truth(mirror, cache, OFFSET)
