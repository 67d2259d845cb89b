"""The engine in asyncio, on a fake model whose answers depend on every token that the pool holds for a request."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from radixkv import AsyncChatSession, AsyncEngine, ChatSession, Engine, SamplingParams
from radixkv.engine import AsyncHandle, Chunk, Handle
from radixkv.engine.output import OutputChannel
from radixkv.errors import EngineClosed, InvalidInput, PinBudgetExceeded, RequestCancelled
from tests.engine.fakes import FakeRunner, check, greedy_reply, make_engine
from tests.engine.test_engine import prompt_of

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = GREEDY.but(max_tokens=1000)
Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    troubles: list[Any] = []

    async def limited() -> Result:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
        return await asyncio.wait_for(main, timeout=30)

    result = asyncio.run(limited())
    assert not troubles
    return result


def make_async(**options: Any) -> tuple[AsyncEngine, FakeRunner]:
    engine, runner = make_engine(**options)
    return AsyncEngine(engine), runner


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread fulfils without a notification."""
    while not condition():
        await asyncio.sleep(0.001)


async def began(runner: FakeRunner, steps: int = 1) -> None:
    for _ in range(steps):
        await asyncio.to_thread(runner.began.acquire, timeout=10)


async def ended(engine: AsyncEngine, **counts: int) -> None:
    """Wait until no request is left; check that no block is held, and the counters."""
    while (stats := await engine.stats()).running or stats.waiting:
        await asyncio.sleep(0.001)
    check(engine._engine)
    assert {name: getattr(stats, name) for name in counts} == counts


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ---- answers


def test_asynchronous_engines_and_sessions_have_the_same_methods():
    for plain, awaited in ((Engine, AsyncEngine), (ChatSession, AsyncChatSession)):
        names = {name for name in vars(plain) | vars(plain.__base__) if not name.startswith("_")} - vars(object).keys()
        assert names <= set(dir(awaited))
        for name in names - {"load"}:
            if callable(method := getattr(plain, name)):
                options = dict(inspect.signature(method).parameters)
                options.pop("progress", None)  # a bar in a terminal
                theirs = inspect.signature(getattr(awaited, name)).parameters
                assert {each: options[each].default for each in options} == {
                    each: theirs[each].default for each in theirs
                }, name
                is_awaited = inspect.iscoroutinefunction(inspect.unwrap(getattr(awaited, name)))
                assert inspect.iscoroutinefunction(getattr(awaited, name)) is is_awaited, name
    assert inspect.iscoroutinefunction(AsyncEngine.generate)


def test_the_loop_runs_during_a_slow_step():
    async def main() -> None:
        engine, runner = make_async()
        runner.gate = threading.Semaphore(0)
        handle = await engine.submit(prompt_of(9), GREEDY)
        await began(runner)
        asked = [asyncio.ensure_future(each) for each in (engine.stats(), engine.probe([1, 2]), engine.clear_cache())]
        submitted = [await engine.submit(prompt_of(9, 1), GREEDY) for _ in range(5)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(each.done() for each in asked) and not handle.done
        runner.gate.release(1000)
        await asyncio.gather(*asked, handle.result(), *(each.result() for each in submitted))
        await engine.close()

    run(main())


def test_requests_get_their_seeds_in_the_order_of_submission(monkeypatch):
    async def main() -> list[tuple[int, ...]]:
        engine, _ = make_async(seed=5)
        request, begun, overtaken = engine.client.inputs.request, [], threading.Event()

        def slow_at_first(*args: Any, **options: Any) -> Any:
            begun.append(1)
            if len(begun) == 1:
                overtaken.wait(timeout=0.05)
            made = request(*args, **options)
            overtaken.set()
            return made

        monkeypatch.setattr(engine.client.inputs, "request", slow_at_first)
        async with engine:
            handles = await asyncio.gather(*(engine.submit(prompt_of(6), GREEDY.but(temperature=1)) for _ in range(8)))
            return [(await handle.result()).token_ids for handle in handles]

    plain, _ = make_engine(seed=5)
    with plain:
        expected = [each.token_ids for each in plain.generate([prompt_of(6)] * 8, GREEDY.but(temperature=1))]
    assert run(main()) == expected


def test_the_other_methods():
    async def main() -> None:
        engine, _ = make_async(num_blocks=16)
        async with engine:
            prompt = prompt_of(20)
            with await engine.warm(prompt, pin=True) as warmed:
                assert (warmed.usage.computed_tokens, warmed.pinned_tokens) == (20, 20)
                assert (await engine.probe(prompt)).matched == 20
                with pytest.raises(PinBudgetExceeded):
                    await engine.warm(prompt_of(30, 9), pin=True)
            assert (await engine.stats()).cache.pinned_blocks == 0
            assert (await engine.warm(prompt)).pinned_tokens == 0
            await engine.demote(prompt, keep=3)
            await engine.clear_cache()
            assert (await engine.probe(prompt)).matched == 0
            assert engine.context_limit == 64 and engine.model.name == "fake"
            for call in (
                engine.submit([]),
                engine.generate([1, 2]),
                engine.warm([1], ttl=3.0),
                engine.demote([1], keep=-1),
                engine.submit([1], timeout=0),
                engine.close(timeout=1.0),
            ):
                with pytest.raises(InvalidInput):
                    await call
        for call in (engine.submit([1]), engine.generate([[1]]), engine.stats(), engine.warm([1]), engine.probe([1])):
            with pytest.raises(EngineClosed):
                await call
        await engine.close()

    run(main())


# ---- cancellation


@pytest.mark.parametrize("how", ["result", "iterate", "held iterator", "generate", "warm"])
@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode"])
def test_cancelling_a_task_cancels_its_request(how, stage):
    async def main() -> None:
        engine, runner = make_async(num_blocks=460, max_sequences=1, max_batch_tokens=8, prefill_chunk=8)
        runner.gate = threading.Semaphore(0)
        if stage == "waiting":
            first = await engine.submit(prompt_of(3, 1), LONG)
            await began(runner)

        async def work() -> object:
            prompt = prompt_of(800 if stage == "prefill" or how == "warm" else 5, 2)
            if how == "generate":
                return await engine.generate([prompt, prompt], LONG)
            if how == "warm":
                return await engine.warm(prompt, pin=True)
            handle = await engine.submit(prompt, LONG)
            if how == "held iterator":
                held.append(aiter(handle))
                return [chunk async for chunk in held[0]]
            return await handle.result() if how == "result" else [chunk async for chunk in handle]

        held: list[Any] = []

        task = asyncio.create_task(work())
        wanted = 2 if how == "generate" else 1
        await until(lambda: engine.client.thread._inbox.qsize() >= wanted if stage == "waiting" else True)
        if stage != "waiting":
            runner.gate.release(4)
            await began(runner, 5)
        await cancelled(task)
        runner.gate.release(10_000)
        if stage == "waiting":
            first.cancel()
        await ended(engine, finished=0, cancelled=wanted + (stage == "waiting"))
        assert len(runner.steps) < 100
        await engine.close()

    run(main())


async def raising(handle: AsyncHandle) -> None:
    async for _ in handle:
        raise ZeroDivisionError


def test_leaving_the_loop_early_cancels():
    async def main() -> None:
        engine, _ = make_async(num_blocks=460)
        async with engine:
            for way in ("break", "raise", "aclose", "forget"):
                handle = await engine.submit(prompt_of(5), LONG)
                if way == "break":
                    async for _ in handle:
                        break
                elif way == "raise":
                    with pytest.raises(ZeroDivisionError):
                        await raising(handle)
                elif way == "aclose":
                    chunks = aiter(handle)
                    await anext(chunks)
                    await until(lambda handle=handle: handle._handle.channel._chunks.qsize() > 3)
                    await chunks.aclose()  # type: ignore[attr-defined]
                    with pytest.raises(StopAsyncIteration):
                        await anext(chunks)
                else:
                    chunks = aiter(handle)
                    await anext(chunks)
                    del chunks
                with pytest.raises(RequestCancelled):
                    await handle.result()
            await ended(engine, cancelled=4, finished=0)
            handle = await engine.submit(prompt_of(5), GREEDY)
            aiter(handle)  # no iteration began
            assert len((await handle.result()).token_ids) == 6

    run(main())


def test_a_cancelled_handle_just_ends_its_loop():
    async def main() -> None:
        engine, _ = make_async(num_blocks=460)
        async with engine:
            handle = await engine.submit(prompt_of(5), LONG)
            async for _ in handle:
                handle.cancel()
            with pytest.raises(RequestCancelled):
                await handle.result()

    run(main())


def test_the_pin_of_a_cancelled_warm_is_released(monkeypatch):
    async def main() -> None:
        engine, _ = make_async()
        pins, go_on, pinned = threading.Event(), threading.Event(), engine.client.core.admission.pin

        def slowly(*args: Any) -> Any:
            pins.set()
            assert go_on.wait(timeout=10)
            return pinned(*args)

        monkeypatch.setattr(engine.client.core.admission, "pin", slowly)
        async with engine:
            task = asyncio.create_task(engine.warm(prompt_of(20), pin=True))
            await until(pins.is_set)
            await cancelled(task)
            go_on.set()
            assert (await engine.probe(prompt_of(20))).matched == 20
            assert (await engine.stats()).cache.pinned_blocks == 0

    run(main())


# ---- backpressure


def test_awaiting_the_result_works_while_an_iterating_task_sleeps():
    async def main() -> None:
        engine, _ = make_async(num_blocks=400)
        async with engine:
            handle = await engine.submit(prompt_of(5), GREEDY.but(max_tokens=500))
            chunks = aiter(handle)
            await anext(chunks)
            await until(lambda: handle._handle.channel.paused)
            assert len((await handle.result()).token_ids) == 500
            assert len([chunk async for chunk in chunks]) == 499

    run(main())


# ---- loops and ends


def test_one_engine_serves_many_loops_and_threads_without_a_loop():
    engine, _ = make_engine(num_blocks=500)
    twin, answers = AsyncEngine(engine), {}

    async def main(seed: int) -> list[int]:
        handle = await twin.submit(prompt_of(9, seed), GREEDY.but(max_tokens=50))
        return [token async for chunk in handle for token in chunk.token_ids]

    def loop(seed: int) -> None:
        answers[seed] = run(main(seed))

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    with engine:
        for thread in threads:
            thread.start()
        mine = engine.generate([prompt_of(9, 9)], GREEDY.but(max_tokens=50))[0]
        for thread in threads:
            thread.join(timeout=30)
        check(engine)
    assert answers == {seed: greedy_reply(prompt_of(9, seed), 50) for seed in range(4)}
    assert list(mine.token_ids) == greedy_reply(prompt_of(9, 9), 50)


@pytest.mark.parametrize("reads", ["asleep", "between two chunks"])
def test_closing_a_loop_cancels_the_requests_that_it_iterates(reads, caplog):
    engine, runner = make_engine(num_blocks=460)
    runner.gate = threading.Semaphore(0)
    twin, loop = AsyncEngine(engine), asyncio.new_event_loop()

    async def main() -> None:
        held["handle"] = await twin.submit(prompt_of(5), LONG)
        held["chunks"] = aiter(held["handle"])
        if reads == "asleep":
            held["task"] = asyncio.ensure_future(anext(held["chunks"]))
            await asyncio.sleep(0)
        else:
            runner.gate.release(1)
            await anext(held["chunks"])

    held: dict[str, Any] = {}
    loop.run_until_complete(main())
    loop.close()
    del held["chunks"]
    runner.gate.release(10_000)
    with pytest.raises(RequestCancelled):
        held["handle"]._handle.result(timeout=10)
    _still_serves(engine, twin)
    assert "Traceback" not in caplog.text
    if "task" in held:
        held["task"]._log_destroy_pending = False  # the test destroys it on purpose


def test_closing_a_loop_that_awaits_a_result_affects_no_other_request(caplog):
    engine, runner = make_engine()
    runner.gate = threading.Semaphore(0)
    twin, loop = AsyncEngine(engine), asyncio.new_event_loop()

    async def main() -> tuple[AsyncHandle, asyncio.Future[Any]]:
        handle = await twin.submit(prompt_of(5), GREEDY)
        task = asyncio.ensure_future(handle.result())
        await asyncio.sleep(0)
        return handle, task

    handle, task = loop.run_until_complete(main())
    loop.close()
    runner.gate.release(10_000)
    assert list(handle._handle.result(timeout=10).token_ids) == greedy_reply(prompt_of(5), 6)
    _still_serves(engine, twin)
    assert "Traceback" not in caplog.text
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def _still_serves(engine: Engine, twin: AsyncEngine) -> None:
    assert run(twin.generate([prompt_of(8)], GREEDY))[0].token_ids == tuple(greedy_reply(prompt_of(8), 6))
    check(engine)
    engine.close()


def test_cancelling_a_task_that_drains_ends_the_draining():
    async def main() -> None:
        engine, runner = make_async(num_blocks=460)
        runner.gate = threading.Semaphore(0)
        handle = await engine.submit(prompt_of(5), LONG)
        await began(runner)
        closing = asyncio.create_task(engine.close(drain=True))
        await until(lambda: engine.client.thread._draining)
        await cancelled(closing)
        runner.gate.release(1)
        with pytest.raises(EngineClosed):
            await handle.result()
        assert len(runner.steps) == 1

    run(main())


def test_a_forgotten_engine_ends_its_threads():
    async def main() -> list[threading.Thread]:
        engine, _ = make_async()
        await engine.generate([[1, 2]], GREEDY)
        await engine.stats()
        return [engine.client.thread._thread, *engine._preparing._threads]

    threads = run(main())
    gc.collect()
    assert len(threads) == 2
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_loading_does_not_block_the_loop(monkeypatch):
    made, _ = make_engine()
    loading, go_on = threading.Event(), threading.Event()

    def load(model: str, config: None, **options: Any) -> Engine:
        assert (model, options) == ("tiny", {"tokenizer": None, "num_blocks": 7})
        loading.set()
        assert go_on.wait(timeout=10)
        return made

    async def main() -> None:
        monkeypatch.setattr(Engine, "load", load)
        task: Awaitable[AsyncEngine] = asyncio.create_task(AsyncEngine.load(num_blocks=7))
        await until(loading.is_set)
        go_on.set()
        async with await task as engine:
            assert list((await engine.generate([[1, 2]], GREEDY))[0].token_ids) == greedy_reply([1, 2], 6)

    run(main())


async def first_of(handle: AsyncHandle) -> Chunk:
    async for chunk in handle:
        return chunk
    raise AssertionError("the handle has no chunks")


def test_a_closed_loop_is_not_kept_by_an_unread_chunk():
    channel, loop = OutputChannel(), asyncio.new_event_loop()
    reader = loop.create_task(first_of(AsyncHandle(Handle(channel, lambda: None))))
    loop.run_until_complete(asyncio.sleep(0))
    channel.put(Chunk("a", (1,)))
    channel.notify()
    loop.close()
    gone = weakref.ref(loop)
    del reader, loop
    gc.collect()
    assert gone() is None
