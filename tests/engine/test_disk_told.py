"""After a restart, tokens from a disk are named wherever cached tokens are: explanations, APIs, the chat, telemetry."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from radixkv import AsyncEngine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.cli.chat import Repl
from radixkv.serve import create_app
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from tests.engine.test_disk_engines import PROMPT, SAVED, fast_disk, load, run
from tests.serve.served import LOCAL
from tests.telemetry.expected import assert_matches_cache
from tests.telemetry.served import runtime_folder

__all__ = ["fast_disk"]  # a fixture of each test
TEXT = "A very long story about a disk that forgot nothing, and about a host that forgot all of it. " * 4
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "0" + TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1" + TEXT}], "max_tokens": 1},
    "/v1/responses": {"input": "2" + TEXT, "max_output_tokens": 1},
}


def test_a_prompt_is_explained_and_its_record_counts_what_was_read(tmp_path: Path) -> None:
    with load(tmp_path / "disk") as engine:
        assert engine.probe(PROMPT).disk == 0
        run(engine)
        assert engine.probe(PROMPT).disk == 0, "it is in memory"
    with runtime_folder(), load(tmp_path / "disk", monitor=True) as engine:
        explained = engine.probe(PROMPT)
        assert (explained.length, explained.host) == (0, 0) and SAVED <= explained.disk < len(PROMPT)
        assert str(explained).startswith(f"0 of 200 tokens are cached, and {explained.disk} more on disk: ")
        assert engine.probe(PROMPT, namespace="other").disk == 0
        monitoring, mirror = engine.monitoring, Mirror()
        assert monitoring is not None
        monitoring.publisher.close()
        engine.client.thread.ask(lambda: monitoring.recorder.cache_recorder.attach(engine.core.cache))
        _, read = run(engine)
        mirror.apply(engine.client.thread.ask(monitoring.recorder.collect))
        [record] = mirror.ended.values()
        assert SAVED <= record.disk_tokens == read <= explained.disk
        assert mirror.stats["disk_tokens"] == 16 * mirror.stats["disk.read_blocks"] == read
        disk = engine.stats().disk
        assert (mirror.stats["disk.records"], mirror.stats["disk.slots"]) == (disk.records, disk.slots)


def test_each_api_counts_the_tokens_that_were_read(tmp_path: Path) -> None:
    details: dict[str, list[dict[str, int]]] = {path: [] for path in BODIES}
    for _ in range(2):
        with load(tmp_path / "disk") as engine, TestClient(create_app(AsyncEngine(engine)), LOCAL) as client:
            for path, body in BODIES.items():
                usage = client.post(path, json={"model": "tiny", **body}).json()["usage"]
                details[path].append(usage.get("prompt_tokens_details") or usage["input_tokens_details"])
    for path, (first, again) in details.items():
        assert "disk_tokens" not in first, path
        assert 32 <= again["disk_tokens"] <= again["cached_tokens"], path


def test_a_chat_in_the_terminal_says_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\n"))
        out = io.StringIO()
        with load(tmp_path / "disk") as engine:
            params = SamplingParams(temperature=0, max_tokens=4)
            Repl(engine, engine.chat(), params, Console(file=out, width=200)).loop()
        said.append(out.getvalue())
    assert ["read from disk" in each for each in said] == [False, True]


def test_a_run_that_arrives_on_the_host_is_recorded() -> None:
    cache, recorder, mirror = PrefixCache(8, 4, host_blocks=8), Recorder(), Mirror()
    recorder.attach(cache)
    mirror.apply(recorder.collect())
    text = [*range(12)]
    blocks = cache.take_host_blocks(text, None, 3)
    cache.arrive(text[:8], None, blocks, 2)
    assert recorder.pending
    mirror.apply(recorder.collect())
    [leaf] = [node for node in mirror.nodes.values() if node.residence == "host"]
    assert (leaf.start, leaf.tokens, leaf.parent in mirror.nodes) == (0, 8, True)
    assert_matches_cache(mirror, cache, recorder._offset)
