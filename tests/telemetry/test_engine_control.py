"""A monitor's commands change a real engine, over its real socket, as their replies and the engine's log say."""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv.chat import Engine
from radixkv.errors import CancelledByMonitor
from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.protocol import Command, Hello, Reply, encode
from radixkv.telemetry.records import NodeRecord
from tests.engine.fakes import FakeRunner, check, greedy_reply, make_engine
from tests.telemetry.served import Reader, runtime_folder, wait_until

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LOGGER = "radixkv.engine.observers.engine_control"
SELF = f"radixkv-monitor (pid {os.getpid()})"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with runtime_folder() as path:
        yield path


class Monitor(Reader):
    """A reader that sends commands."""

    _ids = itertools.count(1)

    def command(self, verb: str, number: int) -> Reply:
        """Send a command and wait for its reply."""
        name = next(self._ids)
        self.socket.sendall(encode(Command(name, verb, number)))
        found: list[Reply] = []

        def replied() -> bool:
            found[:] = [each for each in self.frames if isinstance(each, Reply) and each.id == name]
            return bool(found)

        self.until(lambda: replied() or self.bye, "the reply")
        assert self.bye is None, self.bye
        return found[0]

    def node(self, true: Callable[[NodeRecord], bool]) -> NodeRecord:
        """Wait for a node."""
        self.until(lambda: any(map(true, self.mirror.nodes.values())), "the node")
        return next(filter(true, self.mirror.nodes.values()))

    def root(self, namespace: str | None) -> NodeRecord:
        return self.node(lambda each: each.parent == 0 and each.namespace == namespace)


@contextmanager
def watched(**settings: Any) -> Iterator[tuple[Engine, FakeRunner, Monitor]]:
    engine, runner = make_engine(100, 4, **{"monitor": "rw", **settings})
    with engine:
        assert engine.monitoring is not None
        monitor = Monitor(engine.monitoring.publisher.path)
        monitor.until(lambda: monitor.frames)
        yield engine, runner, monitor
        check(engine)
        monitor.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(each.levelno, each.getMessage()) for each in caplog.records if each.name == LOGGER]


def test_cancel_ends_one_request_and_says_so_to_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    with watched() as (engine, runner, monitor):
        runner.gate = threading.Semaphore(0)
        long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        first, other = engine.submit([1, 2, 3], long), engine.submit([4, 5, 6], FOUR)
        runner.gate.release(4)
        wait_until(lambda: len(runner.steps) == 4)
        runner.gate.release(1)
        thread = threading.Thread(target=lambda: [runner.gate.release() for _ in range(400)])
        thread.start()
        reply = monitor.command("cancel", 1)
        thread.join()
        assert reply.done and reply.text.startswith("cancelled request 1 after ")
        with pytest.raises(CancelledByMonitor, match=f"cancelled by radixkv-monitor .pid {os.getpid()}"):
            first.result()
        assert other.result().token_ids == tuple(greedy_reply([4, 5, 6], 4))
        again = monitor.command("cancel", 1)
        assert (again.done, again.text) == (False, "request 1 has ended already")
        assert not monitor.command("cancel", 999).done
        assert lines(caplog) == [(logging.WARNING, f"{SELF} {reply.text}")]
        stats = engine.stats()
        assert (stats.cancelled, stats.failed, stats.finished) == (1, 0, 1)
        runner.gate.release(400)


def test_pins_of_the_monitor_hold_until_they_are_released(caplog: pytest.LogCaptureFixture) -> None:
    with watched() as (engine, _, monitor):
        engine.generate([list(range(20))], FOUR)
        leaf = monitor.node(lambda each: each.tokens == 23)
        reply = monitor.command("pin", leaf.id)
        assert (reply.done, reply.text) == (True, f"pinned the 23 tokens up to the end of node {leaf.id}: 6 blocks")
        monitor.node(lambda each: each.id == leaf.id and each.pins == 1)
        assert monitor.command("clear", monitor.root(None).id).text.endswith("; requests or pins hold the rest")
        assert engine.probe(list(range(20))).length == 20
        assert not monitor.command("demote", leaf.id).done
        with engine.warm(list(range(20)), pin=True), engine.warm([*range(20), *greedy_reply(range(20), 3)], pin=True):
            monitor.node(lambda each: each.id == leaf.id and each.pins == 2)
            released = monitor.command("unpin", leaf.id)
            assert released.text == f"released 2 pins at node {leaf.id}: 1 of a monitor, 1 of the engine's callers"
            assert engine.stats().cache.pinned_blocks == 5
        nothing = monitor.command("unpin", leaf.id)
        assert (nothing.done, "no pin ends" in nothing.text) == (False, True)
        assert [level for level, _ in lines(caplog)] == [logging.WARNING] * 3
        assert engine.stats().cache.pinned_blocks == 0


def test_demote_makes_a_node_the_next_victim() -> None:
    with watched() as (engine, _, monitor):
        engine.generate([[1, *range(20)]], FOUR)
        engine.generate([[2, *range(20)]], FOUR)
        old, new = (monitor.node(lambda each, head=head: each.head[:1] == (head,)) for head in (1, 2))
        monitor.until(lambda: tuple(monitor.mirror.next_victims or ()) == (old.id, new.id))
        reply = monitor.command("demote", new.id)
        assert reply.text == f"demoted node {new.id}: its 24 tokens are evicted before others"
        monitor.until(lambda: tuple(monitor.mirror.next_victims or ()) == (new.id, old.id))
        assert monitor.mirror.nodes[new.id].demoted


@pytest.mark.parametrize("name", [None, "ann", ("ann", 1)])
def test_clear_forgets_one_namespace_and_no_other(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt = list(range(20))
    with watched() as (engine, _, monitor):
        for namespace in (None, "ann", ("ann", 1)):
            engine.generate([prompt], FOUR, namespace=namespace)
        label = {None: None, "ann": "ann", ("ann", 1): "(ann, 1)"}[name]
        root = monitor.root(label)
        reply = monitor.command("clear", root.id)
        called = "the default namespace" if label is None else f"namespace {label!r}"
        assert reply.text == f"cleared {called}: freed 6 blocks; nothing of it is left"
        for namespace in (None, "ann", ("ann", 1)):
            assert engine.probe(prompt, namespace=namespace).length == (0 if namespace == name else 20)
        monitor.until(lambda: root.id not in monitor.mirror.nodes)
        assert lines(caplog) == [(logging.WARNING, f"{SELF} {reply.text}")]
        assert monitor.command("clear", root.id).text == f"namespace {root.id} is gone: nothing of it is cached"
        assert engine.generate([prompt], FOUR, namespace=name)[0].token_ids == tuple(greedy_reply(prompt, 4))


def test_a_wrong_kind_of_node_is_refused() -> None:
    with watched() as (engine, _, monitor):
        engine.generate([list(range(20))], FOUR)
        leaf, root = monitor.node(lambda each: each.tokens == 23), monitor.root(None)
        for verb in ("pin", "unpin", "demote"):
            assert "is a namespace" in monitor.command(verb, root.id).text
            assert "is gone" in monitor.command(verb, 12345).text
        assert monitor.command("clear", leaf.id).text == f"node {leaf.id} is not a namespace"
        assert engine.probe(list(range(20))).length == 20


@pytest.mark.parametrize("monitor", [True, "tcp://127.0.0.1:0", "rw+tcp://127.0.0.1:0"])
def test_engines_execute_no_command_unless_they_are_loaded_so(monitor: Any) -> None:
    with watched(monitor=monitor) as (engine, _, reader):
        publisher = engine.monitoring.publisher  # type: ignore[union-attr]
        assert (publisher.tcp is None) == (monitor is True)
        first = reader.frames[0]
        assert isinstance(first, Hello) and first.facts.control == (monitor not in (True, "tcp://127.0.0.1:0"))
        engine.generate([list(range(20))], FOUR)
        if first.facts.control:
            assert reader.command("clear", reader.root(None).id).done
            return
        reader.socket.sendall(encode(Command(1, "clear", reader.root(None).id)))
        assert "monitor='rw'" in (reader.until_the_end() or "")
        assert engine.probe(list(range(20))).length == 20


STORMS: dict[str, dict[str, Any]] = {"one tier": {}, "two tiers": {"host_blocks": 40}, "states": {"snapshots": 6}}


@pytest.mark.parametrize("kind", STORMS)
def test_commands_at_random_moments_change_no_answer(kind: str) -> None:
    rng = random.Random(7)
    engine, _ = make_engine(60, 4, monitor="rw", max_sequences=6, **STORMS[kind])
    with engine:
        assert engine.monitoring is not None
        monitor = Monitor(engine.monitoring.publisher.path)
        monitor.until(lambda: monitor.frames, "the hello")
        running: list[tuple[list[int], Any]] = []
        commands, submitted = ("cancel", "pin", "unpin", "demote", "clear"), 0
        verbs: Counter[tuple[str, bool]] = Counter()
        texts: set[str] = set()
        words = {"in host memory", " on the host"} if kind == "two tiers" else set()
        answers = {"right": 0, "cancelled": 0}
        turn = 0
        while turn < 30 or running or not all(verbs[verb, True] for verb in commands) or words - texts:
            turn += 1
            if len(running) < 6:
                submitted += 1
                prompt = [turn % 3, *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
                params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0, ignore_eos=True)
                handle = engine.submit(prompt, params, namespace=rng.choice((None, "ann", "ben")))
                running.append((prompt, handle))
            verb = rng.choice((*commands, "pin"))
            known = [each for each in monitor.mirror.nodes.values() if (each.parent == 0) == (verb == "clear")]
            if verb == "unpin":
                known = [each for each in known if each.pins] or known
            at = [each.id for each in known] if verb != "cancel" else [*monitor.mirror.live, submitted]
            reply = monitor.command(verb, rng.choice(at or [turn]))
            verbs[verb, reply.done] += 1
            texts |= {word for word in words if word in reply.text}
            assert turn < 3000, verbs
            if len(running) == 6:
                for prompt, handle in running:
                    try:
                        tokens = handle.result().token_ids
                        assert tokens == tuple(greedy_reply(prompt, len(tokens)))
                        answers["right"] += 1
                    except CancelledByMonitor:
                        answers["cancelled"] += 1
                running.clear()
                engine.client.thread.ask(engine.core.cache.check)
        assert answers["right"] > 5 and answers["cancelled"] == engine.stats().cancelled > 0
        monitor.close()
