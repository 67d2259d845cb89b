"""The public surface: the exports of `radixkv`, sorted, and without torch until it is used."""

from __future__ import annotations

import subprocess
import sys

import radixkv


def test_the_public_names_are_these():
    assert radixkv.__all__ == sorted(radixkv.__all__)
    assert radixkv.__all__ == [
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
    assert all(getattr(radixkv, name) is not None for name in radixkv.__all__)
    assert set(radixkv.__all__) <= set(dir(radixkv))
    assert not hasattr(radixkv, "Nonsense")  # an AttributeError, not another


def test_nothing_is_printed_about_a_step_that_failed():
    code = "import radixkv, logging; logging.getLogger('radixkv.engine.core').error('x')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stderr == b""


def test_importing_radixkv_imports_no_torch():
    code = "import sys, radixkv, radixkv.errors, radixkv.cache; radixkv.PrefixCache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
