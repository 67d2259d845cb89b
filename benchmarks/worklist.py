"""Measure the host time of finding the tree and cutting it into tiles for a step, in milliseconds of thread CPU time.

Batches of 8, 64 and 256 sequences decode one token a step; blocks of 16. Four shapes of tree:

  flat      2,048 tokens each, nothing shared
  shared    8,192 tokens that all share, 512 of each sequence
  agents    4,096 tokens that all share, 1,024 of each group of eight, 512 of each sequence
  deep      five levels: each halves the batch and adds 1,024 tokens, then 256 of each sequence

Four variants take turns within one run:

  naive     the peer: a tree of nodes and dictionaries from the tables in each step, then one list of items. It must
            find the same items.
  anew      `plan.build` without the list of the last step
  grown     `plan.build` with it, as the engine does while the same sequences decode. Bar: 0.3 ms at 64 sequences,
            in every shape.
  tiles     `tiles.build` for a GPU of 132 processors and heads 32/8, once for each distinct window of a model

Steps are real: each sequence grows by a token, and every sixteenth time by a block. The medians are compared; `low` and
`high` are the tenth and the ninetieth percentile of `grown`. Run it as

    python benchmarks/worklist.py [--steps 48]

The last line is one JSON object; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from numpy.typing import NDArray

from radixkv.attention import plan
from radixkv_kernels import tiles
from radixkv_kernels.work_list import WorkList

BLOCK = 16
BAR_MS, BAR_SEQUENCES = 0.3, 64
SHAPES = (tiles.Shape(16, 64), tiles.Shape(64, 64), tiles.Shape(128, 64))
GROUP, SPREAD = 4, (33.0, 33.0, 16.5)  # 32 query heads over 8 kv heads; 132 processors with 2, 2 and 1 programs

Tables = list[NDArray[np.int32]]
Items = set[tuple[int, int, tuple[int, ...]]]
"""(first key, keys, who reads them)"""


# ---- batches


def flat(count: int) -> list[list[tuple[int, int]]]:
    """The runs of each sequence, each (name, tokens). Sequences with a run of the same name share it."""
    return [[(index, 2048)] for index in range(count)]


def shared(count: int) -> list[list[tuple[int, int]]]:
    return [[(-1, 8192), (index, 512)] for index in range(count)]


def agents(count: int) -> list[list[tuple[int, int]]]:
    return [[(-1, 4096), (-2 - index // 8, 1024), (index, 512)] for index in range(count)]


def deep(count: int) -> list[list[tuple[int, int]]]:
    def runs(index: int) -> list[tuple[int, int]]:
        places = [(-1 - (1 << level) - index * (1 << level) // count, 1024) for level in range(5)]
        return [*places, (index, 256)]

    return [runs(index) for index in range(count)]


TREES = {"flat": flat, "shared": shared, "agents": agents, "deep": deep}


def decoding(runs: list[list[tuple[int, int]]]) -> Iterator[tuple[Tables, list[int]]]:
    """The tables and kv lengths of one step after another; blocks lie anywhere, as in a pool that has been in use."""
    free = iter(np.random.default_rng(0).permutation(1 << 18).tolist())
    blocks: dict[int, list[int]] = {}
    tables: list[list[int]] = []
    for each in runs:
        for name, tokens in each:
            blocks.setdefault(name, []) or blocks[name].extend(next(free) for _ in range(tokens // BLOCK))
        tables.append([block for name, _ in each for block in blocks[name]])
    lengths = [len(table) * BLOCK - index % BLOCK for index, table in enumerate(tables)]
    while True:
        for index, table in enumerate(tables):
            lengths[index] += 1
            if lengths[index] > len(table) * BLOCK:
                table.append(next(free))
        yield [np.array(table, dtype=np.int32) for table in tables], list(lengths)


# ---- the peer


@dataclass
class Node:
    """One block of a tree."""

    members: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)


def naive(tables: Tables, lengths: list[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Build the items from a new tree in each step: walk the tables, then walk the tree."""
    root = Node()
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        node = root
        for block in table[: length // BLOCK].tolist():
            node = node.children.setdefault(block, Node())
            node.members.append(index)
    items: list[tuple[int, int, tuple[int, ...]]] = []
    waiting = [(child, 0) for child in root.children.values()]
    left = [0] * len(tables)
    while waiting:
        node, start = waiting.pop()
        end, last = start + 1, node
        if len(node.members) == 1:
            continue
        while len(last.children) == 1 and len(next(iter(last.children.values())).members) == len(node.members):
            last, end = next(iter(last.children.values())), end + 1
        if (end - start) * BLOCK * (len(node.members) - 1) >= plan.MIN_SAVING:
            items.append((start * BLOCK, (end - start) * BLOCK, tuple(node.members)))
            for index in node.members:
                left[index] = end * BLOCK
        waiting += [(child, end) for child in last.children.values()]
    items += [(start, lengths[index] - start, (index,)) for index, start in enumerate(left) if start < lengths[index]]
    return items


def items_of(work: WorkList) -> Items:
    """A list's items as the peer names them."""
    rows = [work.row_ids[a : a + n].tolist() for a, n in zip(work.row_offset, work.rows, strict=True)]
    return {
        (int(start), int(tokens), tuple(members))
        for start, tokens, members in zip(work.kv_start, work.tokens, rows, strict=True)
    }


# ---- measuring


def milliseconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3


def measure(runs: list[list[tuple[int, int]]], steps: int) -> dict[str, list[float]]:
    """Times of each variant, step by step; the first step warms up and is checked."""
    times: dict[str, list[float]] = {"naive": [], "anew": [], "grown": [], "tiles": []}
    previous: WorkList | None = None
    for step, (tables, lengths) in zip(range(steps + 1), decoding(runs), strict=False):
        ones, found = [1] * len(tables), dict[str, WorkList]()

        def build(name: str, last: WorkList | None) -> None:
            found[name] = plan.build(tables, lengths, ones, previous=last, block_size=BLOCK)  # noqa: B023

        spent = {"anew": milliseconds(lambda: build("anew", None))}
        spent["grown"] = milliseconds(lambda: build("grown", previous))  # noqa: B023
        previous = found["grown"]
        spent["tiles"] = milliseconds(lambda: tiles.build(previous, SHAPES, GROUP, spread=SPREAD))  # type: ignore[arg-type]  # noqa: B023
        if step == 0:
            same = set(naive(tables, lengths)) == items_of(found["anew"]) == items_of(previous)
            assert same, "the peer finds other items"
            continue
        if step % 8 == 1:
            spent["naive"] = milliseconds(lambda: naive(tables, lengths))  # noqa: B023
        for name, value in spent.items():
            times[name].append(value)
    assert previous is not None and items_of(previous) == items_of(found["anew"])
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="steps that are timed of each batch")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print("| tree | sequences | naive | anew | grown | low | high | tiles | naive / grown |")
        print("|---|---|---|---|---|---|---|---|---|")
    for count in (8, 64, 256):
        for name, tree in TREES.items():
            times = measure(tree(count), options.steps)
            median = {each: round(statistics.median(found), 3) for each, found in times.items()}
            low, *_, high = statistics.quantiles(times["grown"], n=10)
            row = {"tree": name, "sequences": count, **median, "low": round(low, 3), "high": round(high, 3)}
            rows.append(row | {"over_naive": round(median["naive"] / median["grown"], 1)})
            if not options.json:
                numbers = (*(median[each] for each in ("naive", "anew", "grown")), low, high, median["tiles"])
                cells = " | ".join(f"{number:.2f}" for number in numbers)
                print(f"| {name} | {count} | {cells} | {rows[-1]['over_naive']:.0f} |", flush=True)
    worst = max(row["grown"] for row in rows if row["sequences"] == BAR_SEQUENCES)
    met = worst <= BAR_MS
    line = {"benchmark": "worklist", "bar_ms": BAR_MS, "worst_ms": worst, "met": met, "steps": options.steps}
    print(json.dumps({**line, "rows": rows}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
