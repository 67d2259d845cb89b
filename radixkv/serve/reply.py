"""Split a reply's text, as it arrives, into thinking, content and tool calls.

Text is held back only while it may still be the start of a tag or of a call, or white space before one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from radixkv.chat.calls.block import CallDelta, Tools
from radixkv.chat.calls.formats import HERMES, CallFormat
from radixkv.chat.calls.reader import CallReader, Part
from radixkv.chat.messages import ToolCall
from radixkv.chat.thinking import THINK_END, THINK_START, ThinkingReader
from radixkv.engine import Chunk


class TaggedText:
    """Restore the tags of one stream that are control tokens, which decoding leaves out.

    Each tag is inserted where it was sampled. Text before a tag may arrive later, since the engine holds back the
    possible start of a stop string. A tag within a stop string is dropped like the string.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        """Begin a stream. `tags` maps the ids that are left out to their texts."""
        self._tags = tags
        self._released = 0
        self._waiting: deque[tuple[int, str]] = deque()  # (position in the text, tag)

    def push(self, chunk: Chunk) -> str:
        """Return the text that a chunk releases, with its tags. O(characters)."""
        if not self._tags:
            return chunk.text
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
    """A part of a reply: content, thinking, or more of a tool call."""

    content: str = ""
    thinking: str = ""
    call: CallDelta | None = None


class ReplyReader:
    """Split the text of one reply, as it arrives; the parts so far are in `content`, `thinking` and `calls`.

    Thinking is read by ThinkingReader, tool calls by CallReader.
    """

    def __init__(
        self,
        *,
        reads_calls: bool,
        thinking: bool,
        thinking_tags: tuple[str, str] = (THINK_START, THINK_END),
        channels: bool = False,
        form: CallFormat | None = HERMES,
        tools: Tools = MappingProxyType({}),
        seed: str = "0",
        streams: bool = True,
    ) -> None:
        """Begin a reply.

        `thinking` says that the prompt ended with an open tag, `reads_calls` that calls are taken out of the text.
        `thinking_tags` enclose thinking; a reply that begins without one is read in `channels`, if the model has them.
        `form` is the format of calls, `tools` are the tools by name, and `seed` makes the calls' ids. With `streams`,
        calls are sent while they are read.
        """
        self._thinking = ThinkingReader(opened=thinking, tags=thinking_tags, channels=channels)
        self._calls = CallReader(form, tools, seed, streams=streams) if reads_calls and form is not None else None
        self._taken: list[str] = []
        self.content = self.thinking = ""
        self.calls: list[ToolCall] = [] if self._calls is None else self._calls.calls

    @property
    def text(self) -> str:
        """The whole text so far, with its tags."""
        return "".join(self._taken)

    def push(self, text: str) -> list[Piece]:
        """Take more text; return the pieces that are certain now. O(text + held text)."""
        if not text:
            return []
        self._taken.append(text)
        return self._pieces(self._thinking.push(text))

    def finish(self) -> list[Piece]:
        """End the reply, and return the remaining pieces."""
        pieces = self._pieces(self._thinking.finish())
        return pieces if self._calls is None else pieces + self._answer(self._calls.finish())

    def _pieces(self, parts: Sequence[tuple[bool, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for thought, text in parts:
            if thought:
                self.thinking += text
                pieces.append(Piece(thinking=text))
            else:
                pieces += self._answer([text] if self._calls is None else self._calls.push(text))
        return pieces

    def _answer(self, parts: Sequence[Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, str):
                self.content += part
                pieces.append(Piece(content=part))
            else:
                pieces.append(Piece(call=part))
        return pieces
