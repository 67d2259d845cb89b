"""Part 6, the engine on a random-weight model of Llama-3-8B's shape: first steps, steps, first tokens, agents.

The floor of a step is one read of its weights and its keys at the read ceiling of this run. The floor of a prompt is
its products at the matmul ceiling.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from radixkv import Engine, EngineStats, SamplingParams

from .model import LLAMA_3_8B, TINY, Llama, Weights, build, counting, serving, token_ids, with_prefix
from .result import Bench, Row

WINDOWS = 5
"""Times that steps are timed; the median counts."""


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of the engine's work."""

    model: Llama
    steps: tuple[tuple[int, int, int], ...]  # sequences, shared, own tokens
    comb: tuple[int, int, int, int]  # levels, tokens of a level, sequences of a level, own tokens
    first_steps: int  # that are timed after the load
    window: int  # steps of a timing
    prompt: int
    new: int  # tokens after a prompt that hits
    prompts: int
    agents: tuple[int, int, int, int, int]  # groups, members, root, branch, own
    reply: int
    rounds: int
    kv_tokens: int
    batch_tokens: int


FULL = EngineSizes(
    model=LLAMA_3_8B,
    steps=((64, 8192, 512), (1, 0, 8192), (64, 0, 1024)),
    comb=(5, 1024, 12, 512),
    first_steps=1000,
    window=24,
    prompt=8192,
    new=64,
    prompts=5,
    agents=(8, 8, 8192, 2048, 256),
    reply=128,
    rounds=2,
    kv_tokens=200_000,
    batch_tokens=8192,
)
SMOKE = EngineSizes(
    model=TINY,
    steps=((3, 288, 8),),
    comb=(5, 16, 1, 5),
    first_steps=10,
    window=3,
    prompt=96,
    new=8,
    prompts=2,
    agents=(2, 2, 32, 288, 8),
    reply=4,
    rounds=1,
    kv_tokens=4096,
    batch_tokens=512,
)


def run(bench: Bench) -> Iterator[Row]:
    """Steps, then first tokens, then agents, all on one engine."""
    sizes = SMOKE if bench.device.interpreted else FULL
    begin = time.perf_counter()
    model, weights = build(sizes.model, bench.device)
    sequences = max(*(count for count, *_ in sizes.steps), math.prod(sizes.agents[:2]), math.prod(sizes.comb[::2]))
    options = {"kv_tokens": sizes.kv_tokens, "sequences": sequences, "batch_tokens": sizes.batch_tokens}
    yield {"case": "build", "seconds": round(time.perf_counter() - begin, 2)}  # loading compiles, for a minute or more
    with serving(model, bench.device, **options) as engine:
        stats = engine.stats()
        yield {
            "case": "load",
            "seconds": round(time.perf_counter() - begin, 2),
            "attention": stats.attention,
            "weight_bytes": weights.step_bytes,
            "kv_bytes": stats.kv_bytes,
        }
        yield from bench.case(f"first {sizes.first_steps} steps after the load", lambda: _first_steps(sizes, engine))
        for count, shared, own in sizes.steps:
            name = f"step, {count} x ({shared} shared + {own})" if shared else f"step, {count} x {own}"
            case = (count, shared, own)
            yield from bench.case(name, lambda case=case: _step(bench, sizes, engine, weights, *case))
        levels, tokens, members, _ = sizes.comb
        yield from bench.case(f"comb of {levels} x {tokens}, {levels * members} decode", lambda: _comb(sizes, engine))
        count, _, own = sizes.steps[-1]
        yield from bench.case(f"sampling, {count} x {own}", lambda: _sampling(sizes, engine, count, own))
        yield from bench.case(f"first token of {sizes.prompt}", lambda: _first_token(bench, sizes, engine, weights))
        groups, members, *_ = sizes.agents
        yield from bench.case(f"{groups} x {members} agents", lambda: _agents(sizes, engine))


# ---- steps


class StepClock:
    """Records when each step launches its forward, and the CPU time of the engine's thread then.

    The CPU time includes the time in which the thread spins while it waits for the device. No background task of the
    core: the step in flight is finished before one runs, so that steps would not overlap.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine.core.runner
        self.marks: list[tuple[float, float]] = []

    def __enter__(self) -> StepClock:
        """Begin to record."""
        self._engine.client.thread.ask(lambda: setattr(self._engine.core, "runner", self))
        return self

    def __exit__(self, *_: object) -> None:
        """Record no longer."""
        self._engine.client.thread.ask(lambda: setattr(self._engine.core, "runner", self._runner))

    def __getattr__(self, name: str) -> Any:
        """Take the place of the runner."""
        return getattr(self._runner, name)

    def run(self, *step: Any) -> Any:
        """Record a step, and run it."""
        self.marks.append((time.perf_counter(), time.thread_time()))
        return self._runner.run(*step)

    def steps_ms(self) -> list[float]:
        """Milliseconds from each step's launch to the next one's."""
        return [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(self.marks)]

    def row(self) -> Row:
        """The median CPU time of a step."""
        return {
            "host_cpu_ms": round(statistics.median((b[1] - a[1]) * 1e3 for a, b in itertools.pairwise(self.marks)), 4)
        }


def _first_steps(sizes: EngineSizes, engine: Engine) -> Row:
    """Time single steps from the load on, while sequences come one by one: captures and compilations are long steps."""
    most, vocab = max(count for count, *_ in sizes.steps), sizes.model.vocab
    handles = []
    with StepClock(engine) as clock:
        while len(clock.marks) <= sizes.first_steps:
            live = [each for each in handles if not each.done]
            if len(live) < most:
                prompt = token_ids(3000 + len(handles), 24, vocab)
                tokens = sizes.first_steps // 4 + len(handles) % 16
                handles = [
                    *live,
                    engine.submit(prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)),
                ]
            time.sleep(0.002)
        steps = clock.steps_ms()[: sizes.first_steps]
        for handle in handles:
            handle.cancel()
    usual = statistics.median(steps)
    return {
        "median_ms": round(usual, 4),
        "longest_ms": round(max(steps), 4),
        "longest_over_median": round(max(steps) / usual, 2),
        "stalls": sum(each > 5 * usual for each in steps),
        "eager_steps": engine.stats().eager_steps,
        **clock.row(),
    }


def _comb(sizes: EngineSizes, engine: Engine) -> Row:
    """Decode sequences that leave a prefix at five depths: more shared runs on a path than most trees have."""
    engine.clear_cache()
    levels, tokens, members, own = sizes.comb
    vocab = sizes.model.vocab
    path = token_ids(4000, levels * tokens, vocab)
    prompts = [
        prompt
        for level in range(levels)
        for prompt in with_prefix(path[: (level + 1) * tokens], members, own, vocab, seed=4100 + 100 * level)
    ]
    before = engine.stats().eager_steps
    found = steady(engine, prompts, sizes.window)
    return {"step_ms": round(found.step_ms, 4), "eager_steps": engine.stats().eager_steps - before}


def _sampling(sizes: EngineSizes, engine: Engine, count: int, own: int) -> Iterator[Row]:
    """Time the same steps with other parameters: greedy, top-p, and penalties of whole histories."""
    prompts = with_prefix([], count, own, sizes.model.vocab, seed=count)
    greedy = 0.0
    for name, params in (
        ("greedy", {"temperature": 0.0}),
        ("top_p", {"temperature": 0.8, "top_p": 0.9}),
        ("penalties", {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    ):
        with StepClock(engine) as clock:
            found = steady(engine, prompts, sizes.window, **params)
        greedy = greedy or found.step_ms
        yield {
            "mode": name,
            "step_ms": round(found.step_ms, 4),
            "over_greedy": round(found.step_ms / greedy, 4),
            **clock.row(),
        }


@dataclass(frozen=True)
class Steady:
    """Steps that all sequences took together: milliseconds of one, its windows, and the keys that it read."""

    step_ms: float
    windows_ms: tuple[float, ...]
    steps: int
    generated: float  # tokens of each sequence's reply in the middle of the windows


def steady(engine: Engine, prompts: list[list[int]], window: int, **params: float) -> Steady:
    """Time steps of a batch that does nothing but decode, greedily unless `params` say otherwise.

    The prompts run once before, so that they hit and everything is compiled and captured. The counters are read between
    two steps, so that a window is whole steps. Raises RuntimeError if not every step was one token for each.
    """
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
    engine.generate(prompts, SamplingParams(max_tokens=4, **options))
    before = engine.stats()
    long = SamplingParams(max_tokens=256 + 4 * window * WINDOWS, **options)  # no reply ends
    handles = [engine.submit(prompt, long) for prompt in prompts]
    try:
        _all_decode(engine, before.output_tokens + 2 * len(prompts), before.finished)
        marks = [(engine.stats(), time.perf_counter())]
        for _ in range(WINDOWS):
            _sleep(engine, *marks[-1], window)
            marks.append((engine.stats(), time.perf_counter()))
    finally:
        for handle in handles:
            handle.cancel()
        while engine.stats().running:
            time.sleep(0.001)
    return _steady(marks, marks[0][0].output_tokens - before.output_tokens, len(prompts))


def _sleep(engine: Engine, begun: EngineStats, at: float, window: int) -> None:
    """Wait for `window` steps and ask seldom: an answer costs the engine microseconds between two steps."""
    pause = 0.0
    while (done := (now := engine.stats()).steps - begun.steps) < window:
        if now.finished > begun.finished or now.failed:
            raise RuntimeError("a request ended before all steps were timed")
        time.sleep(pause)
        pause = 0.5 * (time.perf_counter() - at) / done * (window - done) if done else 0.001


def _all_decode(engine: Engine, output_tokens: int, finished: int) -> None:
    """Wait until all prompts are computed and have given tokens."""
    while (now := engine.stats()).waiting or now.output_tokens < output_tokens:
        if now.finished > finished or now.failed:
            raise RuntimeError("a request ended before all were decoding")
        time.sleep(0.001)


def _steady(marks: list[tuple[EngineStats, float]], begun: int, count: int) -> Steady:
    """Turn marks (counters, time) between windows into times of a step; each step must be one token per sequence."""
    times = []
    for (a, start), (b, end) in itertools.pairwise(marks):
        steps = b.steps - a.steps
        if b.output_tokens - a.output_tokens != steps * count or b.computed_tokens - a.computed_tokens != steps * count:
            raise RuntimeError(f"not every step was one token for each of {count} sequences")
        times.append((end - start) / steps * 1e3)
    steps = marks[-1][0].steps - marks[0][0].steps
    return Steady(statistics.median(times), tuple(times), steps, begun / count + steps / 2)


def _step(
    bench: Bench, sizes: EngineSizes, engine: Engine, weights: Weights, count: int, shared: int, own: int
) -> Iterator[Row]:
    """Time steps along the tree, and without it if sequences share tokens."""
    engine.clear_cache()
    vocab = sizes.model.vocab
    prompts = with_prefix(token_ids(7, shared, vocab), count, own, vocab, seed=count)
    for tree in (True, False) if shared else (True,):
        with counting(tree=tree) as reads:
            found = steady(engine, prompts, sizes.window)
        if not reads.lists:
            raise RuntimeError("the engine built no work list: what it read is not known")
        tokens = shared + count * (own + found.generated) if tree else count * (shared + own + found.generated)
        floor = floor_ms(weights.step_bytes + tokens * sizes.model.token_bytes, bench.ceilings.read_tb_s)
        yield {
            "mode": "tree" if tree else "flat",
            "step_ms": round(found.step_ms, 4),
            "windows_ms": [round(each, 4) for each in found.windows_ms],
            "steps": found.steps,
            "tokens_per_s": round(count / found.step_ms * 1e3, 1),
            "kv_tokens": round(tokens),
            "floor_ms": floor and round(floor, 4),
            "of_floor": floor and round(found.step_ms / floor, 4),
        }


def floor_ms(nbytes: float, read_tb_s: float | None) -> float | None:
    """Return the milliseconds of reading `nbytes` bytes at the ceiling.

    >>> floor_ms(15e9, 5.0)
    3.0
    """
    return nbytes / read_tb_s / 1e9 if read_tb_s else None


# ---- first tokens


def _first_token(bench: Bench, sizes: EngineSizes, engine: Engine, weights: Weights) -> Row:
    """Return medians over several prompts; each is sent once new, and once more with other tokens after it."""
    engine.clear_cache()
    one, vocab = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), sizes.model.vocab
    times: dict[str, list[float]] = {"miss": [], "hit": []}
    for turn in range(sizes.prompts + 1):
        prompt = token_ids(1000 + turn, sizes.prompt, vocab)
        for name, asked in (("miss", prompt), ("hit", [*prompt, *token_ids(turn, sizes.new, vocab)])):
            usage = engine.generate([asked], one)[0].usage
            if usage.cached_tokens != (0 if name == "miss" else sizes.prompt):
                raise RuntimeError(f"a {name} found {usage.cached_tokens} tokens of {len(asked)} in the cache")
            if turn:  # the first is a warm-up
                times[name].append(usage.ttft_s * 1e3)
    miss, hit = (statistics.median(times[name]) for name in ("miss", "hit"))
    row: Row = {"miss_ms": round(miss, 3), "hit_ms": round(hit, 3), "hit_of_miss": round(hit / miss, 4)}
    if bench.ceilings.matmul_tflop_s:
        floor = weights.token_flops * sizes.prompt / bench.ceilings.matmul_tflop_s / 1e9
        row |= {"miss_floor_ms": round(floor, 3), "miss_of_floor": round(miss / floor, 3)}
    return row | {"new": sizes.new, "prompts": sizes.prompts}


# ---- agents


def agents(sizes: EngineSizes) -> list[list[int]]:
    """Prompts of agents: a root that all share, a branch that a group shares, tokens of their own."""
    groups, members, root, branch, own = sizes.agents
    vocab = sizes.model.vocab
    top = token_ids(50, root, vocab)
    return [
        prompt
        for group in range(groups)
        for prompt in with_prefix(
            top + token_ids(60 + group, branch, vocab), members, own, vocab, seed=1000 * (group + 1)
        )
    ]


def _agents(sizes: EngineSizes, engine: Engine) -> Iterator[Row]:
    """All agents at once, cold and with their prompts cached, along the tree and without, in turns."""
    prompts, params = agents(sizes), SamplingParams(max_tokens=sizes.reply, temperature=0, ignore_eos=True)
    engine.clear_cache()
    engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))  # compiles, captures
    seconds: dict[tuple[str, str], list[float]] = {}
    read: dict[tuple[str, str], int] = {}
    for _ in range(sizes.rounds):
        for mode in ("tree", "flat"):
            engine.clear_cache()
            for state in ("cold", "cached"):
                with counting(tree=mode == "tree") as reads:
                    start = time.perf_counter()
                    done = engine.generate(prompts, params)
                    seconds.setdefault((mode, state), []).append(time.perf_counter() - start)
                read[mode, state] = reads.tokens
                if any(each.usage.output_tokens != sizes.reply for each in done):
                    raise RuntimeError("an agent's reply has the wrong length")
    if read["flat", "cached"] <= read["tree", "cached"]:
        raise RuntimeError("turning the tree off changed nothing in what is read: there is nothing to compare")
    tokens = sizes.reply * len(prompts)
    for (mode, state), times in seconds.items():
        took = statistics.median(times)
        row: Row = {"mode": mode, "state": state, "seconds": round(took, 4), "read_tokens": read[mode, state]}
        yield row | {
            "tokens_per_s": round(tokens / took, 1),
            "over_flat": round(statistics.median(seconds["flat", state]) / took, 4),
        }
