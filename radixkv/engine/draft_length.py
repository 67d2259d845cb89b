"""Decide how long a draft may be: a row that is verified costs time, and pays if its token is accepted.

A step of n rows takes `RowCosts.seconds(n)`, measured when the engine is loaded and corrected by its own steps. A token
is accepted with a probability that follows from the drafts so far: of the same source and length of match, and of the
same stream. A draft has the length with the most expected tokens a second of the whole step. With many
streams a row costs nearly as much as a decode, so drafts end by themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from radixkv.engine.drafts import Draft
from radixkv.engine.scheduler import Work
from radixkv.engine.stats import DRAFT_SOURCES

_BOUNDS = (6, 12, 24)  # of match lengths with a probability of their own
_FIRST_GUESS = {"tree": 0.9, "prediction": 0.8}  # of an accepted token, before drafts are counted
_BY_MATCH = (0.25, 0.5, 0.75, 0.85)
_WEIGHT = 8.0  # of a guess, in tokens
_MEMORY = 256.0  # tokens after which older ones count half
_LONGEST_PAUSE = 32  # steps
_STEP = 0.1  # of the correction of a cost by one step
_SURE = 0.98
_GAIN = 1.03  # of the tokens a second: a draft that promises less does not pay for its own handling


class RowCosts:
    """The seconds of a step, by its number of rows."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """Take the costs of at least two numbers of rows, ascending; the last two are extrapolated.

        Between two numbers the larger one counts: a CPU computes small weights for several rows at a time, so that 9
        rows may cost as much as 12. A step takes no longer than one with more rows: a measurement that says so was
        disturbed.
        """
        self._numbers = [rows for rows, _ in measured]
        self._seconds = [*accumulate((seconds for _, seconds in reversed(measured)), min)][::-1]
        self._factors = dict[int, float]()  # of steps with similar numbers of rows

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of `rows`; they grow with the rows, except by corrections."""
        place = self._place(rows)
        if place not in self._factors:
            place = min(self._factors, key=lambda each: abs(each - place), default=place)
        return self._measured(rows) * self._factors.get(place, 1.0)

    def _place(self, rows: int) -> int:
        """Return the place of the measured number that counts, and after the last one a place for each doubling."""
        return bisect_left(self._numbers, rows) + (rows // (self._numbers[-1] + 1)).bit_length()

    def _measured(self, rows: int) -> float:
        if (more := rows - self._numbers[-1]) <= 0:
            return self._seconds[bisect_left(self._numbers, rows)]
        (low, high), (before, after) = self._numbers[-2:], self._seconds[-2:]
        return after + (after - before) * more / (high - low)

    def correct(self, rows: int, seconds: float) -> None:
        """Take the seconds of a step; one that was disturbed counts at most twice the present cost."""
        place, factor = self._place(rows), seconds / self._measured(rows)
        before = self._factors.setdefault(place, factor)
        self._factors[place] = before + _STEP * (min(max(factor, before / 2), before * 2) - before)


class Rate:
    """The share of tokens that were accepted, after a first guess; newer ones count more."""

    def __init__(self, guess: float) -> None:
        """Begin with a guess."""
        self.accepted, self.tried = guess * _WEIGHT, _WEIGHT

    @property
    def mean(self) -> float:
        """The share."""
        return self.accepted / self.tried

    def add(self, accepted: float, tried: float) -> None:
        """Count tokens."""
        self.accepted, self.tried = self.accepted + accepted, self.tried + tried
        if self.tried > _MEMORY:
            self.accepted, self.tried = self.accepted / 2, self.tried / 2


class Tally:
    """The drafts of one stream: how much better than the mean of all streams they were, and its pause."""

    def __init__(self) -> None:
        """Begin with the mean of all streams."""
        self.factor = Rate(1.0)
        self.pause = 0  # steps without a draft that are left
        self._failed = 0  # drafts in turn

    def add(self, accepted: int, expected: float) -> None:
        """Count a verified draft; a stream whose drafts fail pauses, each time twice as long."""
        self.factor.add(accepted, expected)
        self._failed = 0 if accepted else self._failed + 1
        self.pause = min(1 << self._failed, _LONGEST_PAUSE) if self._failed > 1 else 0


class SentDraft(NamedTuple):
    """A draft that is verified: its source, the length of its match, and how many of its tokens."""

    source: str
    matched: int
    tokens: int


class Step:
    """A step whose drafts are chosen, each for the most tokens a second of all decodes so far."""

    def __init__(self, length: DraftLength, rows: int, decodes: int, most: int) -> None:
        """Begin with the `rows` of a step without drafts, of at most `most` tokens each, and its number of decodes."""
        self._length, self._rows, self._most = length, rows, most
        self._tokens, self._seconds = float(decodes), length.costs.seconds(decodes)  # without chunks of prompts
        self._add(0)

    def _add(self, rows: int) -> None:
        self._rows += rows
        costs, before = self._length.costs, self._length.costs.seconds(self._rows)
        self._costs = [costs.seconds(self._rows + more) - before for more in range(1, self._most + 1)]
        self._pays = bool(self._best([_SURE**place for place in range(1, self._most + 1)]))

    def wants(self, tally: Tally) -> bool:
        """Return whether to look for a draft: not in a pause, nor where even sure tokens would not pay."""
        if tally.pause:
            tally.pause -= 1
            return False
        return self._pays

    def best(self, draft: Draft, count: int, tally: Tally) -> int:
        """Return how many of the first `count` tokens of a draft to verify; 0 if none pay."""
        return self._best(self._chances(draft, count, tally))

    def add(self, draft: Draft, count: int, tally: Tally) -> None:
        """Count `count` tokens of a draft as rows of this step."""
        self._tokens += sum(self._chances(draft, count, tally))
        self._seconds += self._costs[count - 1]
        self._add(count)

    def _chances(self, draft: Draft, count: int, tally: Tally) -> list[float]:
        """Return the probability of each token that it and all before it are accepted."""
        each = min(self._length.rate(draft.source, draft.matched).mean * tally.factor.mean, _SURE)
        return [each**place for place in range(1, count + 1)]

    def _best(self, chances: Sequence[float]) -> int:
        rates = [self._tokens / self._seconds * _GAIN]
        for expected, cost in zip(accumulate(chances), self._costs, strict=False):
            rates.append((self._tokens + expected) / (self._seconds + cost))
        return rates.index(max(rates))


class DraftLength:
    """Chooses the lengths of the drafts of one engine, and learns from its steps."""

    def __init__(self, costs: RowCosts, most: int, *, corrects: bool = True) -> None:
        """Choose up to `most` tokens. `corrects` says that each step ends before the next one begins."""
        self.costs, self._most, self._corrects = costs, most, corrects
        self._rates = {
            source: [Rate(_FIRST_GUESS.get(source, guess)) for guess in _BY_MATCH] for source in DRAFT_SOURCES
        }
        self._begun = 0.0

    def begin(self, work: list[Work]) -> Step:
        """Begin the drafts of a step that computes `work`."""
        self._begun = perf_counter()
        decodes = sum(len(each.tokens) == 1 for each in work) or 1
        return Step(self, sum(len(each.tokens) for each in work), decodes, self._most)

    def end(self, work: list[Work]) -> None:
        """Correct the costs by a step that has ended."""
        if self._corrects and self._begun:
            rows = sum(len(each.tokens) + len(each.draft or ()) for each in work)
            self.costs.correct(rows, perf_counter() - self._begun)
        self._begun = 0.0

    def rate(self, source: str, matched: int) -> Rate:
        """Return the share of accepted tokens of drafts with such a match."""
        return self._rates[source][sum(matched >= bound for bound in _BOUNDS)]

    def guessed(self, draft: Draft, right: bool, tally: Tally) -> None:
        """Count the first token of a draft that was not verified, which costs nothing."""
        rate = self.rate(draft.source, draft.matched)
        tally.factor.add(right, rate.mean)
        rate.add(right, 1)

    def verified(self, sent: SentDraft, accepted: int, tally: Tally, *, ended: bool) -> None:
        """Count a verified draft; where the reply `ended`, the tokens after it were not judged."""
        rate, tried = self.rate(sent.source, sent.matched), accepted + (accepted < sent.tokens and not ended)
        tally.add(accepted, tried * rate.mean)
        rate.add(accepted, tried)
