"""The reply to one message of a chat session while it is computed."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress

from radixkv.chat.messages import Reply
from radixkv.chat.session_use import SessionUse
from radixkv.engine import Chunk, Completion, Handle
from radixkv.errors import EngineClosed, RequestCancelled, UnparsedReply


class ReplyStream:
    """The reply to one message while it is computed: iterate it for chunks; `wait` or `reply` gives the whole reply.

    A beam search has several replies, and the best one is the turn. The chunks belong to the best reply only; the
    others are the `alternatives` of `stream.handle.result()`.

    handle       the request's `Handle`: its result is the completion, before it is parsed
    prompt       token ids of the request
    is_open      whether the turn is still undecided: neither recorded in the session nor undone
    """

    def __init__(
        self, handle: Handle, prompt: array[int], record: Callable[[Completion], Reply], use: SessionUse
    ) -> None:
        """Follow `handle`; `record` adds the complete turn to the session. `use` is the session's."""
        self.handle, self.prompt = handle, prompt
        self.is_open = True  # until the reply is recorded, or the stream is closed
        self._record, self._use = record, use
        self._recording = threading.Lock()
        self._reply: Reply | None = None
        self._failed: UnparsedReply | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they are computed; raises as `Handle` does. The session has the turn when this ends."""
        with self._use.reading():
            try:
                yield from (chunk for chunk in self.handle if chunk.index == 0)
            except (Exception, KeyboardInterrupt):
                self.close()
                raise
            if self.is_open:
                self.wait()

    def wait(self) -> Reply:
        """Wait for the whole reply.

        Raises as `Handle.result`, RequestCancelled if the stream was closed, and UnparsedReply.
        """
        with self._use.reading():
            try:
                completion = self.handle.result()
            except BaseException:
                self.close()
                raise
            with self._recording:
                return self._recorded(completion)

    def _recorded(self, completion: Completion) -> Reply:
        """Add the turn to the session once, and return the reply or raise its error."""
        if self._failed is not None:
            raise self._failed
        if self._reply is None:
            if not self.is_open:
                raise RequestCancelled("this reply was left for another call on its session: its turn was undone")
            try:
                self._reply = self._record(completion)
            except UnparsedReply as error:
                self._failed = error
                raise
            finally:
                self.is_open = False
        return self._reply

    @property
    def reply(self) -> Reply:
        """The whole reply; waits until it is complete. Raises as `wait`."""
        return self.wait()

    def close(self) -> None:
        """Cancel the request; the turn is undone unless its reply was recorded."""
        with suppress(EngineClosed):  # in a forked process: the engine runs in the other one
            self.handle.cancel()
        self.is_open = False
