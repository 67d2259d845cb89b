"""Handles and outlets alone: who falls behind, who never does, who is told, and that nobody waits for ever."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from queue import Empty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.engine.output import Chunk, Completion, Handle, Outlet, Usage
from radixkv.errors import RequestCancelled, RequestFailed, RequestTimedOut

DONE = Completion("", (), "stop", Usage(1, 0, 1, 0, 0.0, 0.0))


def chunk(number: int) -> Chunk:
    return Chunk("", (number,))


def fill(outlet: Outlet, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        outlet.put(chunk(number))


def reader_of(outlet: Outlet) -> Iterator[Chunk]:
    return iter(Handle(outlet, lambda: None))


def counted(outlet: Outlet) -> list[int]:
    drained: list[int] = []
    outlet.on_drained = lambda: drained.append(1)
    return drained


# ---- backpressure


def test_a_reader_lags_from_the_limit_until_half_of_it_is_read():
    outlet = Outlet(max_unread=4)
    drained = counted(outlet)
    fill(outlet, 1)
    reader = reader_of(outlet)
    next(reader)
    fill(outlet, 3, 1)
    assert not outlet.lagging
    fill(outlet, 1, 4)
    assert outlet.lagging
    fill(outlet, 2, 5)  # the step that was under way
    seen = [next(reader).token_ids[0] for _ in range(3)]
    assert outlet.lagging and not drained
    seen.append(next(reader).token_ids[0])
    assert not outlet.lagging and drained == [1]
    fill(outlet, 1, 7)
    outlet.finish(DONE)
    assert [*seen, *(each.token_ids[0] for each in reader)] == [1, 2, 3, 4, 5, 6, 7]
    assert drained == [1]


def test_nobody_lags_who_does_not_iterate():
    outlet = Outlet(max_unread=2)
    fill(outlet, 100)
    assert not outlet.lagging
    next(reader_of(outlet))  # and leaves again
    fill(outlet, 100, 100)
    assert not outlet.lagging


def test_leaving_the_loop_ends_the_lag():
    outlet = Outlet(max_unread=2)
    drained = counted(outlet)
    fill(outlet, 1)
    for _ in Handle(outlet, lambda: None):
        fill(outlet, 9, 1)
        assert outlet.lagging
        break
    assert not outlet.lagging and drained == [1]


def test_waiting_for_the_result_ends_the_lag_and_may_begin_again_when_it_gives_up():
    outlet = Outlet(max_unread=2)
    drained = counted(outlet)
    fill(outlet, 1)
    reader = reader_of(outlet)
    next(reader)
    fill(outlet, 5, 1)
    assert outlet.lagging
    with outlet.waiting():
        assert not outlet.lagging and drained == [1]
        fill(outlet, 5, 6)
        assert not outlet.lagging
    fill(outlet, 1, 11)
    assert outlet.lagging
    with pytest.raises(TimeoutError):
        outlet.wait(timeout=0)
    assert drained == [1, 1]


def test_one_who_waits_for_the_result_beside_a_reader_who_sleeps_gets_it():
    outlet = Outlet(max_unread=2)
    fill(outlet, 1)
    reader = reader_of(outlet)
    next(reader)
    waits = threading.Event()
    outlet.on_drained = waits.set
    fill(outlet, 2, 1)
    results: list[Completion] = []
    waiter = threading.Thread(target=lambda: results.append(outlet.wait()))
    waiter.start()
    assert waits.wait(timeout=10)  # the engine goes on, for as long as it takes
    fill(outlet, 50, 3)
    assert not outlet.lagging
    outlet.finish(DONE)
    waiter.join(timeout=10)
    assert results == [DONE]
    assert len(list(reader)) == 52


def test_an_ended_request_lags_no_more():
    outlet = Outlet(max_unread=2)
    drained = counted(outlet)
    fill(outlet, 1)
    reader = reader_of(outlet)
    next(reader)
    fill(outlet, 9, 1)
    assert outlet.lagging
    outlet.fail(RequestCancelled("x"))
    assert not outlet.lagging
    assert len(list(reader)) == 9
    assert not drained  # nobody has to be woken for it


@given(st.integers(1, 5), st.lists(st.sampled_from(["put", "take", "leave", "enter", "wait", "unwait"]), max_size=80))
def test_the_lag_follows_its_rule(limit, actions):
    outlet = Outlet(max_unread=limit)
    drained = counted(outlet)
    readers, waiters, unread, lagging, ends = [], [], 0, False, 0
    for action in actions:
        if action == "put":
            outlet.put(chunk(0))
            unread += 1
        elif action == "take" and unread:
            outlet.next_chunk()
            unread -= 1
        elif action in ("enter", "wait"):
            context = outlet.reading() if action == "enter" else outlet.waiting()
            context.__enter__()
            (readers if action == "enter" else waiters).append(context)
        elif action in ("leave", "unwait") and (readers if action == "leave" else waiters):
            (readers if action == "leave" else waiters).pop().__exit__(None, None, None)
        before = lagging
        if action == "put" and readers and not waiters and unread >= limit:
            lagging = True
        if not readers or waiters or unread <= limit // 2:
            lagging = False
        ends += before and not lagging
        assert outlet.lagging == lagging
        assert len(drained) == ends


def test_an_engine_that_pauses_and_a_reader_that_drains_never_wait_for_each_other():
    outlet, count = Outlet(max_unread=2), 20_000
    wake = threading.Semaphore(0)
    outlet.on_drained = wake.release

    def engine() -> None:
        for number in range(count):
            outlet.put(chunk(number))
            while outlet.lagging:
                if not wake.acquire(timeout=20):
                    outlet.fail(RequestFailed("nobody woke the engine"))
                    return
        outlet.finish(DONE)

    thread = threading.Thread(target=engine)
    thread.start()
    assert [each.token_ids[0] for each in Handle(outlet, lambda: None)] == list(range(count))
    thread.join(timeout=10)


def test_a_reader_who_drains_everything_just_as_the_engine_looks_is_seen(monkeypatch):
    outlet = Outlet(max_unread=1)
    fill(outlet, 1)
    reader = reader_of(outlet)
    next(reader)
    drains: list[threading.Thread] = []

    def looks() -> bool:
        seen = Outlet._keeps_up(outlet)
        if not drains:
            drains.append(threading.Thread(target=next, args=(reader,)))
            drains[0].start()
            while not outlet._chunks.empty():
                assert drains[0].is_alive()
        return seen

    monkeypatch.setattr(outlet, "_keeps_up", looks)
    fill(outlet, 1, 1)
    drains[0].join(timeout=10)
    assert not outlet.lagging  # or both would wait for each other


# ---- the end


def test_a_cancelled_stream_just_ends_and_every_other_error_is_raised():
    for error in (RequestTimedOut("t"), RequestFailed("f")):
        outlet = Outlet()
        fill(outlet, 2)
        outlet.fail(error)
        handle, seen = Handle(outlet, lambda: None), []
        with pytest.raises(type(error)):
            seen.extend(handle)
        with pytest.raises(type(error)):
            next(iter(handle))
        with pytest.raises(type(error)):
            handle.result()
        assert handle.done
    outlet = Outlet()
    fill(outlet, 2)
    outlet.fail(RequestCancelled("c"))
    assert len(list(Handle(outlet, lambda: None))) == 2
    with pytest.raises(RequestCancelled):
        outlet.wait()


def test_several_iterators_share_the_chunks_and_all_of_them_end():
    outlet = Outlet()
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(each.token_ids[0] for each in Handle(outlet, lambda: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    fill(outlet, 300)
    outlet.finish(DONE)
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(seen) == list(range(300))


def test_cancelling_asks_the_engine_once_there_is_something_to_cancel():
    outlet, asked = Outlet(), []
    handle = Handle(outlet, lambda: asked.append(1))
    handle.cancel()
    outlet.finish(DONE)
    handle.cancel()
    assert asked == [1]


def test_taking_without_waiting():
    outlet = Outlet()
    with pytest.raises(Empty):
        outlet.next_chunk(block=False)
    fill(outlet, 1)
    outlet.finish(DONE)
    assert outlet.next_chunk(block=False) == chunk(0)
    assert outlet.next_chunk(block=False) is None
    assert outlet.next_chunk(block=False) is None


# ---- listeners


def test_a_listener_is_told_once_at_the_next_chunk_or_at_once():
    outlet, told = Outlet(), []
    outlet.listen(lambda: told.append("first"))
    assert told == []
    fill(outlet, 2)
    assert told == ["first"]
    outlet.listen(lambda: told.append("second"))
    assert told == ["first", "second"]
    outlet.listen(lambda: told.append("end"), end=True)
    fill(outlet, 1)
    assert told == ["first", "second"]
    outlet.next_chunk(), outlet.next_chunk(), outlet.next_chunk()
    outlet.listen(lambda: told.append("end of chunks"))
    outlet.finish(DONE)
    assert told == ["first", "second", "end of chunks", "end"]
    outlet.listen(lambda: told.append("late"), end=True)
    assert told[-1] == "late"


def test_a_listener_that_raises_ends_nothing_but_itself_and_is_logged_once(caplog):
    def broken() -> None:
        raise RuntimeError("Event loop is closed")

    outlet, told = Outlet(), []
    outlet.listen(broken)
    outlet.listen(lambda: told.append(1))
    fill(outlet, 5)
    outlet.finish(DONE)
    assert told == [1]
    assert outlet.wait() == DONE
    assert caplog.text.count("RuntimeError: Event loop is closed") == 1


def test_an_iterator_that_garbage_collection_finds_inside_the_lock_leaves():
    outlet = Outlet(max_unread=2)
    drained = counted(outlet)

    def forget() -> None:
        cycle = [reader_of(outlet)]
        next(cycle[0])
        cycle.append(cycle)  # only the collector finds it

    fill(outlet, 1)
    gc.disable()
    try:
        forget()
        fill(outlet, 2, 1)
        assert outlet.lagging
        with outlet._lock:  # as if it came by while this outlet is at work
            gc.collect()
    finally:
        gc.enable()
    assert not outlet.lagging and drained == [1]
