"""A router is told every change once and in order, also if a publication fails."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

from radixkv import Engine
from radixkv.fleet import publisher
from radixkv.fleet.publisher import Publisher, salt_of
from radixkv.telemetry.records import NamespaceId


class FakePublisher:
    """Dynamo's: its first publications fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.events: list[dict[str, Any]] = []

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the router cannot be reached")
        self.events += events


def test_nothing_is_lost_when_publications_fail(monkeypatch: Any) -> None:
    monkeypatch.setattr(publisher, "INTERVAL", 0.001)
    blocks, loads, moments = FakePublisher(2), [], []
    with Engine.load("tiny", num_blocks=64) as engine:
        made = Publisher(engine.client, SimpleNamespace)
        made.publish_loads(SimpleNamespace(publish=lambda rank, load: loads.append((rank, load))))
        made.start(blocks)
        engine.generate([list(range(3, 51))], namespace="ann", params=None)
        while not blocks.events or not any(load.kv_cache_hit_rate is not None for _, load in loads):
            moments.append(engine.stats())  # waits for the engine's thread
        engine.clear_cache()
        while blocks.events[-1]["type"] != "removed":
            moments.append(engine.stats())
        made.close()
        made.close()
    stored = [each for each in blocks.events if each["type"] == "stored"]
    assert stored[0]["token_ids"][:48] == list(range(3, 51))
    assert {each["cache_salt"] for each in stored} == {"ann"}
    assert all(each["num_block_tokens"] == [16] * len(each["block_hashes"]) for each in stored)
    hashes = [number for each in stored for number in each["block_hashes"]]
    removed = [number for each in blocks.events if each["type"] == "removed" for number in each["block_hashes"]]
    assert sorted(removed) == sorted(hashes)
    assert loads[-1][1].kv_total_blocks == 64


def test_an_engine_that_breaks_ends_its_process(monkeypatch: Any) -> None:
    """A worker without an engine would stay in the fleet, and look idle to the router."""
    monkeypatch.setattr(publisher, "INTERVAL", 0.001)
    signals: list[tuple[int, int]] = []
    with Engine.load("tiny", num_blocks=64) as engine:
        monkeypatch.setattr(publisher.os, "kill", lambda *each: signals.append(each))
        made = Publisher(engine.client, SimpleNamespace)
        made.publish_loads(FakePublisher(0))
        made.start(FakePublisher(0))
        engine.client.thread.stop()
        while not made.broken:
            time.sleep(0.001)
        made.close()
    assert signals == [(os.getpid(), signal.SIGTERM)]


def test_the_salt_of_a_namespace_is_what_its_client_sent() -> None:
    assert salt_of(None) is None
    assert salt_of(NamespaceId(3, "ann")) == "ann"
