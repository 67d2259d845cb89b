"""A core over a fake model, without its thread, and the requests of its tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from radixkv import AuditReport, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.audit import Auditor
from radixkv.engine.core import Core
from radixkv.engine.input_processor import replies_of
from radixkv.engine.request import Request
from radixkv.engine.scheduler import Work
from tests.engine.fakes import FakeRunner, add_host, greedy_reply, sized

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SIZE = 4  # tokens of a block


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(49), k=length)


class World:
    """A core without its thread; each step checks every invariant of the cache.

    `host_blocks` give it a host tier, and `snapshots` a model with recurrent state, of a runner that has one.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = SIZE,
        config: EngineConfig | None = None,
        *,
        runner: Callable[[int, int], Any] = FakeRunner,
        host_blocks: int = 0,
        speed: float = 10.0,
        snapshots: int = 0,
        reuse: bool = True,
        depth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = replace(config or EngineConfig(), prefix_cache=reuse)
        rows = config.max_sequences if snapshots else 0
        self.cache = PrefixCache(
            num_blocks, block_size, clock=clock, host_blocks=host_blocks, state_rows=rows, state_snapshots=snapshots
        )
        self.runner = runner(num_blocks, block_size)
        if host_blocks:
            self.host = add_host(self.runner, host_blocks, speed)
        self.core = Core(self.cache, self.runner, config, depth=depth)
        self.auditor = Auditor(self.core)
        self.requests: list[Request] = []
        self.work: list[Work] = []
        schedule = self.core._schedule

        def scheduling() -> list[Work]:
            self.work = schedule()
            return self.work

        self.core._schedule = scheduling  # type: ignore[method-assign]

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        ids, stop_ids = np.array(prompt, np.int32), frozenset(params.stop_token_ids)
        given = {"max_tokens": params.max_tokens, "replies": replies_of(params, params.max_tokens, stop_ids)} | more
        request = Request(ids, params, stop_ids=stop_ids, seed=params.seed or 0, **given)
        self.core.admission.check_fits(request)
        self.core.add(request)
        self.requests.append(request)
        return request

    def step(self) -> list[tuple[int, int]]:
        """Run a step; returns (start, tokens) of each chunk."""
        self.work = []
        self.core.step()
        self.cache.check()
        return [(each.start, len(each.tokens)) for each in self.work if each.sources is None]

    def finish(self, most: int = 10_000) -> int:
        """Step until all requests have ended; returns the number of steps."""
        for steps in range(most):
            if not self.core.busy and self.core.idle_for() is None:
                stats = self.cache.stats()
                assert stats.sequences == 0 and stats.held_blocks == stats.pinned_blocks
                return steps
            self.step()
        raise AssertionError(f"not finished after {most} steps")

    def answer(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        """Run a request alone, and check its answer."""
        request = self.submit(prompt, params, **more)
        self.finish()
        assert is_right(request)
        return request

    def cached(self, prompt: Sequence[int], namespace: Any = None) -> int:
        return self.cache.match(list(prompt), namespace).length

    def offload(self, prompt: Sequence[int]) -> None:
        """Run other requests until the device has nothing of a prompt."""
        for seed in range(1000, 1050):
            if not self.cached(prompt):
                return
            self.answer(tokens(4 * SIZE, seed))
        raise AssertionError("it is still on the device")

    def loads(self) -> list[int]:
        """Return the tokens of each load of this step."""
        return [len(each.tokens) for each in self.work if each.sources is not None]

    def begin_audit(self, blocks: int) -> Future[AuditReport]:
        future: Future[AuditReport] = Future()
        self.auditor.begin(blocks, future)
        return future

    def audit(self, blocks: int) -> AuditReport:
        """Run an audit between two steps of the requests."""
        future = self.begin_audit(blocks)
        while not future.done():
            self.auditor.step(busy=self.core.busy)
            self.cache.check()
        return future.result()


def host_world(num_blocks: int = 24, host_blocks: int = 100, config: EngineConfig | None = None, **more: Any) -> World:
    """Return a world with a host tier, and small steps."""
    return World(num_blocks, SIZE, config or sized(4, 36, 16), host_blocks=host_blocks, **more)


def answer(request: Request) -> list[int]:
    return list(request.channel.wait(0).token_ids)


def is_right(request: Request) -> bool:
    done = request.channel.wait(0)
    expected = tuple(greedy_reply(request.prompt.tolist(), request.max_tokens))
    return all(each.token_ids == expected for each in (done, *done.alternatives))


def usage(request: Request) -> Any:
    return request.channel.wait(0).usage


def failing(kind: str, times: int = 1 << 30) -> Callable[[str], None]:
    left = [times]

    def fault(done: str) -> None:
        if kind in (done, "both") and left[0]:
            left[0] -= 1
            raise RuntimeError(f"no {done}")

    return fault
