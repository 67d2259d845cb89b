"""Measure a turn of a conversation in the cache, with and without a recorder, and a collection, by size of the tree.

A turn is open, extend by 64 tokens, commit and close of a new conversation under one of 100 system prompts. The
variants take turns. Times are the CPU time of this thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.telemetry.recorder import Recorder

TURNS = 64  # between two looks


def rows(sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    """Return for each size the medians in us: a turn, one with a recorder, a collection after 64 turns, and an empty
    one."""
    return [_row(nodes, rounds) for nodes in sizes]


def _row(nodes: int, rounds: int) -> dict[str, float]:
    (plain, _), (seen, recorder) = tree(nodes, watched=False), tree(nodes, watched=True)
    assert recorder is not None
    took: dict[str, list[float]] = {"turn_us": [], "watched_us": [], "look_us": [], "empty_look_us": []}
    for round_ in range(rounds):
        first = 10_000_000 + round_ * TURNS
        took["turn_us"].append(turns(plain, first))
        took["watched_us"].append(turns(seen, first))
        took["look_us"].append(look(recorder))
        took["empty_look_us"].append(look(recorder))
    return {"nodes": nodes} | {name: round(statistics.median(each), 2) for name, each in took.items()}


def tree(nodes: int, *, watched: bool) -> tuple[PrefixCache, Recorder | None]:
    """Conversations of one turn each under 100 system prompts."""
    cache = PrefixCache(nodes * 6 + 8192, 16)
    recorder = None
    if watched:
        recorder = Recorder()
        recorder.attach(cache)
    for number in range(nodes):
        turn(cache, prompt(number))
    if recorder is not None:
        recorder.collect()
    return cache, recorder


def prompt(number: int) -> np.ndarray[Any, Any]:
    return np.array([number % 100 + 1] * 32 + [number + 1000] * 32, np.int32)


def turn(cache: PrefixCache, text: np.ndarray[Any, Any]) -> None:
    sequence = cache.open(text)
    sequence.extend(text[sequence.length :])
    sequence.commit()
    sequence.close()


def turns(cache: PrefixCache, first: int) -> float:
    """CPU microseconds a turn."""
    texts = [prompt(number) for number in range(first, first + TURNS)]
    begun = time.thread_time_ns()
    for text in texts:
        turn(cache, text)
    return (time.thread_time_ns() - begun) / TURNS / 1000


def look(recorder: Recorder) -> float:
    """CPU microseconds of one `collect`."""
    begun = time.thread_time_ns()
    recorder.collect()
    return (time.thread_time_ns() - begun) / 1000


def marks_of_a_turn() -> int:
    """How many marks and events one such turn takes, counted."""
    cache, recorder = tree(200, watched=True)
    assert recorder is not None
    counted = [0]
    changed, observer = cache.state.tree.changed, cache.state.tree.observer
    assert changed is not None and observer is not None
    mark = changed.mark

    def count(node: Any) -> None:
        counted[0] += 1
        mark(node)

    class Counting:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def tell(*facts: object) -> None:
                counted[0] += 1

            return tell

    changed.mark = count
    cache.state.tree.observer = Counting()  # type: ignore[assignment]
    turn(cache, prompt(100_000_100))
    return counted[0]
