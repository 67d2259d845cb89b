"""Follow one stream of tokens through a grammar, with llguidance's matcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidConstraint
from radixkv.sampling.token_mask import Bits

_SHOWN = 300  # characters of an error
_COMPLEX = "it allows too much at one place, or refers to itself without an end"
_SENTENCES = {
    "doesn't satisfy the grammar; forced bytes": "it requires the name of a control token, which no reply has as text",
    "NoExtensionBias": "no text can follow, since rules or references lead only to themselves",
    "Too many items": _COMPLEX,
    "Current row has": _COMPLEX,
    "fuel exhausted": _COMPLEX,
}
"""Sentences for errors of llguidance that describe its own state."""


@dataclass(frozen=True)
class TokenTable:
    """A tokenizer in the form of llguidance, and the threads that fill masks; one for all requests of an engine."""

    tokenizer: Any
    executor: Any
    vocab_size: int
    stop_ids: frozenset[int]


class GrammarMatcher:
    """A `TokenMatcher` over `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, table: TokenTable, parameter: str) -> None:
        """Own `matcher`, which the sampling parameter `parameter` was compiled to."""
        self.vocab_size, self.stop_ids = table.vocab_size, table.stop_ids
        self._matcher, self._table, self._parameter = matcher, table, parameter
        self._failed = threading.Event()  # shared with all forks

    @property
    def worn(self) -> bool:
        """Whether this or a fork has failed, perhaps since the automaton that they share is full."""
        return self._failed.is_set()

    @property
    def accepts(self) -> bool:
        """Whether the text so far is complete."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether the text so far is complete, and no token can follow."""
        return bool(self._matcher.is_stopped())

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; raises InvalidConstraint if the matcher fails."""
        if tokens and not self._matcher.consume_tokens(tokens):
            raise self._error()

    def forced(self) -> list[int]:
        """Return the tokens that must come next; raises InvalidConstraint if the matcher fails."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        if not tokens and self._matcher.is_error():
            raise self._error()
        return tokens

    def valid(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens could be appended, and change nothing."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens; raises InvalidConstraint if the grammar cannot."""
        if count and not self._matcher.rollback(count):
            raise self._error()

    def fork(self) -> GrammarMatcher:
        """Return a matcher with the same text that goes on independently. 1 us: both share the automaton of regexes."""
        twin = GrammarMatcher(self._matcher.deep_copy(), self._table, self._parameter)
        twin._failed = self._failed
        return twin

    @classmethod
    def fill(cls, matchers: Sequence[GrammarMatcher], bits: Bits) -> dict[int, InvalidConstraint]:
        """Write the tokens that may come next to bits[i] for each matcher i; returns the errors of those that failed.

        The rows are filled without the interpreter's lock, on the threads of llguidance.
        """
        rows = [(each._matcher, place) for place, each in enumerate(matchers)]
        executor = matchers[0]._table.executor
        executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))
        return {place: each._error() for place, each in enumerate(matchers) if each._matcher.is_error()}

    def _error(self) -> InvalidConstraint:
        self._failed.set()
        reason = reason_of(self._matcher.get_error())
        return InvalidConstraint(
            f"{self._parameter} cannot be followed any further: {reason}", parameter=self._parameter
        )


def reason_of(error: str) -> str:
    """Return the reason in an error of llguidance, on one line: it also shows the place in the text, or its state."""
    if (sentence := next((each for part, each in _SENTENCES.items() if part in error), None)) is not None:
        return sentence
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown reason"]
    parsing = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ": ".join([lines[0].removesuffix(":")[:_SHOWN], *parsing[:1]])
