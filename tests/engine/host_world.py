"""A core with a host tier over the fake model, and the requests of its tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
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
    """A core with a host tier over a fake model, without its thread; each step checks every invariant of the cache."""

    def __init__(
        self,
        num_blocks: int = 24,
        host_blocks: int = 100,
        config: EngineConfig | None = None,
        *,
        speed: float = 10.0,
    ) -> None:
        self.cache = PrefixCache(num_blocks, SIZE, host_blocks=host_blocks)
        self.runner = self.new_runner(num_blocks)
        self.host = add_host(self.runner, host_blocks, speed)
        self.core = Core(self.cache, self.runner, config or sized(4, 36, 16))
        self.work: list[Work] = []
        schedule = self.core._schedule

        def scheduling() -> list[Work]:
            self.work = schedule()
            return self.work

        self.core._schedule = scheduling  # type: ignore[method-assign]

    def new_runner(self, num_blocks: int) -> FakeRunner:
        return FakeRunner(num_blocks, SIZE)

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        ids, replies = np.array(prompt, np.int32), replies_of(params, params.max_tokens)
        request = Request(ids, params, params.max_tokens, frozenset(), params.seed or 0, replies=replies, **more)
        self.core.admission.check_fits(request)
        self.core.add(request)
        return request

    def step(self) -> None:
        self.core.step()
        self.cache.check()

    def finish(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.core.busy:
                stats = self.cache.stats()
                assert stats.sequences == 0 and stats.held_blocks == stats.pinned_blocks
                return
            self.step()
        raise AssertionError("not finished")

    def answer(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        request = self.submit(prompt, params, **more)
        self.finish()
        assert is_right(request)
        return request

    def offload(self, prompt: Sequence[int]) -> None:
        """Run other requests until the device has nothing of a prompt."""
        for seed in range(1000, 1050):
            if not self.cache.match(list(prompt)).length:
                return
            self.answer(tokens(4 * SIZE, seed))
        raise AssertionError("it is still on the device")

    def loads(self) -> list[int]:
        """Return the tokens of each load of this step."""
        return [len(each.tokens) for each in self.work if each.sources is not None]


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
