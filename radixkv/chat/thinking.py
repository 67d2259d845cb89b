"""Separate the thinking of a reply from its answer, in <think> tags or in channels.

Models like gpt-oss write thinking and answer as messages of their own, in channels that control tokens delimit. A
reader gives the same result for a text in one piece and in many.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TypeAlias

THINK_END = "</think>"
THINK_START = "<think>"
CHANNEL, BODY = "<|channel|>", "<|message|>"
_START = "<|start|>"
_CLOSES = ("<|end|>", "<|return|>", "<|call|>")
_ENDS = (*_CLOSES, _START)
TAGS = (CHANNEL, BODY, "<|constrain|>", *_ENDS)
_THOUGHT = "analysis"
_HEAD = re.compile(
    rf"\s*(?:{re.escape(_START)})?(?:assistant)?[^<]*{re.escape(CHANNEL)}\s*(?P<channel>\w+).*?{re.escape(BODY)}",
    re.DOTALL,
)
_BEGINS = (_START, CHANNEL, "assistant", "to=")
_LONGEST_HEAD = 300  # characters, the token before its body included

Part: TypeAlias = tuple[bool, str]
"""(True for thinking and False for the answer, text)."""


class ChannelReader:
    """Reads the text of one reply piece by piece, control tokens included, and returns thinking and answer.

    White space around all thinking is dropped, and a newline separates two messages of thinking. Messages to a tool,
    and text outside of messages, are returned unchanged as part of the answer.
    """

    def __init__(self) -> None:
        """Begin at the start of a reply."""
        self._held = ""
        self._kind: str | None = None  # of the present body; None before a body
        self._spaces = ""  # returned only if more thinking follows
        self._thought = False  # whether any thinking was returned
        self.messages = 0

    def push(self, text: str) -> list[Part]:
        """Read more text; return the parts that are certain now. O(text + held text)."""
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Part]:
        """End the reply; return the parts that were held back."""
        return list(self._read(final=True))

    # ---- inside

    def _read(self, *, final: bool) -> Iterator[Part]:
        before = None
        while self._held and before != (self._kind, self._held):
            before = self._kind, self._held
            yield from self._begin(final) if self._kind is None else self._go_on(self._kind, final)

    def _begin(self, final: bool) -> Iterator[Part]:
        """Read a head up to its body; if there is no head, read text up to the next possible one."""
        at = self._held.find(BODY, 0, _LONGEST_HEAD)
        if at < 0 and not final and len(self._held) < _LONGEST_HEAD and _may_begin(self._held):
            return
        match = _HEAD.fullmatch(self._held, 0, at + len(BODY)) if at >= 0 and _may_begin(self._held) else None
        if match is None:
            self._kind = "text"
            yield from self._take(1)
        elif "to=" in match[0]:
            self._kind = "tool"
            yield from self._take(match.end())
        else:
            self._held = self._held[match.end() :]
            self._kind = "thought" if match["channel"] == _THOUGHT else "said"
            self._spaces += "\n" if self._thought and self._kind == "thought" else ""
        self.messages += match is not None

    def _go_on(self, kind: str, final: bool) -> Iterator[Part]:
        """Read to the end of a body, or of text outside of bodies."""
        ends = (_START, CHANNEL) if kind == "text" else _ENDS
        found = min(((at, end) for end in ends if (at := self._held.find(end)) >= 0), default=None)
        if found is None:
            yield from self._take(len(self._held) - (0 if final else partial_tag(self._held, ends)))
            return
        at, end = found
        yield from self._take(at)
        self._kind = None
        if end in _CLOSES:
            self._held = self._held.removeprefix(end)
            if kind == "tool":
                yield False, end

    def _take(self, length: int) -> Iterator[Part]:
        text, self._held = self._held[:length], self._held[length:]
        if self._kind == "thought":
            yield from self._think(text)
        elif text:
            yield False, text

    def _think(self, text: str) -> Iterator[Part]:
        text = self._spaces + text if self._thought else text.lstrip()
        words = text.rstrip()
        self._spaces = text[len(words) :]
        if words:
            self._thought = True
            yield True, words


class ThinkingReader:
    """Splits the text of one reply, as it arrives, into thinking and answer.

    Thinking begins a reply: in `tags`, or in channels where `channels` allows them. A tag elsewhere is text, or part of
    a call's arguments. `opened` says that the prompt ended with an open tag, which the model may write again. White
    space around thinking is dropped. The pieces in which the text arrives make no difference.
    """

    def __init__(
        self, *, opened: bool = False, tags: tuple[str, str] = (THINK_START, THINK_END), channels: bool = True
    ) -> None:
        """Begin at the start of a reply."""
        self._opening, self._closing = tags
        self._otherwise = "thinking" if opened else "channels" if channels else "answer"  # without a tag
        self._state = "start"
        self._readers = {"start": self._start, "thinking": self._think, "answer": self._say, "channels": self._listen}
        self._channels = ChannelReader()
        self._held = ""
        self._drops_space = False  # at the beginning of thinking, and of an answer after a tag

    def push(self, text: str) -> list[Part]:
        """Read more text; return the parts that are certain now. O(text + held text)."""
        if self._state == "answer" and not self._drops_space:  # most texts, so without the generators below
            return [(False, text)] if text else []
        self._held += text
        return list(self._read())

    def finish(self) -> list[Part]:
        """End the reply; return the parts that were held back. Without an end tag the reply is thinking only."""
        parts: list[Part] = []
        if self._state == "start":
            self._leave_start(self._otherwise)
            parts += self._read()
        parts += self._channels.finish()
        return parts + list(self._part(self._state == "thinking", self._held.rstrip()))

    # ---- inside

    def _read(self) -> Iterator[Part]:
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from self._readers[self._state]()

    def _start(self) -> Iterator[Part]:
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held = text.removeprefix(self._opening)
            self._leave_start("thinking")
        elif not self._opening.startswith(text):
            self._leave_start(self._otherwise)
        yield from ()

    def _leave_start(self, state: str) -> None:
        self._state, self._drops_space = state, state == "thinking"

    def _think(self) -> Iterator[Part]:
        thinking, tag, rest = self._held.partition(self._closing)
        if tag:
            yield from self._part(True, thinking.rstrip())
            self._held, self._state, self._drops_space = rest, "answer", True
            return
        certain = thinking[: len(thinking) - partial_tag(thinking, (self._closing,))].rstrip()
        self._held = self._held[len(certain) :]
        yield from self._part(True, certain)

    def _say(self) -> Iterator[Part]:
        text, self._held = self._held, ""
        yield from self._part(False, text)

    def _listen(self) -> Iterator[Part]:
        text, self._held = self._held, ""
        yield from self._channels.push(text)

    def _part(self, thought: bool, text: str) -> Iterator[Part]:
        text = text.lstrip() if self._drops_space else text
        if text:
            self._drops_space = False
            yield thought, text


def split_thinking(
    text: str, *, opened: bool = False, tags: tuple[str, str] = (THINK_START, THINK_END)
) -> tuple[str, str]:
    """Return (thinking, answer) of a complete reply with its control tokens. O(characters).

    >>> split_thinking("<think>so</think>Yes.")
    ('so', 'Yes.')
    >>> split_thinking("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
    ('so', 'Yes.')
    """
    reader = ThinkingReader(opened=opened, tags=tags)
    parts = reader.push(text) + reader.finish()
    thinking, answer = ("".join(part for thought, part in parts if thought is wanted) for wanted in (True, False))
    return thinking, answer


def only_thinks(text: str) -> bool:
    """Whether a reply was cut short before its answer began."""
    return text.startswith(CHANNEL + _THOUGHT) and not any(end in text for end in _ENDS)


def _may_begin(text: str) -> bool:
    """Whether the text may be the beginning of a head."""
    text = text.lstrip()
    return any(text.startswith(begin) or begin.startswith(text) for begin in _BEGINS)


def partial_tag(text: str, tags: Collection[str], start: int = 0) -> int:
    """Count the characters at the end, not before `start`, that may be the beginning of one of `tags`.

    >>> partial_tag("So be it. <|e", ["<|start|>", "<|end|>"])
    3
    """
    longest = min(len(text) - start, max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)
