"""Read tool calls from the text of a reply, whole or while it is streamed.

Text that begins like a call but is not one is returned unchanged as text. The result does not depend on the size of the
pieces: a reader returns a piece only when no later text can change its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import TypeAlias

from radixkv.chat.calls.block import Block, CallDelta, Tools
from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.calls.shapes import read_block
from radixkv.chat.calls.source import NotACall, Reading, Source, any_of, end_of
from radixkv.chat.messages import ToolCall
from radixkv.chat.thinking import partial_tag

Part: TypeAlias = str | CallDelta

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_OWN_ID = re.compile(r"[\w.:-]{1,99}")
_BEFORE = re.compile(r"\s{0,99}")  # bounded, because it is matched again with each piece
_BETWEEN = re.compile(r"\s{0,99};?\s{0,99}")  # separators of calls without tags
_MOST_IN_VAIN = 1 << 20  # characters of a reply that may be read twice, because they begin like calls


class CallReader:
    """Reads the text of one reply piece by piece, and returns text and calls in their order.

    White space next to a call at the beginning or end of the reply is dropped. The id of a call is made from `seed` and
    its number, unless the model wrote an id that the format allows.
    """

    def __init__(self, form: CallFormat, tools: Tools, seed: str, *, streams: bool = True) -> None:
        """Read calls in `form`; `tools` are the declarations of the tools, by name.

        With `streams`, a call is sent while it is read, and remains a call if it turns out wrong.
        """
        self._form, self._tools, self._seed, self._streams = form, tools, seed, streams
        self._starts = any_of(form.starts)
        self._begun = re.compile("|".join(map(_begun, form.starts)))
        self._held, self._from = "", 0  # the text before `_from` was returned
        self._open: tuple[Block, Reading[None]] | None = None
        self._bare = bool(form.bare)  # a call may begin here without a tag
        self._said = False  # whether words were returned
        self._spaces: list[str] = []  # returned only if words follow
        self._in_vain = 0
        self._ids: set[str] = set()
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Part]:
        """Read more text; return the parts that are certain now. O(text)."""
        if self._open is not None:
            self._open[0].source.push(text)
        else:
            self._held, self._from = self._held[self._from :] + text, 0
            if self._is_plain():  # most texts, so without the generators below
                text, self._held = self._held, ""
                return [text]
        return list(self._read(final=False))

    def finish(self) -> list[Part]:
        """End the reply; return the parts that were held back."""
        parts = list(self._read(final=True))
        return parts if self.calls or not self._spaces else [*parts, "".join(self._spaces)]

    # ---- inside

    def _is_plain(self) -> bool:
        """Whether the held text is certain, and no part of a call."""
        text = self._held
        if self._bare or not self._said or self._spaces or not text or text[-1].isspace():
            return False
        return not self._begun.search(text)

    def _read(self, *, final: bool) -> Iterator[Part]:
        while self._open is not None or (yield from self._find(final)):
            assert self._open is not None
            block, reading = self._open
            block.source.final = final
            try:
                next(reading)
            except StopIteration:
                block.source.mark()
                yield from self._deltas(block)
                self._go_on(block)
            except NotACall:
                block.break_off()
                yield from self._deltas(block)
                yield from self._refuse(block)
            else:
                yield from self._deltas(block)
                return

    def _deltas(self, block: Block) -> Iterator[CallDelta]:
        for delta in block.drain():
            self.calls += [] if delta.call is None else [delta.call]
            yield delta

    def _find(self, final: bool) -> Generator[Part, None, bool]:
        """Yield the text before the next possible start of a call; return whether there is one."""
        if self._bare:
            at = end_of(_BETWEEN if self.calls else _BEFORE, self._held, self._from)
            if at == len(self._held) and not final:
                return False
            if self._held.startswith(self._form.bare, at):
                self._begin(self._from, at, 0)
                return True
        self._bare = False
        found = self._starts.search(self._held, self._from) if self._in_vain < _MOST_IN_VAIN else None
        if found is None:
            partial = 0 if final else partial_tag(self._held, self._form.starts, self._from)
            yield from self._say(len(self._held) - partial)
            return False
        yield from self._say(found.start())
        self._begin(*found.span(), len(found[0]))
        return True

    def _begin(self, start: int, at: int, tag: int) -> None:
        source = Source(self._held, start, at)
        block = Block(self._form, source, tag, self._tools, self._id, len(self.calls), streams=self._streams)
        self._open = block, read_block(block)

    def _say(self, end: int) -> Iterator[str]:
        """Yield the held text up to `end`; white space at its end is held until words follow."""
        text, self._from = self._held[self._from : end], max(self._from, end)
        words = text.rstrip()
        after_call = bool(self.calls) and not self._said  # at the beginning of the reply
        if words:
            yield "".join(self._spaces) + (words.lstrip() if after_call else words)
            self._said = True
            self._spaces = [text[len(words) :]] if len(words) < len(text) else []
        elif text and not after_call:
            self._spaces.append(text)

    def _refuse(self, block: Block) -> Iterator[str]:
        """Treat the rest of a broken block as text: its tag if it has no calls, or the text after the last call."""
        self._in_vain += block.source.read
        if block.called:
            self._go_on(block)
            self._bare = False
            return
        self._held, self._from = block.source.since_mark()
        self._open, self._bare = None, False
        if block.tag:
            yield from self._say(self._from + block.tag)

    def _go_on(self, block: Block) -> None:
        """Go on after the calls of a block."""
        self._held, self._from = block.source.since_mark()
        self._open, self._bare = None, bool(self._form.bare)
        self._spaces = self._spaces if self._said else []

    def _id(self, number: int, own: object) -> str:
        made = self._form.call_id(self._seed, number)
        allowed = None if not self._form.own_id else _SHORT_ID if self._form.short_ids else _OWN_ID
        if allowed is not None and isinstance(own, str) and allowed.fullmatch(own) and own not in self._ids:
            made = own
        self._ids.add(made)
        return made


def _begun(start: str) -> str:
    """Return a pattern of the first characters of a tag, or of fewer at the end of a text."""
    rest = ""
    for character in reversed(start[1:20]):
        rest = rf"(?:\Z|{re.escape(character)}{rest})"
    return re.escape(start[0]) + rest


def split_calls(text: str, form: CallFormat, tools: Tools, seed: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text outside calls, and the calls, of a complete reply. O(characters).

    >>> from radixkv.chat.calls.formats import HERMES
    >>> split_calls('Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>', HERMES, {"now": {}}, "0")
    ('Let me see.', (ToolCall(id='call_0_0', name='now', arguments={}),))
    """
    reader = CallReader(form, tools, seed, streams=False)
    parts = reader.push(text) + reader.finish()
    return "".join(part for part in parts if isinstance(part, str)), tuple(reader.calls)
