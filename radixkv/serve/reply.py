"""Split a reply's text, as it arrives, into thinking, content and tool calls.

Text is held back only while it may still be the start of a tag or of a call, or white space before one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from radixkv.chat import thinking as in_channels
from radixkv.chat.messages import ToolCall
from radixkv.chat.reply_parser import CallReader, Part
from radixkv.chat.thinking import THINK_END, THINK_START, ChannelReader
from radixkv.chat.tool_call_formats import HERMES, CallFormat
from radixkv.engine import Chunk


class TaggedText:
    """Each tag stands where it was sampled, though text before it may come later: the engine holds back what may
    begin a stop string. A tag behind the first letter of a stop string is as little shown as the rest.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        """Begin a stream; `tags` are texts by the ids that are left out."""
        self._tags = tags
        self._released = 0
        self._waiting: deque[tuple[int, str]] = deque()  # where a tag stands in the text, and what it is

    def push(self, chunk: Chunk) -> str:
        """The text that a chunk releases, with its tags. O(its characters)."""
        start, end = self._released, self._released + len(chunk.text)
        self._waiting += [(end + chunk.held, tag) for token in chunk.token_ids if (tag := self._tags.get(token))]
        parts, at = [], start
        while self._waiting and self._waiting[0][0] <= end:
            place, tag = self._waiting.popleft()
            parts += [chunk.text[at - start : place - start], tag]
            at = place
        self._released = end
        return "".join([*parts, chunk.text[at - start :]])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply, in the order in which it was said; one of the three is set. `number` counts the calls."""

    content: str = ""
    thinking: str = ""
    call: ToolCall | None = None
    number: int = 0


class ReplyReader:
    """Takes the text of one reply bit by bit; what it has handed out so far is in `content`, `thinking` and `calls`.

    White space around thinking is dropped, and calls are as `CallReader` has them.
    """

    def __init__(
        self,
        *,
        reads_calls: bool,
        thinking: bool,
        thinking_tags: tuple[str, str] = (THINK_START, THINK_END),
        channels: bool = False,
        form: CallFormat | None = HERMES,
        names: Collection[str] = (),
        seed: str = "0",
    ) -> None:
        """`thinking` says that the prompt ended with an open tag, `reads_calls` that calls are to be taken out.

        `thinking_tags` stand before and behind what is thought.

        `form` is how the model writes them, `names` are the tools that there are, and `seed` makes the calls' ids.
        `channels` are looked for where a reply does not begin with a tag.
        """
        self._form = form if reads_calls else None
        self._opening, self._closing = thinking_tags
        self._names, self._seed = names, seed
        self._state = "thinking" if thinking else "start"
        self._readers = {"start": self._start, "thinking": self._think, "text": self._say, "channels": self._listen}
        self._channels = ChannelReader() if channels else None
        self._calls: CallReader | None = None
        self._taken: list[str] = []
        self._held = ""
        self._fresh = True  # nothing was handed out since the last tag: white space is dropped
        self.content = self.thinking = ""
        self.calls: list[ToolCall] = []

    @property
    def text(self) -> str:
        """All that was taken, as it was said."""
        return "".join(self._taken)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns what is certain now. O(text + what is held)."""
        if not text:
            return []
        self._taken.append(text)
        self._held += text
        return list(self._read())

    def finish(self) -> list[Piece]:
        """The reply is complete: what was held is what it looks like."""
        pieces = list(self._read())
        if self._state == "start":  # no tag came after all
            self._begin_text()
            pieces += self._read()
        if self._channels is not None:
            pieces += self._heard(self._channels.finish())
        if self._calls is not None:
            return pieces + self._pieces(self._calls.finish())
        rest, self._held = self._held, ""
        if self._state == "thinking":  # cut before its end tag
            return pieces + list(self._give("thinking", rest.rstrip()))
        return pieces + list(self._give("content", rest))

    # ---- inside

    def _read(self) -> Iterator[Piece]:
        """Go from tag to tag as far as the text decides."""
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            yield from self._readers[self._state]()

    def _start(self) -> Iterator[Piece]:
        """Thinking begins a reply, or there is none."""
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held, self._state = text.removeprefix(self._opening), "thinking"
        elif not self._opening.startswith(text):
            self._begin_text()
        yield from ()

    def _begin_text(self) -> None:
        self._state, self._fresh = "text" if self._channels is None else "channels", False

    def _think(self) -> Iterator[Piece]:
        thinking, tag, rest = self._held.partition(self._closing)
        if tag:
            yield from self._give("thinking", thinking.rstrip())
            self._held, self._state, self._fresh = rest, "text", True
        else:
            yield from self._give_all_but(_undecided(self._held, self._closing), "thinking")

    def _listen(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        assert self._channels is not None
        yield from self._heard(self._channels.push(text))

    def _heard(self, parts: Sequence[in_channels.Part]) -> list[Piece]:
        """What a reader of channels made certain."""
        return [
            piece
            for thought, text in parts
            for piece in (self._give("thinking", text) if thought else self._said(text))
        ]

    def _say(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        yield from self._said(text)

    def _said(self, text: str) -> Iterator[Piece]:
        """Text that is not thought, and may hold calls."""
        if self._form is None:
            yield from self._give("content", text)
            return
        if self._calls is None:
            self._calls = CallReader(self._form, self._names, self._seed, fresh=self._fresh)
        yield from self._pieces(self._calls.push(text))

    def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        """What a reader of calls made certain."""
        pieces = []
        for part in parts:
            if isinstance(part, str):
                self.content += part
                pieces.append(Piece(content=part))
            else:
                self.calls.append(part)
                pieces.append(Piece(call=part, number=len(self.calls) - 1))
        return pieces

    def _give_all_but(self, undecided: int, kind: str) -> Iterator[Piece]:
        certain = self._held[: len(self._held) - undecided]
        self._held = self._held[len(certain) :]
        yield from self._give(kind, certain)

    def _give(self, kind: str, text: str) -> Iterator[Piece]:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        if kind == "thinking":
            self.thinking += text
            yield Piece(thinking=text)
        else:
            self.content += text
            yield Piece(content=text)


def tags(form: CallFormat | None, thinking: tuple[str, str]) -> tuple[str, ...]:
    """The texts that a reader of replies looks for, and that may be control tokens."""
    return (*thinking, *in_channels.TAGS, *(form.tags if form else ()))


def _undecided(text: str, tag: str) -> int:
    """Characters at the end that may belong to `tag`, or to the white space before it.

    >>> _undecided("So be it. <tool", "<tool_call>")
    6
    """
    length = next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
    kept = text[: len(text) - length]
    return length + len(kept) - len(kept.rstrip())
