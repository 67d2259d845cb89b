"""The recordings of a running publisher's flight recorder, and the collections that it waits for."""

from __future__ import annotations

import threading

from radixkv.telemetry import publisher as module
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Delta, Snapshot
from radixkv.telemetry.recording import read_recording
from radixkv.telemetry.records import Changes
from tests.telemetry.served import PATIENCE, many, serving, wait_until
from tests.telemetry.wire import node


def replay(path) -> Mirror:
    mirror, seq = Mirror(), None
    for frame in read_recording(path):
        if isinstance(frame, Delta):
            assert frame.seq == seq + 1, "it is in the snapshot, or one before it is missing"
        if isinstance(frame, (Snapshot, Delta)):
            mirror.apply(frame.changes)
            seq = frame.seq
    return mirror


def test_the_flight_recording_is_the_state_of_now(tmp_path):
    with serving() as (publisher, engine):
        engine.change(*many(100))
        assert publisher.flight(tmp_path / "a.rec") == (tmp_path / "a.rec").stat().st_size
        assert replay(tmp_path / "a.rec").nodes == engine.mirror.nodes
        engine.change(node(3, blocks=(99, 1)))
        publisher.flight(tmp_path / "a.rec")
        assert replay(tmp_path / "a.rec").nodes == engine.mirror.nodes
    publisher.flight(tmp_path / "b.rec")  # after the end, too
    assert replay(tmp_path / "b.rec").nodes == engine.mirror.nodes


def test_the_engines_thread_gives_its_last_changes_and_waits_for_nothing(tmp_path):
    with serving() as (publisher, engine):
        engine.change(node(1))
        publisher.flight(tmp_path / "a.rec")
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting)
        publisher.flight(tmp_path / "a.rec", last=Changes(9.0, nodes=(node(3),)))
        assert list(replay(tmp_path / "a.rec").nodes) == [1, 3]
        engine.answer()


def test_a_stuck_engine_does_not_keep_a_flight_recording_from_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FLIGHT_TIMEOUT", 0.05)
    with serving() as (publisher, engine):
        engine.change(node(1))
        wait_until(lambda: engine.collected)
        engine.stuck = True
        engine.change(node(2))
        publisher.flight(tmp_path / "a.rec")
        assert 2 not in replay(tmp_path / "a.rec").nodes
        engine.answer()


def test_the_end_frees_a_caller_that_waits_to_write_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FLIGHT_TIMEOUT", 1000.0)
    with serving() as (publisher, engine):
        engine.change(node(1))
        publisher.flight(tmp_path / "a.rec")
        engine.stuck = True
        engine.change(node(2))
        writer = threading.Thread(target=publisher.flight, args=(tmp_path / "b.rec",), daemon=True)
        writer.start()
        wait_until(lambda: engine.waiting)
        publisher.close()
        writer.join(PATIENCE)
        assert not writer.is_alive()
        assert list(replay(tmp_path / "b.rec").nodes) == [1]
        engine.answer()
