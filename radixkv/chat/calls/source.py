"""Read a text that arrives in pieces by functions that pause while text is missing.

Each function is a generator: it yields to wait for more text, and returns what it has read. Only tags, words, numbers
and escapes, whose length is bounded, are read again with each piece. The cost is linear for any pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

from radixkv.chat.thinking import partial_tag

Result = TypeVar("Result")
Reading: TypeAlias = Generator[None, None, Result]
"""Reads text, and yields while the text that follows is missing."""

LONGEST_WORD = 300  # characters of a name, or of other text before the arguments of a call
_SPACE = re.compile(r"\s*")
_GAP = re.compile(r"\s{0,99}")  # bounded, because it is matched again with each piece
_PARTS = re.compile(r"\{(\w+)\}|\(([^()]*)\)|(\s+)|([^{}()\s]+)")


class NotACall(Exception):
    """The text that was read as a call is not one."""


class Source:
    """A text that grows: `text` from index `at` on is not read yet. With `final` no more text follows."""

    def __init__(self, text: str, mark: int = 0, at: int = 0, *, final: bool = False) -> None:
        """Begin at index `at` of a text, which is marked at an index at or before it."""
        self.text, self.at, self.final = text, at, final
        self._mark, self._marked = mark, [""]  # the marked text, as far as `text` no longer has it

    def push(self, text: str) -> None:
        """Append text. O(text + text that is not read)."""
        self._marked.append(self.text[self._mark : self.at])
        self.text, self.at, self._mark = self.text[self.at :] + text, 0, 0

    def mark(self) -> None:
        """Forget the text that was read so far."""
        self._mark, self._marked = self.at, [""]

    @property
    def read(self) -> int:
        """The number of characters between the last mark and the text that is not read."""
        return sum(map(len, self._marked)) + self.at - self._mark

    def since_mark(self) -> tuple[str, int]:
        """Return a text and the index at which the text since the last mark begins, read or not."""
        before = "".join(self._marked)
        return (before + self.text[self._mark :], 0) if before else (self.text, self._mark)

    # ---- readings

    def space(self) -> Reading[str]:
        """Read white space; return the next character, which stays, or an empty text at the end."""
        while True:
            self.at = end_of(_SPACE, self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if self.final:
                return ""
            yield

    def next(self, *characters: str) -> Reading[str]:
        """Read white space and one of some characters; raises NotACall for others."""
        found = yield from self.space()
        if found not in characters:
            raise NotACall
        self.at += 1
        return found

    def follows(self, *literals: str, gap: bool = False) -> Reading[str]:
        """Return the first of some literals that follows, else an empty text; nothing is read.

        With `gap`, white space may precede the literal, and is read if the literal follows.
        """
        while True:
            at = end_of(_GAP, self.text, self.at) if gap else self.at
            found = next((each for each in literals if each and self.text.startswith(each, at)), "")
            rest = self.text[at : at + max(map(len, literals))]
            if found or self.final or not any(each.startswith(rest) for each in literals if each):
                self.at = at if found else self.at
                return found
            yield

    def skip(self, literal: str) -> Reading[None]:
        """Read a literal; raises NotACall if it does not follow."""
        if not (yield from self.follows(literal)):
            raise NotACall
        self.at += len(literal)

    def until(self, literals: tuple[str, ...], take: Callable[[str], None]) -> Reading[None]:
        """Read up to and including one of some literals; pass the text before it to `take`, as far as it is certain."""
        pattern = any_of(literals)
        while True:
            found = pattern.search(self.text, self.at)
            end = found.start() if found else len(self.text) - partial_tag(self.text, literals, self.at)
            take(self.text[self.at : end])
            self.at = found.end() if found else end
            if found:
                return
            if self.final:
                raise NotACall
            yield

    def word(self, stop: str = "") -> Reading[str]:
        """Read characters up to white space, a bracket, a quote or the character `stop`; raises NotACall for none."""
        pattern = _word(stop)
        while True:
            end = end_of(pattern, self.text, self.at)
            if end - self.at > LONGEST_WORD:
                raise NotACall
            if end < len(self.text) or self.final:
                break
            yield
        if end == self.at:
            raise NotACall
        word, self.at = self.text[self.at : end], end
        return word

    def pattern(self, pattern: str) -> Reading[dict[str, str]]:
        """Read text of a pattern, and return its words; raises NotACall for other text.

        A pattern is literal text with words `{name}`, any text `{any}`, and optional parts in parentheses, which begin
        with a literal. White space of a pattern is optional, and of any length.
        """
        words: dict[str, str] = {}
        parts = _PARTS.findall(pattern)
        for (name, optional, space, literal), (*_, after) in zip(parts, [*parts[1:], ("",) * 4], strict=True):
            if literal:
                yield from self.skip(literal)
            elif space:
                yield from self.space()
            elif name == "any":
                yield from self._any(after)
            elif name:
                word = yield from self.word()
                end = word.rfind(after[:1]) if after[:1] in word else len(word)
                self.at -= len(word) - end
                words[name] = word[:end]
            elif (yield from self.follows(first_literal(optional))):
                words |= yield from self.pattern(optional)
        return words

    def _any(self, literal: str) -> Reading[None]:
        """Read up to a literal, which stays."""
        while (end := self.text.find(literal, self.at, self.at + LONGEST_WORD)) < 0:
            if self.final or len(self.text) - self.at >= LONGEST_WORD:
                raise NotACall
            yield
        self.at = end


def first_literal(pattern: str) -> str:
    """Return the first literal of a pattern; empty for a pattern that begins with a word.

    >>> first_literal(" <function={name}> ")
    '<function='
    """
    name, _, _, literal = next(iter(_PARTS.findall(pattern.lstrip())), ("",) * 4)
    return "" if name else str(literal)


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match of a pattern at `at`; `at` itself if there is none."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


@lru_cache
def any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the first of some literals in a text, the longest one of those that begin there."""
    return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))


@lru_cache
def _word(stop: str) -> re.Pattern[str]:
    return re.compile(rf"[^\s<>\[\]{{}}()\"'{re.escape(stop)}]{{1,{LONGEST_WORD + 1}}}")
