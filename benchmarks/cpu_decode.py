"""Measure an engine step on one CPU thread against transformers on the same weights, in the same process.

The model is a Llama of 100 million random weights in float32 (12 layers, 768 wide, 12 query and 4 KV heads, 32k vocab).
A step of radixkv includes all work of an engine: extend every sequence, run, commit, take the likeliest tokens.

  decode    8 sequences of about 512 tokens, one token each. Peer: `generate` with a static cache of exactly this
            length; its step is (time of 17 tokens - time of 1) / 16. radixkv runs on a fresh pool, where the blocks of
            a sequence are contiguous, and on a churned one, where they lie anywhere. All three start from the same KV.
            The benchmark fails unless they give the same tokens.
  ttft      Time to the first token of a prompt of 2048 tokens, in chunks of 512: nothing cached, and 90% cached.
  shared    8 sequences of 256 tokens each after a shared prefix of 4096. Attention along the tree reads each shared key
            once; the other side runs one attention per sequence over its gathered KV, in the same step. Its time is
            also given without the gathering, as if each sequence had contiguous KV.

Times are process CPU time in milliseconds on one thread. The cases take turns, and medians are compared. Where the
prefill is not measured, random KV replaces it. radixkv runs as `Engine.load` builds it, with linear layers packed for
oneDNN (models/packed.py); transformers runs its own linear layers, which are those of torch. Run it as

    python benchmarks/cpu_decode.py [--rounds 9]

The last line is one JSON object; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import transformers
from torch import Tensor

from radixkv.attention import torch_backend
from radixkv.attention.kv_store import KVStore
from radixkv.cache import PrefixCache, Sequence
from radixkv.models import adapter
from radixkv.models.loaded import SequenceInput
from radixkv.models.runner import Runner
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from radixkv_kernels.work_list import WorkList

BATCH, LENGTH, STEPS = 8, 504, 16  # the steps are centred on 512 tokens
PROMPT, CHUNK, CACHED = 2048, 512, 0.9
PREFIX, PRIVATE = 4096, 256
BLOCK = 16
VOCAB = 32_000
BARS = {"decode_fresh": 1.05, "decode_churned": 1.25, "ttft_hit": 0.12}
LEAST = {"shared_attention_gain": 2.5}
GREEDY = SamplingParams(temperature=0)


def build_model() -> Any:
    """The 100M Llama; the same weights each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


class Steps:
    """Our side: sequences of a cache over a runner's pool, filled with random KV instead of prefills."""

    def __init__(self, loaded: adapter.LoadedModel, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK)
        self.runner = Runner(loaded, num_blocks, BLOCK)

    def churn(self, seed: int) -> None:
        """Leave the free list as a long life of the pool leaves it: in no order."""
        order = random.Random(seed)
        held = []
        while self.cache.free_blocks:
            sequence = self.cache.open([])
            sequence.extend([len(held)])
            sequence.commit()
            held.append(sequence)
        order.shuffle(held)
        for sequence in held:
            sequence.close()
        self.cache.clear()

    def fill(self, tokens: list[int]) -> Sequence:
        """A sequence of `tokens` whose uncached part got random KV."""
        sequence = self.cache.open(tokens)
        plan = sequence.extend(tokens[sequence.length :])
        self.runner.store.copy(plan.copies)
        slots = torch.from_numpy(plan.slots)
        source = torch.Generator().manual_seed(len(tokens) + tokens[-1])
        for layer, shape in enumerate(self.runner.store.layers):
            key = torch.randn(shape.kv_heads, len(slots), shape.key_dim, generator=source)
            value = torch.randn(shape.kv_heads, len(slots), shape.value_dim, generator=source)
            self.runner.store.write(layer, slots, key, value)
        sequence.commit()
        return sequence

    def step(self, sequences: list[Sequence], tokens: list[list[int]]) -> list[int]:
        """Schedule, run, commit, sample: as an engine does, without its queue."""
        chunks, copies = [], []
        for sequence, new in zip(sequences, tokens, strict=True):
            start = sequence.length
            plan = sequence.extend(new)
            copies += plan.copies
            chunks.append(SequenceInput(np.array(new, dtype=np.int32), start, plan.slots, sequence.block_table))
        logits = self.runner.run(chunks, copies)
        for sequence in sequences:
            sequence.commit()
        return sample(logits, [SampleRow(GREEDY, 0, sequence.length) for sequence in sequences]).tokens

    def decode(self, sequences: list[Sequence], first: list[int], steps: int) -> list[list[int]]:
        """`steps` greedy tokens for each sequence, one step for each."""
        rows = [first]
        for _ in range(steps):
            rows.append(self.step(sequences, [[token] for token in rows[-1]]))
        return [list(tokens) for tokens in zip(*rows[1:], strict=True)]


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU milliseconds, result)."""
    start = time.process_time()
    result = work()
    return (time.process_time() - start) * 1e3, result


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, count)]


# ---- decode


def static_cache(model: Any, store: KVStore, sequences: list[Sequence]) -> Any:
    """A static cache of the same length with the same KV as our sequences."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + STEPS + 1)
    for layer in range(len(store.layers)):
        found = [store.gather(layer, sequence.block_table, LENGTH) for sequence in sequences]
        cache.update(torch.stack([key for key, _ in found]), torch.stack([value for _, value in found]), layer)
    return cache


def generate(model: Any, cache: Any, prompts: Tensor, count: int) -> list[list[int]]:
    """Let transformers continue `prompts` [8, LENGTH + 1] by `count` greedy tokens after the cached LENGTH."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(LENGTH)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return [row[LENGTH + 1 :] for row in output.tolist()]


def measure_decode(peer: Any, loaded: adapter.LoadedModel, rounds: int) -> dict[str, float]:
    """Median milliseconds per step of generate, of a fresh and of a churned pool."""
    prompts = [random_tokens(seed, LENGTH) for seed in range(BATCH)]
    first = random_tokens(99, BATCH)
    blocks = 4 * BATCH * -(-(LENGTH + STEPS + 1) // BLOCK)
    pools = {"fresh": Steps(loaded, blocks), "churned": Steps(loaded, blocks)}
    pools["churned"].churn(seed=1)
    held = {name: [pool.fill(prompt) for prompt in prompts] for name, pool in pools.items()}
    cache = static_cache(peer, pools["fresh"].runner.store, held["fresh"])
    asked = torch.tensor([[*prompt, token] for prompt, token in zip(prompts, first, strict=True)])
    times: dict[str, list[float]] = {"generate": [], "fresh": [], "churned": []}
    for _ in range(rounds + 1):  # the first round warms up
        short, _ = timed(lambda: generate(peer, cache, asked, 1))
        long, expected = timed(lambda: generate(peer, cache, asked, STEPS + 1))
        times["generate"].append((long - short) / STEPS)
        for name, pool in pools.items():
            spent, found = timed(lambda pool=pool, name=name: pool.decode(held[name], first, STEPS))
            times[name].append(spent / STEPS)
            if found != [row[:STEPS] for row in expected]:
                raise SystemExit(f"the {name} pool and generate do not agree on the tokens")
            for sequence in held[name]:
                sequence.truncate(LENGTH)
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}


# ---- time to first token


def first_token(pool: Steps, prompt: list[int]) -> int:
    """Open, compute the missing tokens in chunks, sample, close."""
    sequence = pool.cache.open(prompt, limit=len(prompt) - 1)
    waiting = prompt[sequence.length :]
    while waiting:
        [token] = pool.step([sequence], [waiting[:CHUNK]])
        waiting = waiting[CHUNK:]
    sequence.close()
    return token


def measure_ttft(loaded: adapter.LoadedModel, rounds: int) -> dict[str, float]:
    """Median milliseconds to the first token of 2048, cold and with 90% cached; the tokens must be equal."""
    pool = Steps(loaded, 2 * PROMPT // BLOCK)
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    for number in range(rounds):
        prompt = random_tokens(1000 + number, PROMPT)
        for case in ("hit", "cold", "hit"):  # the short one twice, around the long one: the machine's mood changes
            pool.cache.clear()
            if case == "hit":
                pool.fill(prompt[: int(PROMPT * CACHED)]).close()
            times[case].append(timed(lambda prompt=prompt: first_token(pool, prompt))[0])
    pool.cache.clear()
    cold = first_token(pool, prompt)
    pool.cache.clear()
    first_token(pool, prompt[: int(PROMPT * CACHED)])
    if first_token(pool, prompt) != cold:
        raise SystemExit("a cached prefix changed the first token")
    return {name: statistics.median(spent) for name, spent in times.items()}


# ---- shared prefix


class PerSequence:
    """Attention as engines without a tree compute it for decodes: gather each sequence's KV, one product for each."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences, self.gathering = sequences, 0.0

    def __call__(
        self, store: KVStore, layer: int, query: Tensor, work: WorkList, *, scale: float, softcap: Any, sinks: Any
    ) -> Tensor:
        rows = []
        for row, sequence in enumerate(self.sequences):
            table, length = sequence.block_table, sequence.length + 1
            spent, (key, value) = timed(lambda t=table, n=length: store.gather(layer, t, n))
            self.gathering += spent
            grouped = query[:, row].unflatten(0, (key.shape[0], -1))[None]
            rows.append(torch.nn.functional.scaled_dot_product_attention(grouped, key[None], value[None], scale=scale))
        return torch.cat(rows).flatten(1, 2)


class Clocked:
    """An attention function that adds up its time."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self.attend, self.spent = attend, 0.0

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        spent, result = timed(lambda: self.attend(*args, **options))
        self.spent += spent
        return result


def measure_shared(loaded: adapter.LoadedModel, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step and of its attention, along the tree and per sequence; the tokens must be equal."""
    prefix, steps, length = random_tokens(7, PREFIX), 4, PREFIX + PRIVATE
    pool = Steps(loaded, (PREFIX + 2 * BATCH * PRIVATE) // BLOCK)
    sequences = [pool.fill(prefix + random_tokens(50 + index, PRIVATE)) for index in range(BATCH)]
    first = random_tokens(98, BATCH)
    flat = PerSequence(sequences)
    ways = {"tree": torch_backend.attend, "flat": flat}
    times: dict[str, list[float]] = {f"{way}_{part}": [] for way in ways for part in ("step", "attention")}
    times["flat_gather"] = []
    for _ in range(rounds + 1):
        tokens, flat.gathering = [], 0.0
        for way, attend in ways.items():
            clocked = Clocked(attend)
            with patch.object(pool.runner.backend, "attend", partial(clocked, pool.runner.store)):
                spent, found = timed(lambda: pool.decode(sequences, first, steps))
            times[f"{way}_step"].append(spent / steps)
            times[f"{way}_attention"].append(clocked.spent / steps)
            tokens.append(found)
            for sequence in sequences:
                sequence.truncate(length)
        times["flat_gather"].append(flat.gathering / steps)
        if tokens[0] != tokens[1]:
            raise SystemExit("attention along the tree and per sequence do not agree on the tokens")
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measurements per case (ttft and shared: half of them)")
    parser.add_argument("--only", choices=["decode", "ttft", "shared"], help="one of the three parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    peer, loaded = build_model(), adapter.load(build_model())
    print(f"{sum(p.numel() for p in peer.parameters()) / 1e6:.0f}M weights, float32, 1 thread, {cpu_name()}")
    result: dict[str, float] = {}
    if options.only in (None, "decode"):
        decode = measure_decode(peer, loaded, options.rounds)
        print(
            f"decode, batch {BATCH} at 512 tokens, ms per step: " + ", ".join(f"{k} {v:.1f}" for k, v in decode.items())
        )
        result |= {f"decode_{name}_ms": value for name, value in decode.items()}
        result |= {f"decode_{name}": decode[name] / decode["generate"] for name in ("fresh", "churned")}
    if options.only in (None, "ttft"):
        ttft = measure_ttft(loaded, max(1, options.rounds // 2))
        print(f"first token of {PROMPT}, ms: cold {ttft['cold']:.0f}, {CACHED:.0%} cached {ttft['hit']:.0f}")
        result |= {"ttft_cold_ms": ttft["cold"], "ttft_hit_ms": ttft["hit"], "ttft_hit": ttft["hit"] / ttft["cold"]}
    if options.only in (None, "shared"):
        shared = measure_shared(loaded, max(1, options.rounds // 2))
        print(
            f"{BATCH} x {PRIVATE} behind {PREFIX} shared, ms: " + ", ".join(f"{k} {v:.1f}" for k, v in shared.items())
        )
        result |= {f"shared_{name}_ms": value for name, value in shared.items()}
        result["shared_attention_gain"] = shared["flat_attention"] / shared["tree_attention"]
        result["shared_step_gain"] = shared["flat_step"] / shared["tree_step"]
        gathered = shared["flat_gather"]  # the saving of an engine with contiguous KV for each sequence
        result["shared_attention_gain_no_gather"] = (shared["flat_attention"] - gathered) / shared["tree_attention"]
        result["shared_step_gain_no_gather"] = (shared["flat_step"] - gathered) / shared["tree_step"]
        result["shared_attention_share"] = shared["tree_attention"] / shared["tree_step"]
    missed = [name for name, bar in BARS.items() if name in result and result[name] > bar]
    missed += [name for name, bar in LEAST.items() if name in result and result[name] < bar]
    for name in missed:
        print(f"MISSED: {name} is {result[name]:.3f}, the bar is {(BARS | LEAST)[name]}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": cpu_name()}
    print(json.dumps({"benchmark": "cpu_decode", **{k: round(v, 4) for k, v in result.items()}, **versions}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
