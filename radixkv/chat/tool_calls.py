"""A reply's words, taken apart while they come: what is said, and which tools are called.

Knows: calls as one format writes them. Knows no token, no thinking and no session.

What is no call after all is text, to the letter. Whether it is one does not depend on how the text comes in pieces:
nothing is handed out before all that may follow would leave it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator
from typing import TypeAlias

from radixkv.chat.messages import ToolCall
from radixkv.chat.tool_calls_block import Block
from radixkv.chat.tool_calls_format import CallFormat
from radixkv.chat.tool_calls_json import NotACall

Part: TypeAlias = str | ToolCall

_OWN_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BEFORE = re.compile(r"\s{0,99}")  # white space without end would be looked at again and again
_BETWEEN = re.compile(r"\s{0,99};?\s{0,99}")  # what separates calls that have no tag


class CallReader:
    """Takes the text of one reply bit by bit, and hands out text and calls in their order.

    White space before the first words and behind the last is dropped where a call stands there. A call has its id
    from the reply's `seed` and its number, unless the model wrote one that the format allows.
    """

    def __init__(self, form: CallFormat, names: Collection[str], seed: str, *, fresh: bool = False) -> None:
        """Read `form`; `names` are the tools that there are; `fresh` drops white space at the beginning."""
        self._form, self._names, self._seed = form, names, seed
        self._held, self._from = "", 0  # what stands before `from` is handed out
        self._block: Block | None = None
        self._bare = form.bare  # a call may begin here without a tag
        self._fresh, self._said = fresh, False
        self._spaces = ""  # said only if words follow
        self._ids: set[str] = set()
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Part]:
        """Take more text; returns what is certain now. O(text), and a call's text once more at its end."""
        if self._block is None:  # which counts from the beginning of what is held
            self._held, self._from = self._held[self._from :], 0
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Part]:
        """The reply is complete: what was held is what it looks like."""
        parts = list(self._read(final=True))
        return parts if self.calls or not self._spaces else [*parts, self._spaces]

    # ---- inside

    def _read(self, *, final: bool) -> Iterator[Part]:
        while self._block is not None or (yield from self._find(final)):
            assert self._block is not None
            try:
                end = self._block.read(self._held, final=final)
                if end is None:
                    return
                calls = self._made(self._block)
            except NotACall:
                yield from self._refuse(self._block)
            else:
                yield from calls
                self._go_on(end, calls)

    def _find(self, final: bool) -> Generator[Part, None, bool]:
        """Hand out what stands before the next place where a call may begin; whether there is one."""
        if self._bare:
            at = self._behind_space()
            if at == len(self._held) and not final:
                return False
            if self._held.startswith("{", at):
                self._block = Block(self._form, at, tagged=False)
                return True
        self._bare = False
        tag = self._form.start
        at = self._held.find(tag, self._from)
        if at < 0:
            yield from self._say(len(self._held) - (0 if final else _undecided(self._held, self._from, tag)))
            return False
        yield from self._say(at)
        self._block = Block(self._form, at + len(tag), tagged=True)
        return True

    def _behind_space(self) -> int:
        """Where a call without a tag would begin."""
        match = (_BETWEEN if self.calls else _BEFORE).match(self._held, self._from)
        return self._from if match is None else match.end()

    def _say(self, end: int) -> Iterator[str]:
        """Hand out what is held up to `end`; white space waits for words."""
        text, self._from = self._held[self._from : end], max(self._from, end)
        words = text.rstrip()
        if words:
            yield self._spaces + (words.lstrip() if self._fresh else words)
            self._fresh, self._said = False, True
            self._spaces = text[len(words) :]
        elif not self._fresh:
            self._spaces += text

    def _refuse(self, block: Block) -> Iterator[str]:
        """No call: its tag is text, and behind that one may begin."""
        self._block, self._bare = None, False
        yield from self._say(self._from + len(self._form.start) if block.tagged else self._from)

    def _go_on(self, end: int, calls: list[ToolCall]) -> None:
        self.calls += calls
        self._from, self._block = end, None
        self._bare = self._form.bare
        if not self._said:
            self._fresh, self._spaces = True, ""

    def _made(self, block: Block) -> list[ToolCall]:
        asked = block.asked(self._held)
        if not block.tagged and any(name not in self._names for name, _, _ in asked):
            raise NotACall  # an answer in JSON
        return [
            ToolCall(self._id(own, number), name, arguments)
            for number, (name, arguments, own) in enumerate(asked, len(self.calls))
        ]

    def _id(self, own: object, number: int) -> str:
        made = self._form.call_id(self._seed, number)
        if self._form.short_ids and isinstance(own, str) and _OWN_ID.fullmatch(own) and own not in self._ids:
            made = own
        self._ids.add(made)
        return made


def split_calls(text: str, form: CallFormat, names: Collection[str], seed: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text outside calls, and the calls, of a reply that is complete. O(characters).

    >>> from radixkv.chat.tool_calls_format import HERMES
    >>> split_calls('Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>', HERMES, {"now"}, "0")
    ('Let me see.', (ToolCall(id='call_0_0', name='now', arguments={}),))
    """
    reader = CallReader(form, names, seed)
    parts = reader.push(text) + reader.finish()
    return "".join(part for part in parts if isinstance(part, str)), tuple(reader.calls)


def _undecided(text: str, start: int, tag: str) -> int:
    """Characters at the end, not before `start`, that may belong to `tag`.

    >>> _undecided("So be it. <tool", 0, "<tool_call>")
    5
    """
    longest = min(len(text) - start, len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
