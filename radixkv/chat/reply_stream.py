"""The reply to one message, while it is computed and when it is complete.

Knows: the request behind it, and the session that it becomes a turn of. Knows no template and no ids but its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from radixkv.chat.messages import Message, Reply
from radixkv.engine import Chunk, Handle
from radixkv.errors import RequestCancelled
from radixkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from radixkv.chat.session import ChatSession, Turn


class ReplyStream:
    """The reply to one message while it is computed: iterate it for chunks; `wait` or `reply` gives the whole."""

    def __init__(
        self,
        session: ChatSession,
        handle: Handle,
        turns: list[Turn],
        prompt: array[int],
        new: Sequence[Message],
        params: SamplingParams,
        *,
        edits: bool = False,
    ) -> None:
        """Follow `handle`; at its end the session has `turns` and this one, which `edits` what was said before."""
        self._session = session
        self.handle = handle
        self._reply: Reply | None = None
        self.turns, self.prompt, self.new, self.params, self.edits = turns, prompt, new, params, edits

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they are computed; raises as `Handle` does. The session has the turn when this ends."""
        try:
            yield from self.handle
        except (Exception, KeyboardInterrupt):
            self.close()
            raise
        if self.is_open:
            self.wait()

    @property
    def is_open(self) -> bool:
        """Whether the session still waits for this reply."""
        return self._session._open_stream is self

    def wait(self) -> Reply:
        """Wait for the whole reply. Raises as `Handle.result`, RequestCancelled if the stream was closed or left."""
        if self._reply is None:
            try:
                completion = self.handle.result()
            except BaseException:
                self.close()
                raise
            if self.is_open:
                self._reply = self._session._record(self, completion)
            else:
                raise RequestCancelled("this reply was left for another call on its session: its turn was undone")
        return self._reply

    @property
    def reply(self) -> Reply:
        """The whole reply; waits for it."""
        return self.wait()

    def close(self) -> None:
        """Stop; unless the end of the reply was seen, its turn is undone."""
        self.handle.cancel()
        if self.is_open:
            self._session._open_stream = None
