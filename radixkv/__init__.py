"""radixkv: a prefix-caching inference engine that lives inside your Python process.

Public names are imported on first use, so that `import radixkv` alone does not import torch.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixkv.version import __version__

if TYPE_CHECKING:
    from radixkv.cache import CacheStats, Explanation, PrefixCache
    from radixkv.chat import (
        AsyncChatSession,
        AsyncEngine,
        AsyncReplyStream,
        ChatSession,
        Engine,
        Reply,
        ReplyStream,
        ToolCall,
        ToolResult,
    )
    from radixkv.config import EngineConfig
    from radixkv.engine import AsyncHandle, AuditReport, Chunk, Completion, EngineStats, Handle, Score, Usage, Warmed
    from radixkv.engine.compressed import CompressedPrefix
    from radixkv.errors import RadixKVError
    from radixkv.sampling.logits_processors import LogitsProcessor
    from radixkv.sampling.params import SampleRow, SamplingParams

__all__ = [
    "AsyncChatSession",
    "AsyncEngine",
    "AsyncHandle",
    "AsyncReplyStream",
    "AuditReport",
    "CacheStats",
    "ChatSession",
    "Chunk",
    "Completion",
    "CompressedPrefix",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "Handle",
    "LogitsProcessor",
    "PrefixCache",
    "RadixKVError",
    "Reply",
    "ReplyStream",
    "SampleRow",
    "SamplingParams",
    "Score",
    "ToolCall",
    "ToolResult",
    "Usage",
    "Warmed",
    "__version__",
]

# OpenMP reads this when torch is loaded. By default, waiting threads spin for 300,000 turns, some milliseconds, before
# they sleep: on a busy machine they take the cores from the thread that they wait for. 1,000 turns take some 50 us.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

# Silent unless the application configures logging.
logging.getLogger("radixkv").addHandler(logging.NullHandler())

_HOMES = {
    "radixkv.cache": ("CacheStats", "Explanation", "PrefixCache"),
    "radixkv.chat": (
        "AsyncChatSession",
        "AsyncEngine",
        "AsyncReplyStream",
        "ChatSession",
        "Engine",
        "Reply",
        "ReplyStream",
        "ToolCall",
        "ToolResult",
    ),
    "radixkv.config": ("EngineConfig",),
    "radixkv.engine": (
        "AsyncHandle",
        "AuditReport",
        "Chunk",
        "Completion",
        "CompressedPrefix",
        "EngineStats",
        "Handle",
        "Score",
        "Usage",
        "Warmed",
    ),
    "radixkv.errors": ("RadixKVError",),
    "radixkv.sampling.logits_processors": ("LogitsProcessor",),
    "radixkv.sampling.params": ("SampleRow", "SamplingParams"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module, once."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted(__all__)
