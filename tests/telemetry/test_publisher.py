"""The frames of a healthy client; errors of the engine's side do not end the publisher."""

from __future__ import annotations

import asyncio
import logging

from radixkv.telemetry import frame_log
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Delta, Hello, Snapshot, encode
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.records import Changes
from tests.telemetry.served import Engine, Reader, many, runtime_folder, serving, wait_until
from tests.telemetry.wire import FACTS, node


def test_a_delta_carries_only_stats_that_changed_and_are_numbers():
    known = Mirror()
    known.apply(Changes(1.0, stats={"a": 1.0, "b": 2.0}))
    changes = Changes(2.0, stats={"a": 1.0, "b": 3.0, "c": float("nan")})
    assert frame_log._with_changed_stats(changes, known).stats == {"b": 3.0}
    reset = Changes(2.0, reset=True, stats={"a": 1.0, "b": 3.0})
    assert frame_log._with_changed_stats(reset, known) == reset


def test_hello_a_snapshot_and_every_delta():
    with serving() as (publisher, engine):
        engine.change(*many(50))
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 2)
        assert reader.frames[0] == Hello(FACTS, seq=reader.frames[0].seq, ts=reader.frames[0].ts)
        assert isinstance(reader.frames[1], Snapshot)
        for step in range(5):
            engine.change(node(step + 1, blocks=(1000 + step, 1)))
            reader.until_current(engine)
        assert reader.gaps == 0
        reader.close()


def test_a_quiet_engine_gives_signs_of_life_and_is_not_asked():
    with serving() as (publisher, engine):
        reader = Reader(publisher.path)
        reader.until(lambda: sum(isinstance(frame, Delta) for frame in reader.frames) >= 2)
        assert engine.collected == 0
        reader.close()


def test_large_snapshots_come_in_pages_and_deltas_after_them():
    with serving() as (publisher, engine):
        engine.change(*many(2000))
        first = Reader(publisher.path)
        first.until_current(engine)
        first.close()
        readers = [Reader(publisher.path) for _ in range(3)]
        for step in range(8):
            engine.change(node(step + 1, blocks=(7, step + 1)))
            for reader in readers:
                reader.read()
        for reader in readers:
            reader.until_current(engine)
            assert max(frame.pages for frame in reader.frames if isinstance(frame, Snapshot)) > 1
            reader.close()


def test_a_large_tree_is_packed_in_pieces_with_rests_between(monkeypatch):
    rests = []
    monkeypatch.setattr(frame_log, "_pause", lambda: rests.append(1))
    with serving() as (publisher, engine):
        engine.change(*many(2000))
        for _ in range(2):  # the second reader gets the whole state
            reader = Reader(publisher.path)
            reader.until_current(engine)
            reader.close()
    pages = max(frame.pages for frame in reader.frames if isinstance(frame, Snapshot))
    assert len(rests) >= 2 * (pages - 1) > 10  # while cutting and while encoding
    assert max(len(encode(frame)) for frame in reader.frames if isinstance(frame, Snapshot)) < 64 * 1024


def test_a_client_that_comes_during_a_long_step_gets_the_last_state():
    with serving() as (publisher, engine):
        first = Reader(publisher.path)
        engine.change(node(1))
        first.until_current(engine)
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting, "the publisher asked")
        second = Reader(publisher.path)
        second.until(lambda: len(second.frames) >= 2)
        assert list(second.mirror.nodes) == [1]
        second.until(lambda: len(second.frames) >= 4)  # heartbeats in the meantime
        assert engine.waiting
        assert len(engine.waiting) == 1  # not requested again
        engine.answer()
        for reader in (first, second):
            reader.until_current(engine)
            reader.close()


def test_what_the_engine_had_answered_is_told_before_the_end(monkeypatch):
    with serving() as (publisher, engine):
        reader = Reader(publisher.path)
        engine.change(node(1))
        reader.until_current(engine)
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting)
        monkeypatch.setattr(publisher._collector, "_woken", asyncio.Event())  # too late for a turn
        engine.answer()
        publisher.close("enough")
        assert reader.until_the_end() == "enough"
        assert list(reader.mirror.nodes) == [1, 2]
        reader.close()


# ---- faults of the engine's side


def test_what_the_engines_side_raises_is_logged_once_and_serving_goes_on(caplog):
    class Failing(Engine):
        def pending(self):
            raise RuntimeError("no idea")

    engine = Failing()
    with runtime_folder(), caplog.at_level(logging.WARNING):
        publisher = Publisher(FACTS, engine.collect, engine.pending)
        publisher.start()
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 4)
        reader.close()
        publisher.close()
    assert caplog.text.count("telemetry could not be collected: RuntimeError('no idea')") == 1
