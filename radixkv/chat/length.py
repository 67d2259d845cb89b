"""How many tokens a long text has at least, without encoding much more of it than that takes.

Knows: a vocabulary's texts, in bytes spelt as letters or as they are. Knows no template and no limit of its own.

A text is cut only where no token of the vocabulary could stand across: behind a letter or sign of ASCII, before another
one or before white space, where no token has the two side by side. So its pieces have together the tokens that it has,
but for what some tokenizers put before each text that they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

_PIECE = 1 << 14  # characters that are encoded at a time
_REACH = 1 << 12  # how far a cut is looked for
_AROUND = 2  # tokens that a tokenizer may put around a piece which the whole text has not: a space, a mark
_SPELT = {" ": " \u0120\u2581", "\n": "\n\u010a"}  # white space in vocabularies: as it is, as a byte, sentencepiece's


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a tokenizer tell about a text's length.

    `neighbours` are each two characters that stand side by side in a token. `longest` has, for each letter and sign of
    ASCII that is a token by itself, the characters of the longest token with it. What is none by itself may be unknown,
    and tokenizers make one token of many unknown characters.
    """

    neighbours: frozenset[str]
    longest: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read a tokenizer's tokens, once. O(vocabulary)."""
        if tokenizer not in _READ:
            _READ[tokenizer] = cls._read(tokenizer.get_vocab())
        return _READ[tokenizer]

    @classmethod
    def _read(cls, tokens: Mapping[str, int]) -> Vocabulary:
        neighbours: set[str] = set()
        longest: dict[str, int] = {}
        for token in tokens:
            neighbours.update(left + right for left, right in pairwise(token))
            for letter in filter(_is_sign, {*token.lower(), *token.upper()}):  # some tokenizers read letters alike
                longest[letter] = max(longest.get(letter, 0), len(token))
        return cls(frozenset(neighbours), {letter: size for letter, size in longest.items() if letter in tokens})

    def parts(self, left: str, right: str) -> bool:
        """Whether certainly no token stands across two characters."""
        if left not in self.longest or not (right in _SPELT or _is_sign(right)):
            return False
        return not any(left + each in self.neighbours for each in _SPELT.get(right, right))

    def of_letters(self, text: str) -> int:
        """Tokens that a text certainly has for its letters: each in a token as long as the longest one with it."""
        counts = Counter(text)
        return int(sum(count / self.longest[letter] for letter, count in counts.items() if letter in self.longest))


_READ: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def at_least(text: str, enough: int, tokenizer: Any, encode: Callable[[str], list[int]]) -> int:
    """Tokens that `text` certainly has, with what `encode` makes of its pieces; counting stops beyond `enough`.

    O(enough) tokens are encoded, but for stretches that cannot be cut: one word of a million letters, say, whose
    letters are counted first, or Chinese without any ASCII, which is encoded whole.
    """
    vocabulary = Vocabulary.of(tokenizer)
    tokens = at = 0
    while at < len(text) and tokens <= enough:
        end = _cut(text, at + _PIECE, vocabulary)
        if end - at > _PIECE + _REACH and (sure := tokens + vocabulary.of_letters(text[at:end])) > enough:
            return sure
        tokens += max(len(encode(text[at:end])) - _AROUND, 0)
        at = end
    return tokens


def _cut(text: str, start: int, vocabulary: Vocabulary) -> int:
    """The first place from `start` on where no token stands across; the text's end if there is none near."""
    for at in range(start, min(start + _REACH, len(text))):
        if vocabulary.parts(text[at - 1], text[at]):
            return at
    return len(text)


def _is_sign(letter: str) -> bool:
    return "!" <= letter <= "~"
