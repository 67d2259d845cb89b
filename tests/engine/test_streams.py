"""Handles and output channels alone: pauses, waits, ends and listeners; no side waits forever for the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from queue import Empty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.engine.output import Chunk, Completion, Handle, OutputChannel, Usage
from radixkv.errors import RequestCancelled, RequestFailed, RequestTimedOut

DONE = Completion("", (), "stop", Usage(1, 0, 1, 0, 0.0, 0.0))


def chunk(number: int) -> Chunk:
    return Chunk("", (number,))


def fill(channel: OutputChannel, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        channel.put(chunk(number))
        channel.notify()


def reader_of(channel: OutputChannel) -> Iterator[Chunk]:
    return iter(Handle(channel, lambda: None))


def counted(channel: OutputChannel) -> list[int]:
    drained: list[int] = []
    channel.on_drained = lambda: drained.append(1)
    return drained


# ---- backpressure


def test_unread_chunks_do_not_pause_a_request_that_is_not_iterated():
    channel = OutputChannel(max_unread=2)
    fill(channel, 100)
    assert not channel.paused
    next(reader_of(channel))  # and is collected at once
    fill(channel, 100, 100)
    assert not channel.paused


def test_leaving_the_loop_ends_the_pause():
    channel = OutputChannel(max_unread=2)
    drained = counted(channel)
    fill(channel, 1)
    for _ in Handle(channel, lambda: None):
        fill(channel, 9, 1)
        assert channel.paused
        break
    assert not channel.paused and drained == [1]


def test_waiting_for_the_result_ends_the_pause_until_the_wait_times_out():
    channel = OutputChannel(max_unread=2)
    drained = counted(channel)
    fill(channel, 1)
    reader = reader_of(channel)
    next(reader)
    fill(channel, 5, 1)
    assert channel.paused
    with channel.waiting():
        assert not channel.paused and drained == [1]
        fill(channel, 5, 6)
        assert not channel.paused
    fill(channel, 1, 11)
    assert channel.paused
    with pytest.raises(TimeoutError):
        channel.wait(timeout=0)
    assert drained == [1, 1]


def test_waiting_for_the_result_works_while_a_reader_sleeps():
    channel = OutputChannel(max_unread=2)
    fill(channel, 1)
    reader = reader_of(channel)
    next(reader)
    waits = threading.Event()
    channel.on_drained = waits.set
    fill(channel, 2, 1)
    results: list[Completion] = []
    waiter = threading.Thread(target=lambda: results.append(channel.wait()))
    waiter.start()
    assert waits.wait(timeout=10)  # the engine goes on meanwhile
    fill(channel, 50, 3)
    assert not channel.paused
    channel.finish(DONE)
    waiter.join(timeout=10)
    assert results == [DONE]
    assert len(list(reader)) == 52


def test_an_ended_request_is_not_paused():
    channel = OutputChannel(max_unread=2)
    drained = counted(channel)
    fill(channel, 1)
    reader = reader_of(channel)
    next(reader)
    fill(channel, 9, 1)
    assert channel.paused
    channel.fail(RequestCancelled("x"))
    assert not channel.paused
    assert len(list(reader)) == 9
    assert not drained  # the engine need not wake for it


@given(st.integers(1, 5), st.lists(st.sampled_from(["put", "take", "leave", "enter", "wait", "unwait"]), max_size=80))
def test_pauses_follow_their_rule(limit, actions):
    channel = OutputChannel(max_unread=limit)
    drained = counted(channel)
    readers, waiters, unread, paused, ends = [], [], 0, False, 0
    for action in actions:
        if action == "put":
            channel.put(chunk(0))
            unread += 1
        elif action == "take" and unread:
            channel.next_chunk()
            unread -= 1
        elif action in ("enter", "wait"):
            context = channel.reading() if action == "enter" else channel.waiting()
            context.__enter__()
            (readers if action == "enter" else waiters).append(context)
        elif action in ("leave", "unwait") and (readers if action == "leave" else waiters):
            (readers if action == "leave" else waiters).pop().__exit__(None, None, None)
        before = paused
        if action == "put" and readers and not waiters and unread >= limit:
            paused = True
        if not readers or waiters or unread <= limit // 2:
            paused = False
        ends += before and not paused
        assert channel.paused == paused
        assert len(drained) == ends


def test_a_pausing_engine_and_a_draining_reader_never_deadlock():
    channel, count = OutputChannel(max_unread=2), 20_000
    wake = threading.Semaphore(0)
    channel.on_drained = wake.release

    def engine() -> None:
        for number in range(count):
            channel.put(chunk(number))
            while channel.paused:
                if not wake.acquire(timeout=20):
                    channel.fail(RequestFailed("the engine was not woken"))
                    return
        channel.finish(DONE)

    thread = threading.Thread(target=engine)
    thread.start()
    assert [each.token_ids[0] for each in Handle(channel, lambda: None)] == list(range(count))
    thread.join(timeout=10)


def test_a_reader_that_drains_during_the_engines_check_resumes_the_request(monkeypatch):
    channel = OutputChannel(max_unread=1)
    fill(channel, 1)
    reader = reader_of(channel)
    next(reader)
    drains: list[threading.Thread] = []

    def looks() -> bool:
        seen = OutputChannel._may_resume(channel)
        if not drains:
            drains.append(threading.Thread(target=next, args=(reader,)))
            drains[0].start()
            while not channel._chunks.empty():
                assert drains[0].is_alive()
        return seen

    monkeypatch.setattr(channel, "_may_resume", looks)
    fill(channel, 1, 1)
    drains[0].join(timeout=10)
    assert not channel.paused  # otherwise a deadlock


# ---- the end


def test_a_cancelled_stream_just_ends_and_every_other_error_is_raised():
    for error in (RequestTimedOut("t"), RequestFailed("f")):
        channel = OutputChannel()
        fill(channel, 2)
        channel.fail(error)
        handle, seen = Handle(channel, lambda: None), []
        with pytest.raises(type(error)):
            seen.extend(handle)
        with pytest.raises(type(error)):
            next(iter(handle))
        with pytest.raises(type(error)):
            handle.result()
        assert handle.done
    channel = OutputChannel()
    fill(channel, 2)
    channel.fail(RequestCancelled("c"))
    assert len(list(Handle(channel, lambda: None))) == 2
    with pytest.raises(RequestCancelled):
        channel.wait()


def test_several_iterators_share_the_chunks_and_all_of_them_end():
    channel = OutputChannel()
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(each.token_ids[0] for each in Handle(channel, lambda: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    fill(channel, 300)
    channel.finish(DONE)
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(seen) == list(range(300))


def test_cancelling_notifies_the_engine_only_before_the_end():
    channel, asked = OutputChannel(), []
    handle = Handle(channel, lambda: asked.append(1))
    handle.cancel()
    channel.finish(DONE)
    handle.cancel()
    assert asked == [1]


def test_taking_without_waiting():
    channel = OutputChannel()
    with pytest.raises(Empty):
        channel.next_chunk(block=False)
    fill(channel, 1)
    channel.finish(DONE)
    assert channel.next_chunk(block=False) == chunk(0)
    assert channel.next_chunk(block=False) is None
    assert channel.next_chunk(block=False) is None


# ---- listeners


def test_a_listener_is_called_once_at_the_next_chunk_or_at_once():
    channel, calls = OutputChannel(), []
    channel.listen(lambda: calls.append("first"))
    assert calls == []
    fill(channel, 2)
    assert calls == ["first"]
    channel.listen(lambda: calls.append("second"))
    assert calls == ["first", "second"]
    channel.listen(lambda: calls.append("end"), end=True)
    fill(channel, 1)
    assert calls == ["first", "second"]
    channel.next_chunk(), channel.next_chunk(), channel.next_chunk()
    channel.listen(lambda: calls.append("end of chunks"))
    channel.finish(DONE)
    assert calls == ["first", "second", "end of chunks", "end"]
    channel.listen(lambda: calls.append("late"), end=True)
    assert calls[-1] == "late"


def test_listeners_of_chunks_are_called_together_at_the_end_of_a_step():
    channels, calls = [OutputChannel() for _ in range(3)], []
    for number, channel in enumerate(channels):
        channel.listen(lambda number=number: calls.append(number))
        channel.put(chunk(0))
    assert calls == []
    for channel in channels:
        channel.notify()
        channel.notify()
    assert calls == [0, 1, 2]
    channels[0].put(chunk(1))
    channels[0].listen(lambda: calls.append("at once"))  # the chunk is there, so that no call is waited for
    assert calls == [0, 1, 2, "at once"]


def test_a_listener_that_raises_is_logged_once_and_affects_no_other(caplog):
    def broken() -> None:
        raise RuntimeError("Event loop is closed")

    channel, calls = OutputChannel(), []
    channel.listen(broken)
    channel.listen(lambda: calls.append(1))
    fill(channel, 5)
    channel.finish(DONE)
    assert calls == [1]
    assert channel.wait() == DONE
    assert caplog.text.count("RuntimeError: Event loop is closed") == 1


def test_garbage_collection_of_an_iterator_inside_the_lock_does_not_deadlock():
    channel = OutputChannel(max_unread=2)
    drained = counted(channel)

    def forget() -> None:
        cycle = [reader_of(channel)]
        next(cycle[0])
        cycle.append(cycle)  # only the garbage collector frees it

    fill(channel, 1)
    gc.disable()
    try:
        forget()
        fill(channel, 2, 1)
        assert channel.paused
        with channel._lock:  # as if garbage were collected inside the channel
            gc.collect()
    finally:
        gc.enable()
    assert not channel.paused and drained == [1]
