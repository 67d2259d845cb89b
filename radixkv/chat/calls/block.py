"""Collect the calls of a block while they are read, and decide when a call is certain enough to be sent.

A streamed call is opened once its tool is known and its arguments have begun. From then on its text is sent as it is
read, and it ends as sent, even if the reply breaks off or turns out wrong. Other calls are opened when they are
complete or cut; an unknown tool must then have a tag and be complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.calls.source import NotACall, Source
from radixkv.chat.messages import ToolCall

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The declarations of the tools, by name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the arguments of call `number` of a reply; its first delta `opens` the call.

    The joined `arguments` of a call are the JSON text `call.text`. The last delta has the whole `call`.
    """

    number: int
    id: str
    name: str
    arguments: str
    call: ToolCall | None = None
    opens: bool = False


class Block:
    """One call or several between the tags of a format: the present one, and the number of the next one.

    `tag` is the length of the tag that begins the block, 0 for calls without a tag. The `id` of a call is empty until
    it is opened; `own_id` is the id that the model wrote.
    """

    def __init__(
        self,
        form: CallFormat,
        source: Source,
        tag: int,
        tools: Tools,
        make_id: Callable[[int, object], str],
        number: int,
        *,
        streams: bool,
    ) -> None:
        """Begin after the tag, before call `number` of the reply; with `streams`, calls are sent as they are read."""
        self.form, self.source, self.tag, self.tools = form, source, tag, tools
        self.called = False  # whether a call has ended
        self._make_id, self._number, self._streams = make_id, number, streams
        self._deltas: list[CallDelta] = []
        self.begin()

    def begin(self, name: str = "", own_id: object = None) -> None:
        """Begin the next call; a name that is still missing is set before the call ends."""
        self.name, self.own_id, self.id = name, own_id, ""
        self._pieces: list[str] = []
        self._sent: list[str] = []

    @property
    def empty(self) -> bool:
        """Whether the call has no arguments so far."""
        return not (self._pieces or self._sent)

    def take(self, text: str) -> None:
        """Take more JSON text of the arguments."""
        if text:
            self._pieces.append(text)
            if self._streams and not self.id and self.name in self.tools:
                self._open()

    def drain(self) -> list[CallDelta]:
        """Return the deltas that were not returned yet."""
        if self._pieces:
            self._send()
        deltas, self._deltas = self._deltas, []
        return deltas

    def close(self) -> None:
        """End a complete call. Raises NotACall for a call without a name, or an unknown one without a tag."""
        if self.tag and self.empty:
            self._pieces.append("{}")
        if not self.name or self.empty:
            raise NotACall
        if not self.id:
            if not self.tag and self.name not in self.tools:
                raise NotACall  # an answer that is JSON
            self._open()
        text = "".join([*self._sent, *self._pieces])
        self._end(ToolCall(self.id, self.name, json.loads(text), text))

    def break_off(self) -> None:
        """End a call whose text broke off, or one that was sent before it turned out wrong."""
        if not self.id and self.source.final and not self.empty and self.name in self.tools:
            self._open()
        if self.id:
            _log.warning("the arguments of call %s of %r broke off: the call ends as sent", self.id, self.name)
            self._end(ToolCall(self.id, self.name, {}, "".join([*self._sent, *self._pieces]), complete=False))

    # ---- inside

    def _open(self) -> None:
        self.id = self._make_id(self._number, self.own_id)
        self.source.mark()

    def _send(self, call: ToolCall | None = None) -> None:
        """Send the text of an open call that was not sent, and the whole `call` if it is complete."""
        if self.id:
            text, opens = "".join(self._pieces), not self._sent
            self._sent.append(text)
            self._pieces.clear()
            self._deltas.append(CallDelta(self._number, self.id, self.name, text, call, opens))

    def _end(self, call: ToolCall) -> None:
        self._send(call)
        self.source.mark()
        self._number, self.called = self._number + 1, True
        self.begin()
