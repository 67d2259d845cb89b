"""Score the tokens of prompts: the log probability of each token in the model's own distribution.

Each request has one `Scores` object: `NO_SCORES`, or the `PromptScores` of its prompt. Scores combine with every
continuation.

The logits of row r, the token at position r of a prompt, give the score of the token at position r + 1. A scored
request needs the logits of many rows, and cached KV has no logits. So its hit ends where the first missing score needs
a row. A preempted request keeps its scores, and goes on at the first missing one.

Without `KeptScores`, two requests for the log probabilities of one prompt would both compute it. With them, the second
one takes the scores of the common prefix, and its hit on KV reaches as far.

All chunks of a step are scored together, which a device may do in the background. A row that is not finite fails its
own request only.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.sampling.params import TokenLogprobs
from radixkv.sampling.row_scores import RowScores

TokenIds: TypeAlias = npt.NDArray[np.int32]

MOST_BYTES = 32 << 20
"""Memory of all kept scores; a token takes 12 bytes, and 8 more for each alternative."""

_ITERATED = 256  # entries that an iteration makes at once


class NoScores:
    """The scores of a request that wants none: `PromptScores` says what its members mean."""

    wanted = False
    first = top = missing = 0
    hit_limit = sys.maxsize
    logprobs = None

    def rows(self, start: int, end: int) -> int:
        """Return 1: a chunk needs the logits of its last token only."""
        return 1

    def longest(self, start: int, planned: int) -> int:
        """Return no limit."""
        return sys.maxsize

    def targets(self, end: int, rows: int) -> tuple[list[int], int]:
        """Return no targets."""
        return [], 0

    def put(self, scores: RowScores, last: int = 0) -> None:
        """Record nothing."""

    def take_kept(self, kept: KeptScores, namespace: Hashable) -> int:
        """Take nothing."""
        return 0

    def keep_in(self, kept: KeptScores, namespace: Hashable) -> None:
        """Keep nothing."""

    def reset(self) -> None:
        """Forget nothing."""


NO_SCORES = NoScores()


class PromptScores:
    """The scores of a prompt's tokens from position `first` on, as far as they are computed.

    `missing` is the first position without a score, the length of the prompt at the end. Index i of the arrays is
    position first + i: `chosen` and `ranks` [n] are the log probability and the rank of the prompt's token, `ids` and
    `values` [n, top] are the most likely tokens, best first. `last` has the scores of `last_targets`: tokens that may
    follow the prompt.
    """

    def __init__(
        self, prompt: TokenIds, first: int, top: int, *, most_rows: int, last_targets: tuple[int, ...] = ()
    ) -> None:
        """Score from position `first` >= 1 on. One step computes at most `most_rows` additional rows of logits."""
        count = len(prompt) - first
        assert first >= 1 and count >= 0
        self.wanted = True
        self.prompt, self.first, self.top, self.most_rows = prompt, first, top, most_rows
        self.last_targets = last_targets
        self.missing = first
        self.chosen = np.full(count, np.nan, np.float32)
        self.ranks = np.zeros(count, np.int32)
        self.ids = np.full((count, top), -1, np.int32)
        self.values = np.full((count, top), np.nan, np.float32)
        self.last: RowScores | None = None

    @property
    def hit_limit(self) -> int:
        """The number of tokens that may be a hit: the first missing score needs the logits of the next token."""
        return self.missing - 1 if self.missing < len(self.prompt) else sys.maxsize

    @cached_property
    def key(self) -> bytes:
        """The tokens as big-endian bytes, 4 each: sorted keys are sorted prompts."""
        return self.prompt.astype(">u4").tobytes()

    @property
    def nbytes(self) -> int:
        """The memory of the scores and of the key."""
        return 4 * len(self.prompt) + sum(x.nbytes for x in (self.chosen, self.ranks, self.ids, self.values))

    def rows(self, start: int, end: int) -> int:
        """Return the number of last tokens of the chunk [start, end) that need logits: 1 at least."""
        if self.missing >= len(self.prompt):
            return 1
        return max(end - max(self.missing - 1, start), 1)

    def longest(self, start: int, planned: int) -> int:
        """Return the length of the longest chunk from `start` on whose logits fit a step.

        `planned` is the number of additional rows of logits of the step's other chunks.
        """
        if self.missing >= len(self.prompt):
            return sys.maxsize
        room = self.most_rows - planned
        return max(self.missing - 1 - start, 0) + (room + 1 if room > 0 else 0)

    def targets(self, end: int, rows: int) -> tuple[list[int], int]:
        """Return the tokens that the last `rows` rows of a chunk up to `end` score, and how many are last targets.

        All last targets are scored by the last row.
        """
        if end < self.missing:
            return [], 0
        last = self.last_targets if end == len(self.prompt) else ()
        return [*self.prompt[end - rows + 1 : end + 1].tolist(), *last], len(last)

    def put(self, scores: RowScores, last: int = 0) -> None:
        """Record the scores of the positions from `missing` on; the last `last` ones belong to the last targets."""
        count = len(scores.chosen) - last
        part = slice(self.missing - self.first, self.missing - self.first + count)
        self.chosen[part], self.ranks[part] = scores.chosen[:count], scores.ranks[:count]
        self.ids[part], self.values[part] = scores.ids[:count, : self.top], scores.values[:count, : self.top]
        self.missing += count
        if last:
            self.last = scores[count:]

    def take_kept(self, kept: KeptScores, namespace: Hashable) -> int:
        """Take kept scores of the prompt, so that its hit may reach further; return their number."""
        found = kept.find(self, namespace)
        if found is None:
            return 0
        taken = found[self.missing - 1 : kept.shared_rows(self.first, len(found.chosen))]
        self.put(taken)
        return len(taken.chosen)

    def keep_in(self, kept: KeptScores, namespace: Hashable) -> None:
        """Keep the computed scores for later prompts."""
        kept.keep(self, namespace)

    def reset(self) -> None:
        """Forget all scores, because the model's weights have changed."""
        self.missing, self.last = self.first, None

    @cached_property
    def logprobs(self) -> PromptLogprobs:
        """The log probabilities of all tokens of the prompt, once they are computed."""
        assert self.missing == len(self.prompt)
        return PromptLogprobs(self)


Scores: TypeAlias = NoScores | PromptScores
"""The scores of a request: `NO_SCORES`, or those of its prompt."""


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """The log probabilities of a prompt's tokens: an entry for each token, None for the first.

    Entries are made where they are read, which is the caller's thread: the entries of 32,000 tokens with 20
    alternatives take 0.4 s, and the engine's thread would stall all other requests. Equal to any sequence with equal
    entries.
    """

    __slots__ = ("_scores",)

    def __init__(self, scores: PromptScores) -> None:
        """Read the scores of a prompt, which are all computed and do not change any more."""
        self._scores = scores

    def __len__(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self._scores.prompt)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprobs | None, ...]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | tuple[TokenLogprobs | None, ...] | None:
        """Return an entry, or a tuple for a slice."""
        if isinstance(at, slice):
            return tuple(self[place] for place in range(len(self))[at])
        place = range(len(self))[at]
        return next(self._entries(place, place + 1))

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        """Yield the entries in order."""
        for start in range(0, len(self), _ITERATED):
            yield from self._entries(start, min(start + _ITERATED, len(self)))

    def __eq__(self, other: object) -> bool:
        """Compare the entries."""
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of a tuple of the entries."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<log probabilities of {len(self)} tokens>"

    def _entries(self, start: int, end: int) -> Iterator[TokenLogprobs | None]:
        """Yield the entries of the positions [start, end)."""
        scores = self._scores
        yield from (None for _ in range(start, min(scores.first, end)))
        part = slice(max(start - scores.first, 0), max(end - scores.first, 0))
        ids, values = scores.ids[part].tolist(), scores.values[part].tolist()
        top = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        chosen, ranks = scores.chosen[part].tolist(), scores.ranks[part].tolist()
        yield from (TokenLogprobs(*each) for each in zip(chosen, top, ranks, strict=True))


# ---- scores for later prompts


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


class KeptScores:
    """The scores of the prompts that were used last, by namespace. One thread calls it.

    The kept prompts are sorted, so the longest common prefix with any of them is the one with a neighbour. Keys are
    big-endian token bytes, whose order is the order of the tokens. No kept prompt is the beginning of another one with
    as many alternatives.
    """

    def __init__(self, shared_rows: Callable[[int, int], int], most_bytes: int = MOST_BYTES) -> None:
        """Start empty, and take at most `most_bytes`.

        `shared_rows(first, rows)` returns how many of a prompt's first rows of logits any request with the same tokens
        would get; `first` is the first position that a request scores.
        """
        self.nbytes = 0
        self.shared_rows = shared_rows
        self._most_bytes = most_bytes
        self._by_use: OrderedDict[KeptPrompt, None] = OrderedDict()  # the least recently used first
        self._groups: dict[Hashable, dict[int, SortedDict]] = {}  # namespace -> alternatives -> key -> KeptPrompt

    def __len__(self) -> int:
        """Return the number of kept prompts."""
        return len(self._by_use)

    def keep(self, scores: PromptScores, namespace: Hashable) -> None:
        """Keep the scores of a request that scores all of its prompt, as far as they are computed.

        The arrays are not copied. O(tokens + log prompts), and O(log prompts) for each prompt that is dropped.
        """
        rows = self.shared_rows(1, scores.missing - 1) if scores.first == 1 else 0
        if not rows or scores.nbytes > self._most_bytes:
            return
        key, top = scores.key[: (rows + 1) * WIDTH], scores.top
        for neighbour in self._neighbours(namespace, top, key):
            if neighbour.key.startswith(key):
                self._by_use.move_to_end(neighbour)
                return
            if key.startswith(neighbour.key):
                self._drop(neighbour)
        first = RowScores(scores.chosen, scores.ranks, scores.ids, scores.values)[:rows]
        kept = KeptPrompt(namespace, key, first, scores.nbytes)
        self._groups.setdefault(namespace, {}).setdefault(top, SortedDict())[key] = kept
        self._by_use[kept] = None
        self.nbytes += kept.nbytes
        while self.nbytes > self._most_bytes:
            self._drop(next(iter(self._by_use)))

    def reach(self, scores: Scores, leader: Scores, common: int) -> int:
        """Return how far the hit of a request may reach once another one, `leader`, has computed `common` tokens."""
        limit = scores.hit_limit
        if leader.first == 1 and leader.top >= scores.top:
            limit = max(limit, self.shared_rows(scores.first, common - 1))
        return min(limit, common)

    def find(self, scores: PromptScores, namespace: Hashable) -> RowScores | None:
        """Return kept scores of the longest prefix of a request's prompt, from position 1 on; None if there are none.

        They have at least as many alternatives as the request. O(tokens + log prompts) for each number of alternatives.
        """
        longest = 1
        best: KeptPrompt | None = None
        for top in self._groups.get(namespace, ()):
            for kept in self._neighbours(namespace, top, scores.key) if top >= scores.top else ():
                common = common_prefix(scores.key, 0, kept.key) // WIDTH
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
