"""The checks of a new GPU: each yields rows of the table of first contact."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
import triton
from torch import Tensor

from radixkv import SamplingParams
from radixkv.attention import plan, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.device import device_of, driver
from radixkv.models import adapter
from radixkv.models.cuda_graphs import ReplayedForward, record_graphs
from radixkv.models.experts import MOST_TOKENS, grouped_mm_waits
from radixkv.models.loaded import SequenceInput
from radixkv.models.rounding import relative_error
from radixkv.models.runner import AttentionPlanner, PoolForward, Runner
from radixkv.models.sampling_backend import draw_by_kernel
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow
from radixkv.sampling.sampler import sample
from radixkv_kernels import launches, reference
from radixkv_kernels.graph_capacity import Bucket

from .device import Device
from .engine import steady
from .first_contact import UNCHECKED, Row
from .model import TINY, Llama, build, serving, token_ids, with_prefix
from .shapes import BLOCK

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from kernel_cases import CASES, Case

Rows = Iterator[Row]
SMALL = Llama(4, 512, 1024, 8, 2, 4096, 4096)
BILLION = Llama(16, 2048, 8192, 32, 8, 32_000, 8192)
TINY_CASE = Case("tiny", 16, 16, 4, 2, torch.float32, window=20, softcap=30.0, sinks=True)
LOGITS_ERROR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The same logits by other launches, of the worst row. In bfloat16 rounding gives 1e-2, keys of another prefix 1e-1."""
KERNEL_ERROR = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}
"""|output - reference| / |reference|; a wrong key gives much more. Weights of 8-bit codes are rounded once more."""


def environment(device: Device) -> Rows:
    """Facts of the machine that the other rows rest on."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    yield Row.of("versions", True, f"{versions}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    name, newest = driver()
    if newest:
        yield Row.of("driver", True, name)
    missing = triton_backend.missing_compiler()
    yield Row.of("C compiler and headers", not missing, missing or "Triton finds them")
    precision = torch.get_float32_matmul_precision()
    yield Row.of("float32 products", True, f"{precision}: TF32 is {'off' if precision == 'highest' else 'on'}")
    if device.torch.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch)
        taken = total - free - torch.cuda.memory_reserved(device.torch)
        said = f"{device.name}: {total >> 20} MiB, {free >> 20} free, {taken >> 20} used by others and the driver"
        yield Row.of("memory", free > 10 << 30, said + ("" if free > 10 << 30 else ": 10 GiB are needed"))


# ---- kernels


def kernels(device: Device) -> Rows:
    """Compare attention, writes and copies of all cases that are compiled with the reference in float64."""
    cases, context = ([TINY_CASE], 48) if device.interpreted else (CASES, 32_768)
    worst, names, skipped = 0.0, list[str](), 0
    if device.free() < 24 << 30:
        skipped = sum(case.wide for case in cases)
        cases = [case for case in cases if not case.wide]
    # Compilation takes most of the time, on one core. A process takes up to 5 GiB of the card.
    small = [case for case in cases if not case.wide]
    processes = min(4, len(small), os.cpu_count() or 1, 1 + device.free() // (6 << 30))
    measured = partial(kernel_error, device=device, context=context)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        errors = dict(zip(small, (pool.map if processes > 1 else map)(measured, small), strict=True))
    for case in cases:
        found, same = errors.get(case) or measured(case)
        allowed = 2 * KERNEL_ERROR[case.dtype] if case.stored == torch.int8 else KERNEL_ERROR[case.dtype]
        print(f"{case.name}: error {found:.1e}, bound launches {'equal' if same else 'differ'}")
        worst = max(worst, found / allowed)
        names += [case.name] * (not (found <= allowed and same))
    said = f"{len(cases) - skipped} cases, contexts up to {context}: at most {worst:.2f} of the tolerance"
    said += f"; {skipped} need 24 GiB of free memory" if skipped else ""
    yield Row.of("kernels, and bound launches", not names, said + (f"; wrong: {', '.join(names)}" if names else ""))


def memory(device: Device) -> Rows:
    """Run small cases of attention, writes and copies; compute-sanitizer reports bad accesses, by the exit status."""
    cases = [case for case in CASES if not case.wide and "all features" not in case.name]
    cases = [TINY_CASE] if device.interpreted else cases
    wrong = [case.name for case in cases if not kernel_error(case, device, 4 * case.block_size)[0] < 1]
    state = "nothing" if device.interpreted else "compute-sanitizer"
    said = f"{state} watched {len(cases)} cases, without torch's cache of memory"
    yield Row.of("accesses", not wrong, f"{said}; wrong: {', '.join(wrong)}" if wrong else said)


def kernel_error(case: Case, device: Device, context: int) -> tuple[float, bool]:
    """Return the error of a batch, and whether a second, bound run and one by Triton itself have the same bits.

    Two sequences share a long prefix, one is short, and one computes a chunk. Unused slots hold NaN.
    """
    torch.manual_seed(0)
    size, place = case.block_size, device.torch
    kept = {torch.int8: "int8", torch.float16: "float16"}.get(case.stored, "auto")  # type: ignore[call-overload]
    lengths, rows = [context + 5, context + 2 * size, 3, 3 * size + 1], [1, 1, 1, size + 7]
    shared, own = list(range(1, 1 + context // size)), iter(range(1 + context // size, 1 << 20))
    tables = [[*prefix, *(next(own) for _ in range(-(-length // size) - len(prefix)))]
              for prefix, length in zip((shared, shared, [], []), lengths, strict=True)]  # fmt: skip
    blocks = 2 + max(map(max, tables))
    if case.wide:
        blocks = 3 + (1 << 31) // (case.kv_heads * size * case.key_dim)
        tables = [[blocks - 1 - block for block in table] for table in tables]
    layer = LayerShape(case.kv_heads, case.key_dim, case.value_dim)
    store = KVStore([layer], blocks, size, device=place, dtype=case.dtype, kv_dtype=kept)
    for each in store.tensors:
        each.fill_(torch.nan if each.is_floating_point() else 77)
    places = sorted({table[at // size] * size + at % size
                     for table, length in zip(tables, lengths, strict=True) for at in range(length)})  # fmt: skip
    slots = torch.tensor(places, device=place)
    dims = case.key_dim, case.value_dim
    new = [torch.randn(case.kv_heads, len(slots), dim, device=place).to(case.dtype) for dim in dims]
    triton_backend.write(store, 0, slots, *new)
    query = torch.randn(sum(rows), case.heads, case.key_dim, device=place).to(case.dtype).transpose(0, 1)
    sinks = torch.randn(case.heads, device=place).to(case.dtype) if case.sinks else None
    options: dict[str, Any] = {"scale": case.key_dim**-0.5, "softcap": case.softcap, "sinks": sinks}

    def attend() -> Tensor:
        work = plan.build(tables, lengths, rows, case.window, block_size=size, min_saving=1)
        return triton_backend.attend(store, 0, query, work, **options)

    first, bound = attend(), attend()
    with patch.object(launches, "device", return_value=None):
        unbound = attend()
    square = difference = 0.0
    at = 0
    for table, length, count in zip(tables, lengths, rows, strict=True):
        key, value = (each[:, None].double() for each in store.gather(0, table, length))
        expected = reference.attend(
            query[:, at : at + count].double(), key, value, [[0]], [length], [count], window=case.window,
            **{**options, "sinks": None if sinks is None else sinks.double()},
        )  # fmt: skip
        difference += float((first[at : at + count].double() - expected).square().sum())
        square += float(expected.square().sum())
        at += count
    triton_backend.copy(store, [(tables[3][0], tables[2][0])])
    copied = all(torch.equal(each[:, tables[3][0]], each[:, tables[2][0]]) for each in store.tensors)
    return (difference / square) ** 0.5, copied and torch.equal(first, bound) and torch.equal(first, unbound)


# ---- graphs


def capture(device: Device) -> Rows:
    """Let a capture fail, release unused memory, then capture and replay."""
    place = device_of(device.torch)
    numbers = torch.ones(1 << 16, device=device.torch)
    stream, pool = place.stream(), place.graph_pool()
    try:
        place.capture(lambda: numbers * numbers.sum().item(), stream=stream, pool=pool)
    except RuntimeError as error:
        yield Row.of("a failed capture", True, f"raised {type(error).__name__}")
    else:
        yield Row.of("a failed capture", False, "a synchronisation in a capture raised nothing")
    place.release_cached()
    graph = place.capture(lambda: numbers * 2, stream=stream, pool=place.graph_pool())
    numbers.fill_(3)
    replayed = float(graph.replay().sum().cpu())
    yield Row.of("a later capture", replayed == 6 * numbers.numel(), "memory was released, and it replays")


def recorded(model: Any, device: Device, sequences: int, tokens: int, blocks: int = 0) -> Runner:
    """Return a runner over a pool of its own, with its graphs recorded, as an engine loads it."""
    loaded = adapter.load(model, device=device.torch, attention="torch" if device.torch.type == "cpu" else "triton")
    runner = Runner(loaded, blocks or 3 * sequences + 2 * -(-tokens // BLOCK), BLOCK)
    record_graphs(runner, sequences, tokens)
    return runner


def graph_row(runner: Runner, name: str = "graphs") -> Row:
    """Whether all graphs are recorded, with the reasons of those that are missing."""
    forward = runner.forward
    if runner.loaded.attention != "triton":
        return Row(name, UNCHECKED, "needs a GPU")
    if not isinstance(forward, ReplayedForward):
        return Row.of(name, False, f"none: {getattr(forward, '_reason', 'the runner computes each step')}")
    graphs = forward.graphs
    wanted = len(graphs.buckets) + sum(graphs.missing.values())
    reasons = "".join(f"; {count} missing: {reason}" for reason, count in graphs.missing.items())
    return Row.of(name, not graphs.missing, f"{len(graphs.buckets)} of {wanted} recorded{reasons}")


def small(device: Device) -> Any:
    """Return a small random Llama, in memory of the host."""
    return build(TINY.deep(1) if device.interpreted else SMALL, replace(device, torch=torch.device("cpu")))[0]


def graphs(device: Device) -> Rows:
    """Compare a replay of each graph with the same step as it is computed, on logits."""
    runner = recorded(small(device), device, *((2, 16) if device.interpreted else (64, 1024)))
    yield graph_row(runner)
    if isinstance(runner.forward, ReplayedForward):
        yield replay_row(runner)


@torch.inference_mode()
def replay_row(runner: Runner, name: str = "replayed logits") -> Row:
    """Compare each graph's logits with those of the computed step; both attend along the same work list."""
    forward, worst = runner.forward, (0.0, Bucket(0, 0))
    assert isinstance(forward, ReplayedForward)
    with device_of(runner.loaded.device).current():
        runner.run([_piece(list(range(48)), 0, list(range(3)))])
        for bucket in forward.graphs.buckets:
            inputs = _filling(bucket)
            work = forward.computed.planner.lists(inputs, bucket.shared_rows)
            replayed = forward.graphs.run(inputs, work, bucket)
            assert replayed is not None, f"a step does not fit its graph: {bucket}"
            found = worst_row(replayed.clone().cpu(), forward.computed.run(inputs, work=work).float().cpu())
            worst = max(worst, (found, bucket))
    allowed = LOGITS_ERROR[runner.loaded.dtype]
    said = f"{len(forward.graphs.buckets)} graphs: at most {worst[0]:.1e} of the logits' spread, {allowed:g} allowed"
    return Row.of(name, worst[0] <= allowed, said)


def worst_row(logits: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row: that of one row in 64 is an eighth of it in all."""
    errors = (relative_error(*pair) for pair in zip(logits, expected, strict=True))
    return max(found if found == found else float("inf") for found in errors)


def _piece(tokens: list[int], start: int, table: list[int]) -> SequenceInput:
    """Return tokens of a sequence from `start` on."""
    places = start + np.arange(len(tokens))
    blocks = np.array(table, dtype=np.int32)
    slots = blocks[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
    return SequenceInput(np.array(tokens, dtype=np.int32), start, slots, blocks)


def _filling(bucket: Bucket) -> list[SequenceInput]:
    """Return a step that fills a graph: decodes after one shared block, and a chunk if it has room for one."""
    decodes = bucket.sequences - bucket.chunks
    pieces = [_piece([7 + row], BLOCK + row % BLOCK, [0, 3 + row]) for row in range(decodes)]
    if bucket.chunks:
        count, first = bucket.tokens - decodes, 3 + decodes
        table = [0, *range(first, first + -(-count // BLOCK))]
        pieces.append(_piece([(5 * at) % 97 for at in range(count)], BLOCK, table))
    return pieces


@torch.inference_mode()
def tree(device: Device, levels: int = 5) -> Rows:
    """Decode sequences that leave a path at each of five levels, long enough that each level is an item of its own."""
    run, members = (128, 3) if device.interpreted else (320, 2)
    sequences, vocab = levels * members, 97
    per = run // BLOCK
    runner = recorded(small(device), device, sequences, 0 if device.interpreted else run, levels * per + sequences + 1)
    path = token_ids(1, levels * run, vocab)
    for level in range(levels):
        runner.run([_piece(path[level * run : (level + 1) * run], level * run, list(range((level + 1) * per)))])
    eager = runner.eager.count
    own = iter(range(levels * per, 1 << 20))
    ends = [level * run for level in range(1, levels + 1) for _ in range(members)]
    step = [_piece([3 + row], end, [*range(end // BLOCK), next(own)]) for row, end in enumerate(ends)]
    planner = AttentionPlanner(runner.loaded.layers, BLOCK, plan.MIN_SAVING)
    (work,) = planner.lists(step).values()
    shared = int((work.rows > 1).sum())
    said = f"{shared} shared runs of {levels} levels, {sequences} sequences"
    yield Row.of("levels of the tree", shared >= levels, said)
    logits = runner.run(step).cpu()
    flat = PoolForward(runner.loaded, runner.backend, AttentionPlanner(runner.loaded.layers, BLOCK, plan.NEVER_SHARE))
    with device_of(runner.loaded.device).current():
        expected = flat.run(step).float().cpu()
    found, allowed = worst_row(logits, expected), LOGITS_ERROR[runner.loaded.dtype]
    yield Row.of("tree against flat", found <= allowed, f"{found:.1e} of the logits' spread, {allowed:g} allowed")
    late = runner.eager.count - eager
    if runner.loaded.attention == "triton":
        yield Row.of("tree from a graph", not late, "it was computed" if late else "it was replayed")


def sampling(device: Device) -> Rows:
    """Draw greedy and random tokens on the device, and compare them with the host's draws of the same logits."""
    kinds = [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 0.7}]
    rows = [SampleRow(SamplingParams(**kinds[row % 5]), 7, row) for row in range(10 if device.interpreted else 250)]
    torch.manual_seed(3)
    logits = torch.randn(len(rows), 500 if device.interpreted else 128_256) * 4
    ours = DeviceSampler(device.torch, draw_by_kernel).begin(logits.to(device.torch), rows).result().tokens
    expected = sample(logits, rows).tokens
    wrong = sum(a != b for a, b in zip(ours, expected, strict=True))
    said = f"{len(rows) - wrong} of {len(rows)} draws over {logits.shape[1]} logits equal the host's"
    yield Row.of("greedy and random draws", not wrong, said)


def experts(device: Device) -> Rows:
    """Record the decodes of a mixture of experts."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, vocab_size=97,
        max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch_dtype(device)).eval()
    runner = recorded(model, device, MOST_TOKENS, 0)
    waits = "its product waits" if grouped_mm_waits(runner.loaded) else "its product does not wait"
    row = graph_row(runner, "experts")
    yield replace(row, said=f"{row.said} ({waits})")
    if isinstance(runner.forward, ReplayedForward):
        yield replay_row(runner, "experts, replayed logits")


def torch_dtype(device: Device) -> torch.dtype:
    """The dtype of small models: the interpreter multiplies bfloat16 wrongly."""
    return torch.float32 if device.interpreted else torch.bfloat16


# ---- engines


def engine(device: Device) -> Rows:
    """Compare log probabilities that hits, host memory and overlap must not change; recurrent models too."""
    sizes = TINY if device.interpreted else SMALL
    # A graph has a row of logits for each sequence, and a scored reply takes 25 rows.
    options = {"kv_tokens": 2048, "sequences": 32, "batch_tokens": 64}
    model, _ = build(sizes, device)
    with serving(model, device, **options, host_memory=64 << 20) as loaded:
        yield from _equal_scores(loaded, "hits and overlap", sizes.vocab)
        before = loaded.stats()
        for turn in range(4):  # more than the pool holds: the first prompts go to the host
            prompts = with_prefix([], 4, 256, sizes.vocab, seed=900 + 10 * turn)
            loaded.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        yield from _equal_scores(loaded, "host memory", sizes.vocab)
        now = loaded.stats()
        tokens = now.host_tokens - before.host_tokens
        yield Row.of("tokens from the host", tokens > 0, f"{tokens} loaded, {now.failed_loads} loads failed")
        eager = now.eager_steps
        said = f"{eager} of {now.steps} forwards were computed"
        yield (
            Row("engine's steps from graphs", UNCHECKED, said)
            if device.interpreted
            else Row.of("engine's steps from graphs", not eager, said)
        )
    config = transformers.Lfm2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=sizes.vocab, max_position_embeddings=4096, full_attn_idxs=[1, 3], initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    hybrid = transformers.AutoModelForCausalLM.from_config(config).to(torch_dtype(device)).eval()
    with serving(hybrid, device, **options) as loaded:
        yield from _equal_scores(loaded, "recurrent state", sizes.vocab)


def _equal_scores(loaded: Any, name: str, vocab: int) -> Rows:
    """Compare a reply's log probabilities as it was generated, and as it is scored with a hit, and without one."""
    prompts = with_prefix(token_ids(5, 64, vocab), 8, 24, vocab, seed=50)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    done = loaded.generate(prompts, params)
    said = [entry.chosen for each in done for entry in each.logprobs]
    scored = [number for prompt, each in zip(prompts, done, strict=True)
              for number in loaded.score(prompt, [each.token_ids])[0].token_logprobs]  # fmt: skip
    apart = max(abs(a - b) for a, b in zip(said, scored, strict=True))
    allowed = 1e-3 if loaded.stats().dtype.endswith("float32") else 0.3
    yield Row.of(name, apart <= allowed, f"log probabilities differ by at most {apart:.1e}, {allowed:g} allowed")


def decode(device: Device) -> Rows:
    """Decode for some 20 s: milliseconds a step, and gigabytes a second beside the card's peak."""
    sizes = TINY if device.interpreted else BILLION
    count, context, window = (2, 32, 4) if device.interpreted else (32, 2048, 200)
    model, weights = build(sizes, device)
    prompts = with_prefix([], count, context, sizes.vocab, seed=1)
    tokens = 2 * count * (context + 1024)
    with serving(model, device, kv_tokens=tokens, sequences=count, batch_tokens=512) as loaded:
        found, until = steady(loaded, prompts, window), time.perf_counter() + 20 * (not device.interpreted)
        steps = [found.step_ms]
        while time.perf_counter() < until:
            steps.append(steady(loaded, prompts, window).step_ms)
        eager = loaded.stats().eager_steps
    step = statistics.median(steps)
    read = weights.step_bytes + count * (context + found.generated) * sizes.token_bytes * (1 + device.interpreted)
    peak = peak_gb_s(device)
    beside = f"{peak:.0f} GB/s are the card's peak" if peak else "the card's peak is not known"
    said = f"{count} sequences of {context}: {step:.2f} ms a step, {read / step / 1e6:.0f} GB/s; {beside}"
    yield Row.of("decodes", device.interpreted or not eager, f"{said}; {eager} steps were computed")


def peak_gb_s(device: Device) -> float:
    """Return the peak bandwidth of the card's memory by its clock and width, 0 if torch has not these figures."""
    if device.torch.type != "cuda":
        return 0.0
    found = torch.cuda.get_device_properties(device.torch)
    return 2 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8e6


RUN: dict[str, Callable[[Device], Rows]] = {
    each.__name__: each
    for each in (environment, kernels, memory, capture, graphs, tree, sampling, experts, engine, decode)
}
