"""Find text that a stream may repeat: its draft."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from radixkv.cache import PrefixCache
from radixkv.engine.request import Stream


class Draft(NamedTuple):
    """Tokens that may follow those of a stream, the source of their text, and how many tokens before them matched."""

    tokens: array[int]
    source: str
    matched: int


class StreamDrafts(Protocol):
    """The drafts of one stream."""

    def propose(self, most: int) -> Draft:
        """Return at most `most` tokens that may follow the stream's tokens; none if no text is found."""
        ...


class DraftSource(Protocol):
    """The text of drafts."""

    def of(self, stream: Stream, prediction: Sequence[int]) -> StreamDrafts:
        """Return the drafts of a stream, whose reply may repeat a prediction."""
        ...


class OwnText:
    """Drafts from the text of the stream itself."""

    def __init__(self, stream: Stream) -> None:
        """Search the tokens of `stream`."""
        self._stream = stream

    def propose(self, most: int) -> Draft:
        """Return what followed the last occurrence of the stream's last 24, 12, 6 or 3 tokens. O(tokens)."""
        tokens = self._stream.tokens
        for length in (24, 12, 6, 3):
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == tokens[-length:]:
                    return Draft(tokens[start + length : start + length + most], "own", length)
        return Draft(array("i"), "own", 0)


class OwnTexts:
    """Drafts of each stream from its own text."""

    def of(self, stream: Stream, prediction: Sequence[int]) -> StreamDrafts:
        """See DraftSource."""
        return OwnText(stream)


def source_of(mode: str, cache: PrefixCache) -> DraftSource:
    """Return the source of drafts with this `speculate` setting."""
    return OwnTexts()
