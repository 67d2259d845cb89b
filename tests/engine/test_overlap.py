"""The overlapped core: launches come before the results of the preceding step, and late results hurt no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.input_processor import replies_of
from radixkv.engine.request import Request
from radixkv.errors import DeviceLost, RequestCancelled, RequestFailed
from radixkv.models.loaded import SequenceInput
from tests.simulation.constraint import Rule, RuleMatcher
from tests.simulation.late import LateLogits, LatePending, LateSampler, LateSlotModel
from tests.simulation.oracle import replies

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = (3, 1, 4, 1, 5)
SETTINGS = EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=16)


class Recorded(LateSlotModel):
    """Records launches and reads in `events`, and the rows that were read from the device in `relayed`."""

    def __init__(self, cache: PrefixCache) -> None:
        self.events: list[str] = []
        self.relayed: list[list[int]] = []
        self.raises: Callable[[int], bool] = lambda run: False
        super().__init__(cache, seed=0)

    def run(  # type: ignore[override]
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: LatePending | None = None
    ) -> LateLogits:
        self.events.append("launch")
        if self.raises(len(self.events)):
            raise RuntimeError("the launch failed")
        self.relayed.append([chunk.sampled_row for chunk in chunks])
        return super().run(chunks, copies, sampled)


class RecordedPending(LatePending):
    """Notes the first read."""

    def result(self) -> Any:
        self._model.events.append("read")  # type: ignore[attr-defined]
        return super().result()


class World:
    """An overlapped core over a simulated device."""

    def __init__(self, blocks: int = 64, config: EngineConfig = SETTINGS) -> None:
        self.cache = PrefixCache(blocks, 4)
        self.model = Recorded(self.cache)
        sampler: Any = LateSampler(self.model, RecordedPending)
        self.core = Core(self.cache, self.model, config, sampler=sampler, depth=1)  # type: ignore[arg-type]

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        stop_ids = more.pop("stop_ids", frozenset())
        replies = replies_of(params, params.max_tokens, stop_ids, matcher=more.pop("matcher", None))
        request = Request(np.array(prompt, np.int32), params, params.max_tokens, stop_ids, 0, replies=replies, **more)
        self.core.add(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()
            self.cache.check()
            assert self.model.broken is None, self.model.broken

    def finish(self) -> None:
        while self.core.idle_for() is not None:
            self.step()
        assert not self.cache.state.open


def answer(request: Request) -> tuple[int, ...]:
    return request.channel.wait(0).token_ids


def right(request: Request) -> tuple[int, ...]:
    done = replies(tuple(request.prompt.tolist()), request.params, request.max_tokens, request.stop_ids, request.seed)
    return done[0].tokens


def test_each_step_is_launched_before_the_results_of_the_preceding_one_are_read() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.finish()
    assert world.model.events == ["launch", *["launch", "read"] * 7, "read"]
    assert world.model.relayed == [[-1], *[[0]] * 7]
    assert answer(one) == right(one)
    assert world.core.counters.wasted_tokens == 0, "max_tokens is known in advance"


def test_a_stop_token_wastes_one_row() -> None:
    reply = replies(PROMPT, GREEDY, 8, frozenset(), 0)[0].tokens
    at = next(at for at in range(1, 8) if reply[at] not in reply[:at])
    world = World()
    one = world.submit(PROMPT, stop_ids=frozenset({reply[at]}))
    world.finish()
    assert answer(one) == reply[: at + 1]
    assert one.channel.wait(0).finish_reason == "stop"
    assert world.core.counters.wasted_tokens == 1
    cached = [*PROMPT, *reply]
    assert world.cache.match(cached).length == len(PROMPT) + at, "the stop token's own KV is dropped"


def test_cancelling_reads_nothing_and_keeps_the_finished_tokens() -> None:
    world = World()
    one, other = world.submit(PROMPT), world.submit((9, 9, 8))
    world.step(4)
    finished = list(one.streams[0].tokens)
    reads = world.model.events.count("read")
    world.core.cancel(one)
    world.cache.check()
    assert world.model.events.count("read") == reads
    assert world.cache.match([*finished, 0]).length == len(finished) - 1
    world.finish()
    with pytest.raises(RequestCancelled):
        one.channel.wait(0)
    assert answer(other) == right(other)
    assert world.core.counters.wasted_tokens == 1


def test_kv_of_a_forward_without_numbers_is_never_matchable() -> None:
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    prompt = tuple(range(12))
    world.model.gives_nan = lambda chunk: chunk.start == 4
    one = world.submit(prompt)
    world.finish()
    with pytest.raises(RequestFailed, match="NaN"):
        one.channel.wait(0)
    assert world.cache.match(prompt).length == 4, "the next chunk was launched on wrong KV"
    assert world.core.counters.wasted_tokens == 8


def test_a_constrained_stream_takes_every_other_step_and_the_others_all() -> None:
    world = World()
    rule = Rule(seed=5)
    bound = world.submit((7, 7), matcher=RuleMatcher(rule))
    free = world.submit(PROMPT, GREEDY.but(max_tokens=14))
    world.finish()
    assert answer(bound) == replies((7, 7), GREEDY, 8, frozenset(), 0, rule)[0].tokens
    assert answer(free) == right(free)
    assert world.core.counters.host_bound_rows > 0
    assert world.model.events[:4] == ["launch", "launch", "read", "launch"], "the others do not wait for it"


def test_a_launch_that_raises_is_tried_again_after_the_preceding_step() -> None:
    world = World()
    one, other = world.submit(PROMPT), world.submit((9, 9, 8))
    world.step(2)
    world.model.events.clear()
    world.model.raises = lambda event: event == 1
    world.step()
    assert world.model.events == ["launch", "read", "launch"]
    world.finish()
    assert (answer(one), answer(other)) == (right(one), right(other))


def test_a_draw_that_raises_ends_no_request_whose_prompt_is_not_computed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    one, other = world.submit((1, 2)), world.submit(tuple(range(12)))
    begin = LateSampler.begin

    def broken(self: LateSampler, logits: Any, rows: Any, *rest: Any) -> LatePending:
        if rows:
            raise ValueError("no draw")
        return begin(self, logits, rows, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LateSampler, "begin", broken)
        world.step()
    world.finish()
    with pytest.raises(RequestFailed, match="no draw"):
        one.channel.wait(0)
    assert answer(other) == right(other)


def test_results_that_cannot_be_read_end_the_requests_of_their_step() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.step()
    later = world.submit((9, 9, 8))
    ((_, pending),) = world.core.flight.draws  # type: ignore[union-attr]

    def broken() -> Any:
        raise ValueError("the copy was lost")

    pending.result = broken  # type: ignore[method-assign]
    world.finish()
    with pytest.raises(RequestFailed, match="the copy was lost"):
        one.channel.wait(0)
    assert answer(later) == right(later)


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["launch", "draw", "read"])
def test_a_lost_device_ends_the_step_and_nothing_is_tried_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    asked = [world.submit(PROMPT), world.submit((9, 9, 8))]
    world.step(2)
    world.model.events.clear()

    def lost(*_: Any) -> Any:
        world.model.events.append(where)
        raise LOST

    broken: Any = {"launch": world.model, "draw": world.core._draws.sampler, "read": RecordedPending}[where]
    monkeypatch.setattr(broken, {"launch": "run", "draw": "begin", "read": "result"}[where], lost)
    with pytest.raises(DeviceLost) as raised:
        world.core.step()
    assert world.model.events == {"launch": ["launch"], "draw": ["launch", "draw"], "read": ["launch", "read"]}[where]
    monkeypatch.setattr(RecordedPending, "result", lost)
    world.core.close(raised.value)
    for each in asked:
        with pytest.raises(DeviceLost, match="restart the process"):
            each.channel.wait(0)
    assert not world.cache.state.open
