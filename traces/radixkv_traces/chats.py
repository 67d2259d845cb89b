"""Conversations as text: OpenAI-style messages, one conversation a line; each assistant turn is a request, and so is
what is left open at the end.

Knows messages and where they are allowed to be wrong. Knows no template and no model: what a message is in tokens, a
tokenizer says (`text_blocks`).

    {"session": "a", "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}]}

`session` (or `session_id`, or `id`) may be left out, and so may `timestamp` (ms) of the conversation and of each
message that is asked for, `namespace` (or `tenant`) and `tools`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from radixkv_traces.records import Line, TraceError, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One assistant turn: the messages before it are the prompt. An open prompt has no `reply` and no `stop`."""

    timestamp: float  # milliseconds since the trace began; 0.0 throughout if the trace does not say
    messages: tuple[Message, ...]
    session: str
    turn: int  # from 1
    output_length: int | None = None  # tokens of the reply; None: count those of `reply`
    reply: Message | None = None  # the assistant message as recorded
    stop: str | None = "end_turn"  # or "tool_use", if the reply calls tools
    namespace: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


def conversation(line: Line, name: str) -> Iterator[ChatRequest]:
    """The requests of one conversation of a chat trace, which is called `name` if it does not say how."""
    session = line.name("session", "session_id", "id") or name
    start = line.time() if line.fields.get("timestamp") is not None else 0.0
    return turns(line, "messages", session, start, open_end=True)


def turns(line: Line, field: str, session: str, start: float, *, open_end: bool = False) -> Iterator[ChatRequest]:
    """One request for each assistant message of the list in `field`. All of them are checked first.

    With `open_end`, messages that nobody answered are one more: logs of requests end so.
    """
    messages = _messages(line, field)
    tools = line.fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise line.wrong("tools", f"{shown(tools)} is not a list of objects")
    namespace = line.namespace()
    turn, now = 0, start
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
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
        raise line.wrong(field, f"{shown(messages)} is not a list of messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise line.wrong(f"{field}[{at}]", f"{shown(message)} is not an object")
        problem = _problem(line, message, f"{field}[{at}]")
        if problem is not None:
            raise problem
    return tuple(messages)


def _problem(line: Line, message: Message, where: str) -> TraceError | None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return line.wrong(f"{where}.role", f"{shown(role)}: allowed are {', '.join(ROLES)}")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if content is not None and not isinstance(content, str) and not parts:
        return line.wrong(f"{where}.content", f"{shown(content)} is no string, no list of parts and not null")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return line.wrong(f"{where}.tool_calls", f"{shown(calls)} is not a list of objects")
    if message.get("timestamp") is not None:
        try:
            Line(line.file, line.line, message).time()
        except TraceError:
            return line.wrong(f"{where}.timestamp", f"{shown(message['timestamp'])} is not milliseconds >= 0")
    elif "timestamp" in message:
        return line.wrong(f"{where}.timestamp", "null: leave it out")
    return None
