"""Measure an engine step without its forward and its sampling: the scheduler, the commit, the cache, the text.

    python benchmarks/scheduler_overhead.py [--steps 64] [--sequences 64] [--model tiny] [--threads 2] [--profile 20]
                                            [--cpu]

`Core.step` runs on the main thread with 64 greedy streams of about 300 tokens that share a prefix of 128. Clocks around
the runner's `run` and the sampler's `sample` cut each step into three parts. The rest is overhead: planning the step,
extending and committing 64 sequences, publishing their tokens in the radix tree, checking the logits, turning tokens
into text, passing on chunks. Sampling (here one argmax for all rows) is shown separately.

The times are wall times, medians over the steps, with all cores for the forward and one for the overhead: the share
that a server pays. On a busy machine, --cpu measures the CPU time of the main thread, with one thread for the forward.
Other processes do not count then, and the share is smaller, since the forward has one core, too.

The tiny model has a tokenizer. The 100M Llama of random weights has none and borrows a byte-level one made here, so
that both produce text. At last, --profile steps run under cProfile, which lists the largest parts of the overhead (its
own cost inflates small functions).

The last line is one JSON object; the exit code is 1 if overhead is 5% of the step or more on either model.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from cpu_decode import build_model, cpu_name
from torch import Tensor

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.request import Request
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv.sampling.params import SamplingParams

BAR = 0.05
BLOCK, SHARED, PRIVATE = 16, 128, 128
PARTS = ("forward", "sampling", "overhead")


class Clocked:
    """Calls through, and adds up the seconds."""

    clock = time.perf_counter

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = Clocked.clock()
        try:
            return self.call(*args, **options)
        finally:
            self.seconds += Clocked.clock() - start


class ClockedRunner:
    """A runner whose forwards are timed."""

    def __init__(self, runner: Runner) -> None:
        self.clock = Clocked(runner.run)

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> Tensor:
        logits: Tensor = self.clock(chunks, copies)
        return logits


def byte_tokenizer(vocab: int) -> Any:
    """A byte-level BPE of `vocab` tokens: 256 bytes, then pairs of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters][: vocab - len(letters)]
    pieces = [*letters, *(a + b for a, b in pairs)]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, pairs))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def load(name: str) -> LoadedModel:
    if name == "tiny":
        return adapter.load("tiny")
    loaded = adapter.load(build_model())
    return replace(loaded, tokenizer=byte_tokenizer(loaded.vocab_size))


def requests(loaded: LoadedModel, count: int, tokens: int) -> list[Request]:
    """Greedy requests that share their first 128 tokens and never stop before `tokens`."""
    random = np.random.default_rng(0)
    prompts = random.integers(3, loaded.vocab_size, (count, SHARED + PRIVATE)).astype(np.int32)
    prompts[:, :SHARED] = prompts[0, :SHARED]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [Request(each, params, tokens, frozenset(), 0, loaded.tokenizer) for each in prompts]


def all_decode(core: Core, count: int) -> bool:
    live = [stream for request in core.scheduler.running for stream in request.live]
    return len(live) == count and not any(stream.prefilling for stream in live)


def measure(loaded: LoadedModel, count: int, steps: int, profiled: int) -> tuple[dict[str, list[float]], str]:
    """Seconds of each part in each step, and the profile of some more."""
    total = SHARED + PRIVATE + steps + profiled + 100
    blocks = 2 * count * -(-total // BLOCK)
    runner = ClockedRunner(Runner(loaded, blocks, BLOCK))
    core = Core(PrefixCache(blocks, BLOCK), runner, EngineConfig(max_sequences=count))
    first, *others = requests(loaded, count, total - SHARED - PRIVATE)
    core.add(first)
    core.step()  # its prompt is in the tree before the others ask for their share
    for request in others:
        core.add(request)
    while not all_decode(core, count):
        core.step()
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    sampler = Clocked(core.sampler.begin)
    with patch.object(core.sampler, "begin", sampler):
        for number in range(-8, steps):  # the first eight warm up
            runner.clock.seconds = sampler.seconds = 0.0
            step = Clocked(core.step)
            step()
            seconds = (runner.clock.seconds, sampler.seconds)
            if number >= 0:
                for part, spent in zip(PARTS, (*seconds, step.seconds - sum(seconds)), strict=True):
                    parts[part].append(spent)
    assert all_decode(core, count), "some stream ended while it was measured"
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(profiled):
        core.step()
    profile.disable()
    core.cache.check()
    return parts, _largest(profile, profiled) if profiled else ""


def _largest(profile: cProfile.Profile, steps: int) -> str:
    """Our own functions by cumulative time, as lines of ms per step, calls per step and name."""
    entries = pstats.Stats(profile, stream=io.StringIO()).stats.items()  # type: ignore[attr-defined]
    ours = [
        (total, own, calls, f"{file.split('radixkv' + os.sep, 1)[-1]}:{name}")
        for (file, _, name), (calls, _, own, total, _) in entries
        if f"radixkv{os.sep}" in file and f"{os.sep}models{os.sep}runner" not in file and "attention" not in file
    ]
    lines = ["      ms per step, with what it calls   alone    calls  (cProfile's own cost included)"]
    for total, own, calls, name in sorted(ours, reverse=True)[:24]:
        lines.append(f"    {total / steps * 1e3:12.3f} {own / steps * 1e3:26.3f} {calls / steps:8.1f}  {name}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "100m"], help="one of the two models")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="steps to profile afterwards")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread, for a busy machine")
    options = parser.parse_args()
    if options.cpu:
        Clocked.clock, options.threads = time.thread_time, 1
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    unit = "CPU time" if options.cpu else "wall time"
    print(f"{options.sequences} streams, {torch.get_num_threads()} threads, {unit}, {cpu_name()}")
    result: dict[str, float] = {}
    for name in [options.model] if options.model else ["tiny", "100m"]:
        parts, profile = measure(load(name), options.sequences, options.steps, options.profile)
        medians = {part: statistics.median(spent) * 1e3 for part, spent in parts.items()}
        share = medians["overhead"] / sum(medians.values())
        print(
            f"{name}: " + ", ".join(f"{part} {ms:.2f} ms" for part, ms in medians.items()) + f"; overhead {share:.1%}"
        )
        print(profile, end="\n" if profile else "")
        result |= {f"{name}_{part}_ms": round(ms, 3) for part, ms in medians.items()}
        result[f"{name}_overhead_share"] = round(share, 4)
    missed = [name for name, value in result.items() if name.endswith("_share") and value >= BAR]
    for name in missed:
        print(f"MISSED: {name} is {result[name]:.3f}, the bar is {BAR}")
    versions = {"clock": unit, "threads": torch.get_num_threads(), "torch": torch.__version__, "cpu": cpu_name()}
    print(json.dumps({"benchmark": "scheduler_overhead", "sequences": options.sequences, **result, **versions}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
