"""Hold a conversation: its turns, their token ids, and the methods that continue, branch and shorten it.

A session holds no blocks between two turns. Its next prompt begins with the tokens of the last one, so the prefix cache
finds them. Token ids are authoritative: sampled ids are kept and never encoded again from text. The last sampled token
of a reply has no KV yet, so the next turn computes it together with the new tokens.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Hashable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from radixkv.chat.constrained import CallRule, constrained, strict_tools
from radixkv.chat.history_mode import history_mode
from radixkv.chat.messages import Message, Reply, ToolResult, tool_messages
from radixkv.chat.reply_parser import ReplyParser
from radixkv.chat.reply_schema import ReplySchema, Schema
from radixkv.chat.reply_stream import ReplyStream
from radixkv.chat.saved import SessionState, Turn, kv_path, write
from radixkv.chat.session_use import SessionUse
from radixkv.chat.template import ChatTemplate
from radixkv.engine import Completion, Run
from radixkv.engine.compressed import rest
from radixkv.engine.engine import explained_methods
from radixkv.engine.input_processor import EncodedPrompt
from radixkv.errors import ContextOverflow, EngineClosed, InvalidInput, PromptTooLong, SessionClosed
from radixkv.sampling.params import SamplingParams, checked_params
from radixkv.settings.kinds import is_int

if TYPE_CHECKING:
    from radixkv.engine import CompressedPrefix, RequestEngine


_log = logging.getLogger(__name__)

# drop_oldest begins when less than a quarter of the context, or fewer than max_tokens, is left for a reply. It drops
# turns until half of the context is left, so that the following turns hit the cache again.
_ROOM = 4
_KEEP = 2
_LATER = ("a", "\n\nb")  # next messages: the ids before both begin each later prompt


NOT_COPIED = (
    "a chat session cannot be pickled or copied, because it belongs to its engine: fork() it, or save() it to a file "
    "that engine.resume() of another process reads"
)


@explained_methods
class ChatSession:
    """A conversation with the model. One thread at a time may use it; several sessions may run at once.

    Make one with `engine.chat()`. A call that raises leaves the history unchanged. A call while another thread is in
    one, or reads a stream of the session, raises SessionInUse.
    """

    def __init__(self, engine: RequestEngine, template: ChatTemplate, state: SessionState) -> None:
        """Begin, or continue a saved or forked conversation; `template` has the tools and the date of the state.

        Raises ChatError for history="append" if appending would lose text of the template.
        """
        _check_choice("history", state.history, ("auto", "append", "template"))
        _check_choice("overflow", state.overflow, ("error", "drop_oldest"))
        if state.prefix is not None and state.overflow == "drop_oldest":
            raise InvalidInput("overflow='drop_oldest' would drop turns of the compressed prefix: use 'error'")
        self._engine = engine
        self._template = template
        self._parser = ReplyParser(template)
        self._rule = CallRule(strict=strict_tools(template.tools))
        self._opening: list[Message] = [deepcopy(dict(message)) for message in state.opening]
        self._namespace = state.namespace
        self._number = engine.client.new_session()
        self._append = history_mode(template, state.history) == "append"
        self._overflow = state.overflow
        self._turns = list(state.turns)
        self._prefix: CompressedPrefix | None = state.prefix
        self._ids = array("i", state.token_ids)
        self._open_stream: ReplyStream | None = None
        self._closed = False
        self._use = SessionUse()

    # ---- talking

    def send(self, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None) -> Reply:
        """Send a user message and wait for the reply.

        The answer follows `schema`, a JSON schema or a class such as a Pydantic model, and `parsed` of the reply is the
        JSON value or the instance. A reply of tool calls is not parsed.
        Raises ContextOverflow, SessionClosed, UnparsedReply for a reply that was cut, and the errors of `engine.submit`
        and its handle.
        """
        with self._use.call():
            return self.stream(text, params, schema=schema).wait()

    def stream(self, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None) -> ReplyStream:
        """Send a user message; iterate the returned stream for chunks, then read its `reply`.

        The request is submitted when this returns, so the streams of many sessions run as one batch. The turn becomes
        part of the history when the stream ends. It is undone if the stream is closed before, or if the session is
        called again.
        """
        with self._use.call():
            return self._ask([_of_user(text)], params, schema)

    def tool_results(
        self, results: Sequence[ToolResult], params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> Reply:
        """Answer each tool call of the last reply and wait for the next reply. Raises InvalidInput, or as `send`."""
        with self._use.call():
            return self.stream_tool_results(results, params, schema=schema).wait()

    def stream_tool_results(
        self, results: Sequence[ToolResult], params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> ReplyStream:
        """Answer each tool call of the last reply, and stream the next reply as `stream` does."""
        with self._use.call():
            self._settle()
            calls = self._turns[-1].tool_calls if self._turns else ()
            return self._ask(tool_messages(results, calls), params, schema)

    # ---- branching

    def fork(self, n: int = 1) -> list[ChatSession]:
        """Return `n` new sessions with this history, which share its cached prefix. O(tokens) each; copies no KV."""
        with self._use.call():
            self._settle()
            if not is_int(n) or n < 1:
                raise InvalidInput(f"fork(n) makes n sessions: n must be an int >= 1, got {n!r}")
            return [ChatSession(self._engine, self._template, self._state()) for _ in range(n)]

    def rewind(self, turns: int = 1) -> None:
        """Remove the last turns; their cached tokens are evicted first."""
        with self._use.call():
            self._settle()
            self._check_turn(turns, "turns", "rewind")
            dead, left = self._ids, self._turns[:-turns]
            self._turns, self._ids = left, self._ids_after(left)
            self._demote(dead)

    def edit(
        self, turn: int, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> Reply:
        """Replace the message of turn `turn`, drop the later turns, and wait for the new reply.

        Turns count from 1, as `radixkv chat` shows them. The cached tokens of the old branch are evicted first. If the
        new reply fails, the history is unchanged.
        """
        with self._use.call():
            return self.stream_edit(turn, text, params, schema=schema).wait()

    def stream_edit(
        self, turn: int, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> ReplyStream:
        """Do as `edit`, and stream the reply as `stream` does. The history changes when the stream ends."""
        with self._use.call():
            self._settle()
            self._check_turn(turn, "turn", "edit")
            if self._turns[turn - 1].messages[0]["role"] != "user":
                raise InvalidInput(f"turn {turn} answers tool calls: only a user's message can be edited")
            return self._ask([_of_user(text)], params, schema, keep=turn - 1)

    def close(self) -> None:
        """End the conversation; cached tokens that only it uses are evicted first. May be called twice.

        Any thread may call it: a call of another thread, which waits for a reply, raises RequestCancelled.
        """
        if not self._closed:
            self._abandon()
            self._closed = True
            self._demote(self._ids, keep=0)
            self._engine.client.session_closed(self._number)

    # ---- reading

    @property
    def history(self) -> list[Message]:
        """A copy of all messages in the form that chat templates take, system message and tool results included."""
        said = (message for turn in self._turns for message in (*turn.messages, turn.reply))
        return deepcopy([*self._opening, *said])

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the conversation up to the end of the last reply; empty before the first reply."""
        return list(self._ids)

    @property
    def prefix(self) -> CompressedPrefix | None:
        """The compressed prefix with which the conversation begins, None without one."""
        return self._prefix

    def frozen(self) -> tuple[Sequence[int], Hashable, SessionState]:
        """Return the ids that begin each later prompt, the namespace and the state, for `engine.compress`."""
        with self._use.call():
            self._settle()
            if self._turns and self._turns[-1].tool_calls:
                raise InvalidInput("this session waits for tool results: compress it after them")
            prompt, other = (self._with_room(self._prompt(self._turns, [_of_user(text)], self._ids)) for text in _LATER)
            return prompt[: _common(prompt, other)], self._namespace, self._state()

    @property
    def turns(self) -> int:
        """Number of turns. A turn is a user message, or tool results, with the reply to it."""
        return len(self._turns)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def save(self, path: str | os.PathLike[str], *, kv: bool = False) -> None:
        """Write the conversation to a JSON file that only its owner may read; `engine.resume` reads it.

        The file replaces one of that name, as a whole or not at all. It does not contain the namespace.
        With `kv`, the KV that is cached is then written to a second file, whose name ends in ".kv". An engine with
        equal weights and settings resumes without computing it again. Raises InvalidInput, OSError.
        """
        with self._use.call():
            self._settle()
            write(self._state(), self._engine.model.name, path)
            with suppress(OSError):
                if Run.begins(kv_path(path)):  # an earlier save wrote it
                    os.remove(kv_path(path))
            if kv:
                self._save_kv(path)

    def _save_kv(self, path: str | os.PathLike[str]) -> None:
        try:
            run = self._engine.export_run(self._ids, self._namespace)
        except InvalidInput as error:
            _log.warning("%s was saved without its KV: %s", path, error)
        else:
            run.write(kv_path(path))

    def __enter__(self) -> ChatSession:
        """Use the session in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()

    def __repr__(self) -> str:
        length = f"{len(self._turns)} turns, {len(self._ids)} tokens{', closed' if self._closed else ''}"
        return f"<ChatSession of {self._engine.model.name}: {length}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied. Raises TypeError."""
        raise TypeError(NOT_COPIED)

    # ---- one turn

    def _ask(
        self, new: list[Message], params: SamplingParams | None, schema: Schema | None, keep: int | None = None
    ) -> ReplyStream:
        """Request a reply to `new` after the first `keep` turns (all if None); it replaces the turns that follow."""
        self._settle()
        params = checked_params(params, self._engine.default_params)
        if params.n != 1:
            raise InvalidInput(f"a conversation has one reply a turn, got n={params.n}: fork the session instead")
        reply_schema = None if schema is None else ReplySchema(schema)
        if reply_schema is not None:
            params = reply_schema.applied(params)
        turns = self._turns[:keep]
        ids = self._ids if keep is None else self._ids_after(turns)
        prompt = self._prompt(turns, new, ids)
        if self._overflow == "drop_oldest":
            turns, prompt = self._dropped(turns, new, prompt, params)
        prompt = self._with_room(prompt)
        if self._rule.constrains(params):
            params = constrained(params, self._template, self._rule, self._template.thinking_at(prompt))
        encoded = EncodedPrompt(rest(self._prefix, prompt), self._template.reply_start(prompt), self._prefix)
        handle = self._engine.submit(encoded, params, namespace=self._namespace, session=self._number)
        record = partial(self._record, turns, prompt, new, params, reply_schema, keep is not None)
        self._open_stream = ReplyStream(handle, prompt, record, self._use)
        return self._open_stream

    def _prompt(self, turns: list[Turn], new: Sequence[Message], ids: array[int] | None = None) -> array[int] | None:
        """Return the ids up to the start of the reply, appended to `ids` if possible; None if no context holds them."""
        try:
            return self._grown(turns, new, ids if turns else None)
        except PromptTooLong:
            return None

    def _grown(self, turns: list[Turn], new: Sequence[Message], ids: array[int] | None = None) -> array[int]:
        """Return the ids of all messages, with the sampled ids in place of the replies."""
        said, messages = {}, list(self._opening)
        for turn in turns:
            messages += turn.messages
            said[len(messages)] = turn.reply_ids
            messages.append(turn.reply)
        return self._template.grown([*messages, *new], len(messages), ids, said, appends=self._append)

    def _dropped(
        self, turns: list[Turn], new: Sequence[Message], prompt: array[int] | None, params: SamplingParams
    ) -> tuple[list[Turn], array[int] | None]:
        """Drop the oldest turns as far as necessary; return the remaining turns and their prompt."""
        limit = self._engine.context_limit
        if prompt is not None and len(prompt) + min(params.max_tokens, limit // _ROOM) <= limit:
            return turns, prompt
        while turns and (prompt is None or len(prompt) > limit // _KEEP):
            rest = _without_oldest(turns)
            if new[0]["role"] == "tool" and not rest:
                break  # tool results need the reply with the calls
            turns = rest
            prompt = self._prompt(turns, new)
        return [replace(turn, end=None) for turn in turns], prompt

    def _with_room(self, prompt: array[int] | None) -> array[int]:
        """Return the prompt; raise ContextOverflow if it leaves no room for a reply."""
        limit = self._engine.context_limit
        if prompt is not None and len(prompt) < limit:
            return prompt
        tokens = f"more than {limit}" if prompt is None else len(prompt)
        raise ContextOverflow(
            f"the conversation has {tokens} tokens and the context {limit}: rewind it, begin a new one, or use "
            "overflow='drop_oldest'"
        )

    def _record(
        self, turns: list[Turn], prompt: array[int], new: Sequence[Message], params: SamplingParams,
        schema: ReplySchema | None, edits: bool, completion: Completion,
    ) -> Reply:  # fmt: skip
        """Add the complete turn after `turns`. Raises UnparsedReply, and then the history is unchanged."""
        used = {call.id for turn in turns for call in turn.tool_calls}
        reply = self._parser.reply(completion, prompt, params, len(turns), used)
        if schema is not None:
            reply = schema.parsed(reply)
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            message["tool_calls"] = [call.as_message() for call in reply.tool_calls]
        before, self._ids = self._ids, prompt + array("i", completion.token_ids)
        end = len(self._ids) if self._append else None
        turn = Turn(tuple(new), completion.token_ids, message, reply.tool_calls, end)
        self._turns = [*turns, turn]
        self._open_stream = None
        if edits:
            self._demote(before)
        return reply

    # ---- state

    def _ids_after(self, turns: list[Turn]) -> array[int]:
        if not turns:
            return array("i")
        *before, last = turns
        if last.end is not None:
            return self._ids[: last.end]
        return self._grown(before, last.messages) + array("i", last.reply_ids)

    def _state(self) -> SessionState:
        return SessionState(
            tools=self._template.tools,
            date=self._template.date,
            namespace=self._namespace,
            history="append" if self._append else "template",
            overflow=self._overflow,
            opening=self._opening,
            turns=self._turns,
            token_ids=self._ids,
            prefix=self._prefix,
        )

    def _demote(self, dead: array[int], keep: int | None = None) -> None:
        """Mark the cached tokens of `dead` after its common prefix with the present ids as first to evict."""
        if keep is None:
            keep = _common(dead, self._ids)
        if len(dead) > keep and self._prefix is None:
            try:
                self._engine.demote(dead, keep=keep, namespace=self._namespace)
            except EngineClosed:
                return  # the pool no longer exists

    def _check_turn(self, number: object, name: str, verb: str) -> None:
        """Raise InvalidInput unless `number` is from 1 to the number of turns."""
        if not self._turns:
            raise InvalidInput(f"{name}={number!r}: this session has no turns yet, so there is nothing to {verb}")
        if not is_int(number) or not 1 <= number <= len(self._turns):
            raise InvalidInput(f"{name} must be an int from 1 to {len(self._turns)}, the last turn; got {number!r}")

    def _settle(self) -> None:
        """Begin each public method: raise SessionClosed, or undo the turn of a stream that is still open."""
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


def _common(first: array[int], second: array[int]) -> int:
    """Count the ids that two prompts share at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def _without_oldest(turns: list[Turn]) -> list[Turn]:
    """Drop the first user turn and the tool results that follow it."""
    rest = turns[1:]
    while rest and rest[0].messages[0]["role"] == "tool":
        rest = rest[1:]
    return rest


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
