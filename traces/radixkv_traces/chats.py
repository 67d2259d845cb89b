"""Conversations as text: OpenAI-style messages, one conversation a line, trajectories of tau-bench, published sets.

    {"session": "a", "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}]}

Each assistant turn is a request, and so are messages at the end that have no reply. `session` (or `session_id`, or
`id`) is optional, and so are `timestamp` (ms) of the conversation and of each message, `namespace` (or `tenant`) and
`tools`. In a log, each line repeats the conversation so far; only its new turns are requests. A line with
`output_length`, as in sessions of AIPerf and Dynamo, is one request.

A file of tau-bench (Yao et al., 2024; github.com/sierra-research/tau-bench) is one JSON array of sessions with
`task_id`, `trial` and `traj`.

The lines of ShareGPT, WildChat, LMSYS-Chat-1M and OpenAI's batch files are converted to lines of messages first. Such
sets have no stop reasons; only WildChat has times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from radixkv_traces.records import Delays, Line, Named, TraceError, short_repr, unix_milliseconds

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One assistant turn: the messages before it are the prompt. An open prompt has no `reply` and no `stop`."""

    timestamp: float  # milliseconds since the trace began; always 0.0 if the trace has no times
    messages: tuple[Message, ...]
    session: str
    turn: int  # from 1
    output_length: int | None = None  # tokens of the reply; None: count the tokens of `reply`
    reply: Message | None = None  # the assistant message as recorded
    stop: str | None = "end_turn"  # or "tool_use", if the reply calls tools
    namespace: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


def conversations(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of the lines of a chat trace. O(messages) a line.

    A line that repeats a conversation of an earlier line yields only its new turns: see `RequestLog`.
    """
    log, delays = RequestLog(), Delays()
    for name, line in objects:
        session = line.name("session", "session_id", "id")
        timed = line.fields.get("timestamp") is not None or line.fields.get("delay") is not None
        start = delays.time(line, session) if timed else 0.0
        found = list(turns(line, "messages", session or name, start, open_end=True))
        if line.fields.get("output_length") is None:
            yield from log.new_turns(session, found)
        elif found:
            yield replace(log.shared(found)[-1], output_length=line.count("output_length"))


def trajectories(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of trajectories. The last message of each, the user's goodbye, was never sent to a model."""
    for _, line in objects:
        task = line.required("task_id")
        if isinstance(task, bool) or not isinstance(task, int | str):
            raise line.wrong("task_id", f"a JSON {type(task).__name__} is no int and no string")
        trial = line.count("trial") if line.fields.get("trial") is not None else 0
        yield from turns(line, "traj", f"{task}.{trial}", 0.0)


class RequestLog:
    """The conversations of earlier lines, by hashes of their messages, to find the turns that a line adds.

    In a line with a session's name, turns that an earlier line of the session had are skipped. In a line without a
    name, so are the turns of the longest earlier line that it extends; two conversations that merely begin alike stay
    apart. A line that adds nothing is a retry of its last turn. Holds one hash for each turn.
    """

    def __init__(self) -> None:
        self._sessions: dict[tuple[str | None, int], str] = {}
        self._last: tuple[Message, ...] = ()  # messages of the preceding line
        self._last_ends: list[int] = []

    def new_turns(self, session: str | None, turns: list[ChatRequest]) -> Iterator[ChatRequest]:
        """Return the turns that no earlier line had; `session` is the line's own name. O(messages)."""
        if not turns:
            return
        turns = self.shared(turns)
        ends, known, name = self._last_ends, self._sessions, turns[0].session
        if session is not None:
            new = [each for each in turns if (session, ends[len(each.messages) - 1]) not in known]
            known.update({(session, ends[len(each.messages) - 1]): session for each in turns})
        else:
            longest = len(ends) if turns[-1].reply is None else len(ends) - 1  # equal whole conversations are separate
            at = next((at for at in range(longest, 0, -1) if (None, ends[at - 1]) in known), 0)
            name = known[None, ends[at - 1]] if at else name
            known[None, ends[-1]] = name
            new = [each for each in turns if len(each.messages) > at]
        for each in new or turns[-1:]:
            yield replace(each, session=name)

    def shared(self, turns: list[ChatRequest]) -> list[ChatRequest]:
        """Return the turns with the message objects of the preceding line, as far as they are equal.

        So `text_blocks` encodes only new messages.
        """
        last = turns[-1]
        whole = last.messages if last.reply is None else (*last.messages, last.reply)
        ends = [0]
        for message in whole:
            said = [message["role"], message.get("content") or "", message.get("tool_calls") or []]
            ends.append(hash((ends[-1], json.dumps(said, sort_keys=True))))
        del ends[0]
        both = enumerate(zip(ends, self._last_ends, whole, self._last, strict=False))
        equal = next(
            (at for at, (one, two, new, old) in both if one != two or new != old), min(len(ends), len(self._last_ends))
        )
        whole = (*self._last[:equal], *whole[equal:])
        self._last, self._last_ends = whole, ends
        return [replace(each, messages=whole[: len(each.messages)]) for each in turns]


def turns(
    line: Line, field: str, session: str, start: float, *, open_start: bool = False, open_end: bool = False
) -> Iterator[ChatRequest]:
    """Return one request for each assistant message of the list in `field`. All messages are checked first.

    With `open_end`, messages at the end without a reply are one more request, as in logs of requests. With
    `open_start`, an assistant message without a prompt is no request; otherwise it raises TraceError.
    """
    messages = _messages(line, field)
    tools = line.objects("tools") if line.fields.get("tools") else []
    namespace = line.namespace()
    turn, now = 0, start
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not at and open_start:
            continue
        if not at:
            raise line.wrong(f"{field}[0]", "an assistant's turn with nothing before it: there is no prompt")
        turn += 1
        now = max(now, message.get("timestamp", now))
        stop = "tool_use" if message.get("tool_calls") else "end_turn"
        yield ChatRequest(now, messages[:at], session, turn, None, message, stop, namespace, tuple(tools))
    if open_end and messages and messages[-1]["role"] != "assistant":
        now = max(now, messages[-1].get("timestamp", now))
        yield ChatRequest(now, messages, session, turn + 1, 0, None, None, namespace, tuple(tools))


def _messages(line: Line, field: str) -> tuple[Message, ...]:
    messages = line.required(field)
    if not isinstance(messages, list):
        raise line.wrong(field, f"{short_repr(messages)} is not a list of messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise line.wrong(f"{field}[{at}]", f"{short_repr(message)} is not an object")
        problem = _problem(line, message, f"{field}[{at}]")
        if problem is not None:
            raise problem
    return tuple(messages)


def _problem(line: Line, message: Message, where: str) -> TraceError | None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return line.wrong(f"{where}.role", f"{short_repr(role)}: allowed are {', '.join(ROLES)}")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if content is not None and not isinstance(content, str) and not parts:
        return line.wrong(f"{where}.content", f"{short_repr(content)} is no string, no list of parts and not null")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return line.wrong(f"{where}.tool_calls", f"{short_repr(calls)} is not a list of objects")
    if message.get("timestamp") is not None:
        try:
            Line(line.file, line.line, message).time()
        except TraceError:
            return line.wrong(f"{where}.timestamp", f"{short_repr(message['timestamp'])} is not milliseconds >= 0")
    elif "timestamp" in message:
        return line.wrong(f"{where}.timestamp", "null: leave it out")
    return None


# ---- published sets


_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "assistant", "system": "system",
    "observation": "tool", "tool": "tool",
}  # fmt: skip


def sharegpt(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of ShareGPT's conversations: {"id", "conversations": [{"from", "value"}, ...]}.

    Many begin with an answer, because they were cut: it is part of later prompts, and no request.
    """
    for name, line in objects:
        messages = [_sharegpt_message(line, at, each) for at, each in enumerate(line.objects("conversations"))]
        session = line.name("id") or name
        yield from turns(_with(line, messages=messages), "messages", session, 0.0, open_start=True)


def chat_logs(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of WildChat's and LMSYS-Chat-1M's lines: {"conversation": [{"role", "content"}, ...]}.

    WildChat dates the answers; these times are taken for the requests, counted from the first one.
    """
    begin = None
    for request in conversations((name, _chat_line(line)) for name, line in objects):
        if request.timestamp:
            begin = request.timestamp if begin is None else begin
            request = replace(request, timestamp=request.timestamp - begin)
        yield request


def _chat_line(line: Line) -> Line:
    """Return a line of WildChat or LMSYS-Chat-1M as one of `chats`, with milliseconds since 1970."""
    messages: list[Any] = []
    for at, each in enumerate(line.objects("conversation")):
        said = {key: each.get(key) for key in ("role", "content")}
        if each.get("timestamp") is not None:
            said["timestamp"] = unix_milliseconds(line, f"conversation[{at}].timestamp", each["timestamp"])
        messages.append(said)
    fields: dict[str, Any] = {"messages": messages, "session": line.name("conversation_id", "conversation_hash")}
    if line.fields.get("timestamp") is not None and not any("timestamp" in each for each in messages):
        fields["timestamp"] = unix_milliseconds(line, "timestamp", line.fields["timestamp"])
    return _with(line, **fields)


def openai_batch(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of the input file of OpenAI's Batch API: {"custom_id", "url", "body"}, one request a line."""
    log = RequestLog()
    for name, line in objects:
        body = line.required("body")
        if not isinstance(body, dict):
            raise line.wrong("body", f"{short_repr(body)} is not an object")
        found = list(turns(_with(line, **_batch_fields(line, body)), "messages", name, 0.0, open_end=True))
        if not found:
            raise line.wrong("body", "there is no prompt")
        last = log.shared(found)[-1]
        yield replace(last, turn=1, output_length=0 if last.reply is None else None)


def _batch_fields(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    """Return messages and tools of a body for chat completions, completions or responses."""
    tools = body.get("tools")
    if "messages" in body:
        return {"messages": body["messages"], "tools": tools}
    prompt = body.get("prompt", body.get("input"))
    if "embeddings" in str(line.fields.get("url")) or prompt is None:
        raise line.wrong("body", "there are no messages, no input and no prompt of a generation")
    if not isinstance(prompt, str | list):
        raise line.wrong("body", f"{short_repr(prompt)} is no prompt: allowed are a string and a list")
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if isinstance(body.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    known = [each for each in messages if not isinstance(each, dict) or "role" in each]
    return {"messages": known, "tools": tools}


def _sharegpt_message(line: Line, at: int, said: dict[str, Any]) -> Message:
    role = _SHAREGPT_ROLES.get(str(said.get("from", said.get("role"))))
    if role is None:
        allowed = ", ".join(_SHAREGPT_ROLES)
        raise line.wrong(f"conversations[{at}].from", f"{short_repr(said.get('from'))}: allowed are {allowed}")
    text = said.get("value", said.get("content"))
    if not isinstance(text, str):
        raise line.wrong(f"conversations[{at}].value", f"{short_repr(text)} is not a string")
    return {"role": role, "content": text}


def _with(line: Line, **fields: Any) -> Line:
    return Line(line.file, line.line, fields)
