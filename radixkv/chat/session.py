"""The reply to one message, while it is computed and when it is complete.

Knows: the request behind it, and the session that it becomes a turn of. Knows no template and no ids but its own.

A conversation: turns, their token ids, and the verbs that branch and shorten it.

Knows: what was said, the ids that stand for it, and which of them nobody needs any more. Knows no cache and no thread:
between two turns a session holds nothing in the pool; its next prompt simply begins with what the last one left there.

The ids are the truth. A reply's last sampled token is never run through the model, so the next turn finds every
token up to the end of the reply but that one, and computes it with the new ones.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from radixkv.chat.history_mode import HistoryMode, history_mode
from radixkv.chat.messages import Message, Reply, ToolCall, ToolResult, tool_messages
from radixkv.chat.reply_parser import Reading
from radixkv.chat.template import ChatTemplate
from radixkv.engine import Chunk, Completion, Handle
from radixkv.errors import ContextOverflow, EngineClosed, InvalidInput, PromptTooLong, RequestCancelled, SessionClosed
from radixkv.sampling.params import SamplingParams, checked_params, is_int

if TYPE_CHECKING:
    from radixkv.engine import RequestEngine


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


Overflow = Literal["error", "drop_oldest"]
_ROOM = (
    4  # drop_oldest begins when less than a quarter of the context is left for a reply (or max_tokens, if fewer) ...
)
_KEEP = 2  # ... and drops down to half of it, so that the next turns are hits again


@dataclass(frozen=True)
class Turn:
    """What came in (one user message, or tool results), and the reply to it.

    `end` is how many of the session's ids there were behind the reply, or None if what stood before it was dropped.
    """

    messages: tuple[Message, ...]
    reply_ids: tuple[int, ...]
    reply: Message
    tool_calls: tuple[ToolCall, ...]
    end: int | None


class ChatSession:
    """A conversation with the model. Not for two threads at once; two sessions may be.

    Make one with `engine.chat()`. A call that raises leaves the history as it was.
    """

    def __init__(
        self,
        engine: RequestEngine,
        template: ChatTemplate,
        opening: Sequence[Message] = (),
        *,
        namespace: Hashable = None,
        history: HistoryMode = "auto",
        overflow: Overflow = "error",
    ) -> None:
        """Begin behind `opening` (a system message, examples); `engine.chat` explains the rest.

        Raises ChatError for history="append" where that would lose what the template writes, InvalidInput for tools
        that it does not write.
        """
        _check_choice("history", history, ("auto", "append", "template"))
        _check_choice("overflow", overflow, ("error", "drop_oldest"))
        template.check_tools()
        self._engine = engine
        self._template = template
        self._reading = Reading(template)
        self._opening: list[Message] = [deepcopy(dict(message)) for message in opening]
        self._namespace = namespace
        self._number = engine._new_session()
        self._append = history_mode(template, history) == "append"
        self._overflow = overflow
        self._turns: list[Turn] = []
        self._ids = array("i")
        self._open_stream: ReplyStream | None = None
        self._closed = False

    # ---- talking

    def send(self, text: str, params: SamplingParams | None = None) -> Reply:
        """Say something and wait for the reply.

        Raises ContextOverflow, SessionClosed, or what `engine.submit` and its handle raise.
        """
        return self.stream(text, params).wait()

    def stream(self, text: str, params: SamplingParams | None = None) -> ReplyStream:
        """Say something; iterate what comes back for chunks, then read its `reply`.

        The request is on its way when this returns, so the streams of many sessions run as one batch. The turn is
        part of the history once the stream has ended; one that is closed before, or left for another call, is undone.
        """
        return self._ask([_of_user(text)], (), params)

    def tool_results(self, results: Sequence[ToolResult], params: SamplingParams | None = None) -> Reply:
        """Answer each tool call of the last reply and wait for the next reply. Raises InvalidInput, or as `send`."""
        return self.stream_tool_results(results, params).wait()

    def stream_tool_results(self, results: Sequence[ToolResult], params: SamplingParams | None = None) -> ReplyStream:
        """As `tool_results`, streaming as `stream` does."""
        self._settle()
        calls = self._turns[-1].tool_calls if self._turns else ()
        return self._ask(tool_messages(results, calls), calls, params)

    # ---- branching

    def fork(self, n: int = 1) -> list[ChatSession]:
        """`n` more sessions with this history; all share its cached prefix. O(tokens) each, no KV is copied."""
        self._settle()
        if not is_int(n) or n < 1:
            raise InvalidInput(f"fork makes at least 1 session, got n={n!r}")
        return [self._twin() for _ in range(n)]

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns; what the cache holds of them is the first to be evicted."""
        self._settle()
        if not is_int(turns) or not 1 <= turns <= len(self._turns):
            raise InvalidInput(f"rewind takes 1..{len(self._turns)} turns of this session, got {turns!r}")
        dead, left = self._ids, self._turns[:-turns]
        self._turns, self._ids = left, self._ids_behind(left)
        self._demote(dead)

    def edit(self, turn: int, text: str, params: SamplingParams | None = None) -> Reply:
        """Say something else in turn `turn` (0 is the first), forget what came after, and wait for the new reply.

        The old branch is the first to be evicted. If the new reply fails, the history is what it was.
        """
        return self.stream_edit(turn, text, params).wait()

    def stream_edit(self, turn: int, text: str, params: SamplingParams | None = None) -> ReplyStream:
        """As `edit`, streaming as `stream` does: the history is the old one until the stream has ended."""
        self._settle()
        if not is_int(turn) or not 0 <= turn < len(self._turns):
            raise InvalidInput(f"this session has turns 0..{len(self._turns) - 1}, got {turn!r}")
        if self._turns[turn].messages[0]["role"] != "user":
            raise InvalidInput(f"turn {turn} answers tool calls, only what a user said can be edited")
        return self._ask([_of_user(text)], (), params, keep=turn)

    def close(self) -> None:
        """End the conversation; what only it has cached is the first to be evicted. May be called twice."""
        if not self._closed:
            self._abandon()
            self._closed = True
            self._demote(self._ids, keep=0)
            self._engine._session_closed(self._number)

    # ---- reading

    @property
    def history(self) -> list[Message]:
        """All messages, system and tool results included, as chat templates take them; a copy."""
        return deepcopy(self._messages(self._turns))

    @property
    def token_ids(self) -> list[int]:
        """Ids of the conversation up to the end of the last reply; empty before the first one."""
        return list(self._ids)

    @property
    def turns(self) -> int:
        """How many exchanges the history has; one is a user's message, or tool results, with the reply."""
        return len(self._turns)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a JSON file, which `engine.resume` reads. Raises InvalidInput, OSError."""
        from radixkv.chat.saved import save

        self._settle()
        save(self, path)

    def __enter__(self) -> ChatSession:
        """Use the session in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()

    # ---- one turn

    def _ask(
        self,
        new: list[Message],
        answers: Sequence[ToolCall],
        params: SamplingParams | None,
        keep: int | None = None,
    ) -> ReplyStream:
        """Ask for a reply to `new` behind the first `keep` turns (all, if None), in place of those that follow."""
        self._settle()
        params = checked_params(params, self._engine.default_params)
        if params.n != 1:
            raise InvalidInput(f"a conversation has one reply a turn, got n={params.n}: fork the session instead")
        turns = self._turns[:keep]
        ids = self._ids if keep is None else self._ids_behind(turns)
        prompt = self._prompt(turns, new, ids, answers)
        if self._overflow == "drop_oldest":
            turns, prompt = self._dropped(turns, new, prompt, params)
        prompt = self._with_room(prompt)
        handle = self._engine.submit(prompt, params, namespace=self._namespace, session=self._number)
        self._open_stream = ReplyStream(self, handle, turns, prompt, new, params, edits=keep is not None)
        return self._open_stream

    def _prompt(
        self,
        turns: list[Turn],
        new: Sequence[Message],
        ids: array[int] | None = None,
        answers: Sequence[ToolCall] = (),
    ) -> array[int] | None:
        """Ids up to where the reply begins, appended to `ids` if that is possible; None if they fit no context."""
        try:
            if turns and ids is not None and self._append:
                return self._template.continued(ids, new, answers)
            return self._whole(turns, new)
        except PromptTooLong:
            return None

    def _whole(self, turns: list[Turn], new: Sequence[Message]) -> array[int]:
        """Everything through the template, with the ids that were sampled in their places."""
        said, at = {}, len(self._opening)
        for turn in turns:
            at += len(turn.messages)
            said[at] = turn.reply_ids
            at += 1
        return self._template.spliced([*self._messages(turns), *new], said, keep_thinking=self._append)

    def _dropped(
        self, turns: list[Turn], new: Sequence[Message], prompt: array[int] | None, params: SamplingParams
    ) -> tuple[list[Turn], array[int] | None]:
        """The turns that are left, and their prompt, when the oldest are dropped if need be."""
        limit = self._engine.context_limit
        if prompt is not None and len(prompt) + min(params.max_tokens, limit // _ROOM) <= limit:
            return turns, prompt
        while turns and (prompt is None or len(prompt) > limit // _KEEP):
            rest = _without_oldest(turns)
            if new[0]["role"] == "tool" and not rest:
                break  # results need the reply that asked for them
            turns = rest
            prompt = self._prompt(turns, new)
        return [replace(turn, end=None) for turn in turns], prompt

    def _with_room(self, prompt: array[int] | None) -> array[int]:
        """The prompt; raises ContextOverflow if there is no room for a reply behind it."""
        limit = self._engine.context_limit
        if prompt is not None and len(prompt) < limit:
            return prompt
        tokens = f"more than {limit}" if prompt is None else len(prompt)
        raise ContextOverflow(
            f"the conversation has {tokens} tokens and the context {limit}: rewind it, begin a new one, or use "
            "overflow='drop_oldest'"
        )

    def _record(self, stream: ReplyStream, completion: Completion) -> Reply:
        """The turn is complete: it becomes part of the history."""
        used = {call.id for turn in stream.turns for call in turn.tool_calls}
        reply = self._reading.reply(completion, stream.prompt, stream.params, len(stream.turns), used)
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            message["tool_calls"] = [call.as_message() for call in reply.tool_calls]
        before, self._ids = self._ids, stream.prompt + array("i", completion.token_ids)
        turn = Turn(tuple(stream.new), completion.token_ids, message, reply.tool_calls, len(self._ids))
        self._turns = [*stream.turns, turn]
        self._open_stream = None
        if stream.edits:
            self._demote(before)
        return reply

    # ---- state

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        messages = list(self._opening)
        for turn in turns:
            messages += [*turn.messages, turn.reply]
        return messages

    def _ids_behind(self, turns: list[Turn]) -> array[int]:
        if not turns:
            return array("i")
        *before, last = turns
        if self._append and last.end is not None:
            return self._ids[: last.end]
        return self._whole(before, last.messages) + array("i", last.reply_ids)

    def _twin(self) -> ChatSession:
        twin = ChatSession(
            self._engine,
            self._template,
            self._opening,
            namespace=self._namespace,
            history="append" if self._append else "template",
            overflow=self._overflow,
        )
        twin._turns, twin._ids = list(self._turns), self._ids[:]
        return twin

    def _demote(self, dead: array[int], keep: int | None = None) -> None:
        """Tell the cache that `dead` is not needed behind what it shares with the present ids."""
        if keep is None:
            keep = next((at for at, (a, b) in enumerate(zip(dead, self._ids, strict=False)) if a != b), len(self._ids))
        if len(dead) > keep:
            try:
                self._engine.demote(dead, keep=keep, namespace=self._namespace)
            except EngineClosed:
                return  # a hint about a pool that is gone

    def _settle(self) -> None:
        """Every verb begins here: closed sessions refuse, a stream that was left is undone."""
        if self._closed:
            raise SessionClosed("this chat session was closed: make another with engine.chat()")
        self._abandon()

    def _abandon(self) -> None:
        if self._open_stream is not None:
            stream, self._open_stream = self._open_stream, None
            stream.close()


def _of_user(text: object) -> Message:
    if not isinstance(text, str) or not text:
        raise InvalidInput(f"a user's message must be a text that is not empty, got {text!r}")
    return {"role": "user", "content": text}


def _without_oldest(turns: list[Turn]) -> list[Turn]:
    """Without the first user's turn and the tool results that follow it."""
    rest = turns[1:]
    while rest and rest[0].messages[0]["role"] == "tool":
        rest = rest[1:]
    return rest


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
