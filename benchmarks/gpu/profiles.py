"""Part 7, profiles: torch's profiler over the slowest cases of the other parts: kernels, launches, gaps between them.

Attention is profiled alone, and the engine on two depths of the same model: their difference is the launches and the
time of a layer. A decode step is the difference of a long and a short run, so that neither prompts nor the profiler's
start are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from radixkv import Engine, SamplingParams

from .decode import fitting
from .model import LLAMA_3_8B, TINY, Llama, build, serving, token_ids, with_prefix
from .pools import Attention, copies_for
from .result import Bench, Row
from .shapes import Batch, chunk, private, shared

TRIES = 5
"""Times that the decodes are profiled until their steps differ as their tokens do."""

TOP = 12
"""Kernels that a table names."""

CALLS = 20
"""Calls of attention that are profiled."""


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of the engine's work."""

    model: Llama
    depths: tuple[int, int]
    decode: tuple[int, int, int]  # sequences, shared, own tokens
    prompt: int
    kv_tokens: int
    batch_tokens: int
    replies: tuple[int, int]  # tokens of a short and of a long one


FULL = EngineSizes(LLAMA_3_8B, (4, 12), (64, 8192, 512), 8192, 100_000, 8192, (4, 36))
SMOKE = EngineSizes(TINY, (1, 2), (3, 288, 8), 96, 2048, 512, (2, 5))


def run(bench: Bench) -> Iterator[Row]:
    """Attention's cases, then the engine on both depths and their difference."""
    for batch in _batches(bench):
        yield from bench.case(f"attention, {batch.name}", lambda b=batch: _attention(bench, b))
    yield from bench.case("engine", lambda: _engine(bench))


def _batches(bench: Bench) -> list[Batch]:
    sizes = bench.sizes
    plain = private(*sizes.peers[0])
    return [plain, shared(*sizes.trees[0]), chunk(sizes.new[-1], sizes.cached[-1])]


Kernels = dict[str, tuple[float, float]]
"""Launches and microseconds of each kernel."""


def profile(bench: Bench, call: Callable[[], object]) -> tuple[Kernels, Gaps]:
    """Return the kernels that `call` launches from any thread, and their gaps; without a GPU, the CPU's operations."""
    bench.device.synchronize()
    with _profiler(bench) as profiler:
        call()
        bench.device.synchronize()
    where = DeviceType.CUDA if bench.device.torch.type == "cuda" else DeviceType.CPU
    ranges = [
        (event.time_range.start, event.time_range.end) for event in profiler.events() if event.device_type == where
    ]
    averages = profiler.key_averages()
    if where == DeviceType.CUDA:
        found = [event for event in averages if event.device_type == where]
        return {event.key: (event.count, event.self_device_time_total) for event in found}, Gaps.of(ranges)
    return {event.key: (event.count, event.self_cpu_time_total) for event in averages}, Gaps.of(ranges)


@dataclass(frozen=True)
class Gaps:
    """Microseconds in which no kernel runs, between the first and the last one, and the longest such gap."""

    span_us: float
    idle_us: float
    longest_us: float

    @classmethod
    def of(cls, ranges: list[tuple[float, float]]) -> Gaps:
        """Measure the gaps between kernels, which may overlap, from their starts and ends.

        >>> Gaps.of([(0, 4), (2, 3), (9, 10), (12, 20)])
        Gaps(span_us=20, idle_us=7, longest_us=5)
        """
        begun, idle, longest, until = min(ranges, default=(0, 0))[0], 0.0, 0.0, None
        for start, end in sorted(ranges):
            gap = 0 if until is None else max(0, start - until)
            idle, longest, until = idle + gap, max(longest, gap), end if until is None else max(until, end)
        return cls((until or begun) - begun, idle, longest)

    def row(self) -> Row:
        """Return the share of the time without a kernel, and the longest gap."""
        share = round(self.idle_us / self.span_us, 4) if self.span_us else 0.0
        return {"idle_share": share, "longest_gap_us": round(self.longest_us, 2)}


def _profiler(bench: Bench) -> Any:
    if bench.device.torch.type == "cuda":
        return torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], experimental_config=every)


def difference(more: Kernels, less: Kernels) -> Kernels:
    """Return the kernels of `more` without those of `less`."""
    zero = (0.0, 0.0)
    both = {name: (more.get(name, zero), less.get(name, zero)) for name in more | less}
    return {name: (a[0] - b[0], a[1] - b[1]) for name, (a, b) in both.items() if a[0] != b[0] or a[1] > b[1]}


def table(kernels: Kernels, turns: int) -> Row:
    """Launches and microseconds of one turn, in all and of the kernels that take longest."""
    total = sum(us for _, us in kernels.values())
    longest = sorted(kernels.items(), key=lambda kernel: -kernel[1][1])
    return {
        "turns": turns,
        "launches": round(sum(count for count, _ in kernels.values()) / turns, 2),
        "kernel_us": round(total / turns, 2),
        "top": [
            {
                "kernel": name[:100],
                "launches": round(count / turns, 2),
                "us": round(us / turns, 2),
                "share": round(us / total, 4) if total else 0.0,
            }
            for name, (count, us) in longest[:TOP]
        ],
    }


# ---- attention


def _attention(bench: Bench, batch: Batch) -> Row:
    shape = bench.sizes.shapes[0]
    copies = copies_for(shape, batch.unique_tokens, bench.sizes.rotate, bench.sizes.copies)
    pools = fitting(bench, shape, batch, copies)
    ours = Attention(pools, batch, pools.query(batch.rows))
    calls, turns = ours.calls(), 1 if bench.device.interpreted else CALLS
    calls[0]()

    def launch() -> None:
        for turn in range(turns):
            calls[turn % len(calls)]()

    kernels, gaps = profile(bench, launch)
    return {"tiles": list(ours.step.counts), **table(kernels, turns), **gaps.row()}


# ---- the engine


def _engine(bench: Bench) -> Iterator[Row]:
    """A decode step and a prompt's chunk on two depths, then a layer of each."""
    sizes = SMOKE if bench.device.interpreted else FULL
    found: dict[str, list[Row]] = {}
    for layers in sizes.depths:
        model, _ = build(sizes.model.deep(layers), bench.device)
        options = {"kv_tokens": sizes.kv_tokens, "sequences": sizes.decode[0], "batch_tokens": sizes.batch_tokens}
        with serving(model, bench.device, **options) as engine:
            rows = {"decode step": _decode(bench, sizes, engine), "chunk": _chunk(bench, sizes, engine)}
        del model, engine
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
            yield {"what": f"{name}, {layers} layers", **row}
    for name, (less, more) in found.items():
        yield {"what": f"{name}, a layer", **a_layer(less, more, sizes.depths[1] - sizes.depths[0])}


def a_layer(less: Row, more: Row, layers: int) -> Row:
    """Return the cost of one of the `layers` additional layers."""
    return {name: round((more[name] - less[name]) / layers, 2) for name in ("launches", "kernel_us")}


def _decode(bench: Bench, sizes: EngineSizes, engine: Engine) -> Row:
    """A step of a batch that does nothing but decode."""
    count, shared_tokens, own = sizes.decode
    vocab = sizes.model.vocab
    prompts = with_prefix(token_ids(1, shared_tokens, vocab), count, own, vocab, seed=9)
    engine.generate(prompts, _greedy(sizes.replies[1]))  # compiles, captures, and is cached from now on
    more = sizes.replies[1] - sizes.replies[0]
    tried = []
    for _ in range(TRIES):  # prompts come in while the engine steps already, so a run may take a step more or less
        few, (less, _) = _counted(bench, engine, prompts, sizes.replies[0])
        many, (found, gaps) = _counted(bench, engine, prompts, sizes.replies[1])
        tried.append(many - few)
        if tried[-1] == more:
            return {**table(difference(found, less), more), **gaps.row()}
    raise RuntimeError(f"{more} tokens more took {tried} steps more")


def _counted(bench: Bench, engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[int, tuple[Kernels, Gaps]]:
    """Return the number of steps for the prompts' replies, and their kernels."""
    before = engine.stats().steps
    found = profile(bench, lambda: engine.generate(prompts, _greedy(tokens)))
    return engine.stats().steps - before, found


def _chunk(bench: Bench, sizes: EngineSizes, engine: Engine) -> Row:
    """The step of a whole new prompt, and its first token."""
    vocab = sizes.model.vocab
    engine.generate([token_ids(30, sizes.prompt, vocab)], _greedy(1))
    before = engine.stats().steps
    found, gaps = profile(bench, lambda: engine.generate([token_ids(31, sizes.prompt, vocab)], _greedy(1)))
    return {**table(found, engine.stats().steps - before), **gaps.row()}


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
