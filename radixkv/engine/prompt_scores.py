"""Keep the scores of prompts, for later prompts that begin with the same tokens.

A hit on KV gives no logits. Without kept scores, two requests for the log probabilities of one prompt would both
compute it. With them, the second one takes the scores of the common prefix, and its hit on KV reaches as far.

The kept prompts are sorted, so the longest common prefix with any of them is the one with a neighbour. Keys are
big-endian token bytes, whose order is the order of the tokens. No kept prompt is the beginning of another one with as
many alternatives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from sortedcontainers import SortedDict

from radixkv.engine.request import common_prefix
from radixkv.engine.scoring import Scoring
from radixkv.sampling.row_scores import RowScores

MOST_BYTES = 32 << 20
"""Memory of all kept scores; a token takes 12 bytes, and 8 more for each alternative."""

_TOKEN = 4  # bytes of a token in a key


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """The scores of a prompt's tokens after the first: index i is position i + 1. `key` has all of its tokens."""

    namespace: Hashable
    key: bytes
    scores: RowScores
    nbytes: int

    @property
    def top(self) -> int:
        """The number of alternatives of each token."""
        return int(self.scores.ids.shape[1])


class PromptScores:
    """The scores of the prompts that were used last, by namespace. One thread calls it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Start empty, and take at most `most_bytes`."""
        self.nbytes = 0
        self._most_bytes = most_bytes
        self._by_use: OrderedDict[KeptPrompt, None] = OrderedDict()  # the least recently used first
        self._groups: dict[Hashable, dict[int, SortedDict]] = {}  # namespace -> alternatives -> key -> KeptPrompt

    def __len__(self) -> int:
        """Return the number of kept prompts."""
        return len(self._by_use)

    def keep(self, scoring: Scoring, namespace: Hashable, rows: int) -> None:
        """Keep the first `rows` scores of a request, which begin at position 1; the arrays are not copied.

        O(tokens + log prompts), and O(log prompts) for each prompt that is dropped.
        """
        assert 0 < rows < scoring.missing
        if scoring.nbytes > self._most_bytes:
            return
        key, top = scoring.key[: (rows + 1) * _TOKEN], scoring.top
        for neighbour in self._neighbours(namespace, top, key):
            if neighbour.key.startswith(key):
                self._by_use.move_to_end(neighbour)
                return
            if key.startswith(neighbour.key):
                self._drop(neighbour)
        kept = KeptPrompt(namespace, key, scoring.first_scores(rows), scoring.nbytes)
        self._groups.setdefault(namespace, {}).setdefault(top, SortedDict())[key] = kept
        self._by_use[kept] = None
        self.nbytes += kept.nbytes
        while self.nbytes > self._most_bytes:
            self._drop(next(iter(self._by_use)))

    def find(self, scoring: Scoring, namespace: Hashable) -> RowScores | None:
        """Return kept scores of the longest prefix of a request's prompt, from position 1 on; None if there are none.

        They have at least as many alternatives as the request. O(tokens + log prompts) for each number of alternatives.
        """
        tokens, longest = np.frombuffer(scoring.key, ">u4"), 1
        best: KeptPrompt | None = None
        for top in self._groups.get(namespace, ()):
            for kept in self._neighbours(namespace, top, scoring.key) if top >= scoring.top else ():
                common = common_prefix(tokens, np.frombuffer(kept.key, ">u4"))
                if common > longest:
                    best, longest = kept, common
        if best is None:
            return None
        self._by_use.move_to_end(best)
        return best.scores[: longest - 1]

    def drop(self, namespace: Hashable) -> None:
        """Drop all scores of a namespace. O(its prompts)."""
        groups = self._groups.get(namespace, {})
        for kept in [each for group in groups.values() for each in group.values()]:
            self._drop(kept)

    def clear(self) -> None:
        """Drop all scores."""
        self._by_use.clear()
        self._groups.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        found: list[KeptPrompt] = []
        for namespace, groups in self._groups.items():
            for top, group in groups.items():
                assert group, "a group without prompts is dropped"
                keys = list(group)
                assert not any(after.startswith(before) for before, after in pairwise(keys)), "a prompt begins another"
                assert all((each.namespace, each.top, each.key) == (namespace, top, key) for key, each in group.items())
                found += group.values()
        assert set(found) == set(self._by_use) and len(found) == len(self._by_use)
        assert self.nbytes == sum(each.nbytes for each in found) <= self._most_bytes

    def _neighbours(self, namespace: Hashable, top: int, key: bytes) -> list[KeptPrompt]:
        """Return the kept prompts of a group next to a key: the one before it, and itself or the one after it."""
        group = self._groups.get(namespace, {}).get(top)
        if group is None:
            return []
        place = group.bisect_left(key)
        return list(group.values()[max(place - 1, 0) : place + 1])

    def _drop(self, kept: KeptPrompt) -> None:
        del self._by_use[kept]
        self.nbytes -= kept.nbytes
        groups = self._groups[kept.namespace]
        del groups[kept.top][kept.key]
        if not groups[kept.top]:
            del groups[kept.top]
        if not groups:
            del self._groups[kept.namespace]
