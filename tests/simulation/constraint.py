"""A constraint drawn from a seed: the tokens that may come next depend on the whole text so far.

Some states leave one token only, which is then forced; some are complete; some end the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from radixkv.errors import InvalidConstraint
from radixkv.sampling.token_mask import Bits
from tests.simulation.model import VOCAB

Ids = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """The tokens that may follow a text, whether it is complete, and whether it must end."""

    allowed: Ids
    accepts: bool
    finished: bool

    @property
    def forced(self) -> bool:
        """Whether only one token may follow."""
        return len(self.allowed) == 1 and not self.accepts


@dataclass(frozen=True)
class Rule:
    """A constraint. Its tokens are never stop tokens; it cannot be followed beyond `breaks` tokens."""

    seed: int
    stop_ids: frozenset[int] = frozenset()
    breaks: int | None = None

    def after(self, text: Ids) -> State:
        """Return the state after a text."""
        return _state(self.seed, self.stop_ids, text)


@lru_cache(maxsize=1 << 14)
def _state(seed: int, stop_ids: frozenset[int], text: Ids) -> State:
    rng = random.Random(f"{seed}/{text}")
    tokens = [token for token in range(VOCAB) if token not in stop_ids]
    allowed = rng.sample(tokens, rng.choice((1, 1, 1, 2, 5, len(tokens))))
    accepts = bool(text) and rng.random() < 0.1
    finished = accepts and rng.random() < 0.5
    return State(() if finished else tuple(allowed), accepts, finished)


class RuleMatcher:
    """Follows a rule; a `TokenMatcher`."""

    vocab_size, stop_ids = VOCAB, frozenset[int]()

    def __init__(self, rule: Rule, text: Ids = ()) -> None:
        self.rule, self.text = rule, text

    @property
    def accepts(self) -> bool:
        return self.rule.after(self.text).accepts

    @property
    def finished(self) -> bool:
        return self.rule.after(self.text).finished

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.rule.after(self.text).allowed, f"{token} may not follow {self.text}"
            self.text += (token,)
            if self.rule.breaks is not None and len(self.text) > self.rule.breaks:
                raise InvalidConstraint("the rule is too expensive")

    def forced(self) -> list[int]:
        text = self.text
        while (state := self.rule.after(text)).forced and len(text) < len(self.text) + 20:
            text += state.allowed
        return list(text[len(self.text) :])

    def valid(self, tokens: Sequence[int]) -> int:
        allowed = (token in self.rule.after((*self.text, *tokens[:at])).allowed for at, token in enumerate(tokens))
        return next((at for at, each in enumerate(allowed) if not each), len(tokens))

    def rollback(self, count: int) -> None:
        self.text = self.text[: len(self.text) - count]

    def fork(self) -> RuleMatcher:
        return RuleMatcher(self.rule, self.text)

    @classmethod
    def fill(cls, matchers: Sequence[RuleMatcher], bits: Bits) -> dict[int, InvalidConstraint]:
        errors = {}
        for place, (row, each) in enumerate(zip(bits, matchers, strict=True)):
            row[:] = sum(1 << token for token in each.rule.after(each.text).allowed)
            if each.rule.breaks is not None and each.rule.breaks == len(each.text) and each.rule.seed % 2:
                errors[place] = InvalidConstraint("the rule is too expensive")
        return errors
