"""Measure attention along the tree on one CPU thread against torch's own attention over contiguous KV.

One layer has the shapes of a 100M Llama (12 query heads, 4 KV heads of 64, float32). 12 layers take turns, so that KV
comes from memory as it does in a model. Each row calls `radixkv.attention` as a model does, once per layer.

  shared    8 sequences decode over a common prefix of 4096 tokens and 256 of their own. Peer: each sequence alone, its
            blocks gathered, then `scaled_dot_product_attention`. Bar: 2.5x faster. The table also has the same peer
            over KV that needs no gathering.
  decode    8 sequences of 512 tokens that share nothing, on a fresh pool (blocks in a row), a grown one (half of each
            sequence came a block at a time, in turns) and a churned one (blocks anywhere). Peer: one masked
            `scaled_dot_product_attention` over a contiguous static cache.
  prefill   A prompt of 2048 tokens with nothing cached, and with 90% of it cached on a churned pool. Peer: the same
            kernel, causal, over contiguous KV of the whole prompt.
  lists     Building the work list of 64 sequences (8k shared, about 512 of their own): from scratch, and grown from the
            list of the last step by one token each (bar: 0.3 ms). The plan of a step, made once for all layers, is
            timed for `decode`.

Times are process CPU time, in milliseconds for 12 layers (lists: for one). The variants take turns, and their medians
are compared. Run it as

    python benchmarks/attention_cpu.py [--rounds 15]

The last line is one JSON object; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from radixkv.attention import plan, torch_backend
from radixkv.attention.kv_store import KVStore, LayerShape

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 12, 12, 4, 64, 16
GROUP, SCALE = HEADS // KV_HEADS, DIM**-0.5
BARS = {"shared_speedup": 2.5, "list_grown_ms": 0.3}

Case = Callable[[], object]
Tables = list[NDArray[np.int32]]


def measure(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Median process CPU time of each case in milliseconds, the cases taking turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name, case in cases.items():
                start = time.process_time()
                case()
                if turn:  # the first is a warm-up
                    times[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def random_store(blocks: int) -> KVStore:
    store = KVStore([LayerShape(KV_HEADS, DIM, DIM)] * LAYERS, blocks, BLOCK)
    for tensor in (*store.keys, *store.values):
        tensor.normal_()
    return store


def model_query(rows: int) -> torch.Tensor:
    """[heads, rows, dim], laid out as a model's projections leave it."""
    return torch.randn(rows, HEADS, DIM).transpose(0, 1)


def along_the_tree(store: KVStore, tables: Tables, kv: list[int], queries: list[int], query: torch.Tensor) -> Case:
    """A step of ours: the plan is made by the first layer, the list once before."""

    def step() -> torch.Tensor:
        work = plan.build(tables, kv, queries, block_size=BLOCK)
        for layer in range(LAYERS):
            output = torch_backend.attend(store, layer, query, work, scale=SCALE)
        return output

    return step


def one_by_one(store: KVStore, tables: Tables, kv: list[int], query: torch.Tensor, *, gathered: bool) -> Case:
    """Each sequence alone: its KV gathered (or, for comparison, ready in a row), then torch's attention."""
    rows = query.transpose(0, 1).reshape(len(kv), 1, KV_HEADS, GROUP, DIM)
    ready = [
        [store.gather(layer, t, n) for t, n in zip(tables, kv, strict=True)]
        for layer in range(0 if gathered else LAYERS)
    ]
    indices = [torch.from_numpy(table.astype(np.int64)) for table in tables]

    space = [torch.empty(KV_HEADS, max(map(len, tables)), BLOCK, DIM) for _ in range(2)]  # a new allocation costs more

    def fetch(layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pools = store.keys[layer], store.values[layer]
        for pool, out in zip(pools, space, strict=True):
            torch.index_select(pool, 1, indices[index], out=out)
        key, value = (out.flatten(1, 2)[:, : kv[index]] for out in space)
        return key, value

    def step() -> torch.Tensor:
        for layer in range(LAYERS):
            outputs = []
            for index in range(len(kv)):
                key, value = fetch(layer, index) if gathered else ready[layer][index]
                outputs.append(F.scaled_dot_product_attention(rows[index], key[None], value[None]))
        return torch.stack(outputs)

    return step


def check(case: Case, peer: Case, rows: int) -> None:
    """Both must compute the same last layer, or nothing is worth timing."""
    ours, theirs = case(), peer()
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours.reshape(rows, -1), theirs.reshape(rows, -1), rtol=1e-4, atol=1e-5)


def shared(rounds: int) -> dict[str, float]:
    count, prefix, own = 8, 4096 // BLOCK, 256 // BLOCK
    order = np.random.default_rng(0).permutation(prefix + count * own).astype(np.int32)
    tails = order[prefix:].reshape(count, own)
    tables, kv = [np.concatenate([order[:prefix], tail]) for tail in tails], [4096 + 256] * count
    store, query = random_store(len(order)), model_query(count)
    cases = {
        "tree": along_the_tree(store, tables, kv, [1] * count, query),
        "gathered": one_by_one(store, tables, kv, query, gathered=True),
        "contiguous": one_by_one(store, tables, kv, query, gathered=False),
    }
    check(cases["tree"], cases["gathered"], count)
    return measure(cases, rounds)


def decode_tables(kind: str, count: int, length: int) -> Tables:
    blocks = length // BLOCK
    ids = np.arange(count * blocks, dtype=np.int32)
    if kind == "churned":
        ids = np.random.default_rng(0).permutation(ids)
    if kind == "grown":
        half = blocks // 2
        first, turns = ids[: count * half].reshape(count, half), ids[count * half :].reshape(-1, count).T
        return list(np.concatenate([first, turns], axis=1))
    return list(ids.reshape(count, blocks))


def decode(rounds: int) -> dict[str, float]:
    count, length = 8, 512
    store, query = random_store(count * length // BLOCK), model_query(count)
    keys, values = (
        [pool.view(KV_HEADS, count, length, DIM).transpose(0, 1).contiguous() for pool in pools]
        for pools in (store.keys, store.values)
    )
    rows = query.transpose(0, 1).reshape(count, KV_HEADS, GROUP, DIM)
    mask = torch.ones(count, 1, 1, length, dtype=torch.bool)

    def static() -> torch.Tensor:
        for key, value in zip(keys, values, strict=True):
            output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
        return output

    cases: dict[str, Case] = {"static": static}
    for kind in ("fresh", "grown", "churned"):
        tables = decode_tables(kind, count, length)
        cases[kind] = along_the_tree(store, tables, [length] * count, [1] * count, query)
    work = plan.build(decode_tables("grown", count, length), [length] * count, [1] * count, block_size=BLOCK)
    cases["plan"] = lambda: torch_backend.TorchPlan(store, work, KV_HEADS, GROUP)
    check(cases["fresh"], static, count)
    return measure(cases, rounds)


def prefill(rounds: int) -> dict[str, float]:
    length, fresh = 2048, 205
    table = np.random.default_rng(0).permutation(length // BLOCK).astype(np.int32)
    store, query = random_store(length // BLOCK), model_query(length)
    ready = [store.gather(layer, table, length) for layer in range(LAYERS)]

    def causal() -> torch.Tensor:
        for key, value in ready:
            output = F.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True, enable_gqa=True
            )
        return output[0].transpose(0, 1)

    cases: dict[str, Case] = {
        "peer": causal,
        "cold": along_the_tree(store, [table], [length], [length], query),
        "hit": along_the_tree(store, [table], [length], [fresh], query[:, -fresh:]),
    }
    check(cases["cold"], causal, length)
    check(cases["hit"], lambda: causal()[-fresh:], fresh)
    return measure(cases, max(3, rounds // 3))


def lists(rounds: int) -> dict[str, float]:
    count, prefix = 64, np.arange(512, dtype=np.int32)
    tables = [np.concatenate([prefix, np.arange(34, dtype=np.int32) + 600 + 40 * i]) for i in range(count)]
    before, after = ([8192 + 512 + i % 16 + step for i in range(count)] for step in (0, 1))
    previous = plan.build(tables, before, [1] * count, block_size=BLOCK)
    cases: dict[str, Case] = {
        "list_new": lambda: plan.build(tables, after, [1] * count, block_size=BLOCK),
        "list_grown": lambda: plan.build(tables, after, [1] * count, None, previous, block_size=BLOCK),
    }
    return measure(cases, rounds * 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="how often each case is timed (default 15)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, float | str] = {"benchmark": "attention_cpu", "torch": torch.__version__}
    result["machine"] = platform.processor() or platform.machine()
    for suite in (shared, decode, prefill, lists):
        print(f"\n{suite.__name__}: process CPU ms{'' if suite is lists else ' for 12 layers'}")
        times = suite(rounds)
        for name, value in times.items():
            print(f"  {name:12s}{value:9.3f}")
        result |= {
            f"{name if suite is lists else f'{suite.__name__}_{name}'}_ms": round(v, 3) for name, v in times.items()
        }
        if suite is shared:
            result["shared_speedup"] = round(times["gathered"] / times["tree"], 2)
    missed = [
        name
        for name, bar in BARS.items()
        if (float(result[name]) < bar if name.endswith("speedup") else float(result[name]) > bar)
    ]
    result["missed"] = ", ".join(missed)
    print()
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
