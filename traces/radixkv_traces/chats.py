"""Conversations as text: OpenAI-style messages, one conversation a line, and the trajectories of tau-bench.

    {"session": "a", "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}]}

Each assistant turn is a request, and so are messages at the end that have no reply. `session` (or `session_id`, or
`id`) is optional, and so are `timestamp` (ms) of the conversation and of each message, `namespace` (or `tenant`) and
`tools`.

A file of tau-bench (Yao et al., 2024; github.com/sierra-research/tau-bench) is one JSON array of sessions with
`task_id`, `trial` and `traj`. The array is read element by element, so a file may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from radixkv_traces.records import Line, TraceError, short_repr

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


def conversation(line: Line, name: str) -> Iterator[ChatRequest]:
    """Return the requests of one conversation of a chat trace; `name` is its session if the line has none."""
    session = line.name("session", "session_id", "id") or name
    start = line.time() if line.fields.get("timestamp") is not None else 0.0
    return turns(line, "messages", session, start, open_end=True)


def turns(line: Line, field: str, session: str, start: float, *, open_end: bool = False) -> Iterator[ChatRequest]:
    """Return one request for each assistant message of the list in `field`. All messages are checked first.

    With `open_end`, messages at the end without a reply are one more request, as in logs of requests.
    """
    messages = _messages(line, field)
    tools = line.fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise line.wrong("tools", f"{short_repr(tools)} is not a list of objects")
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


MAX_ELEMENT = 1 << 28  # characters of one session; a longer one is a bracket that never closes
_CHUNK = 1 << 16
_SPACE = " \t\r\n"


class Text(Protocol):
    """A source of text that can be read piece by piece."""

    def read(self, size: int, /) -> str:
        """Return the next characters, at most `size`; "" at the end."""


def trajectory(line: Line) -> Iterator[ChatRequest]:
    """Return the requests of one trajectory. Its last message, the user's goodbye, was never sent to a model."""
    task = line.required("task_id")
    if isinstance(task, bool) or not isinstance(task, int | str):
        raise line.wrong("task_id", f"a JSON {type(task).__name__} is no int and no string")
    trial = line.count("trial") if line.fields.get("trial") is not None else 0
    return turns(line, "traj", f"{task}.{trial}", 0.0)


def elements(text: Text, file: str, line: int = 1) -> Iterator[Line]:
    """Return the objects of a JSON array, each with the line in which it begins. Holds about one object at a time."""
    array = _Array(text, file, line)
    array.expect("[")
    if array.next() == "]":
        array.expect("]")
    else:
        while True:
            at, value = array.value()
            if not isinstance(value, dict):
                raise TraceError(file, at, None, f"a JSON {type(value).__name__}, not an object")
            yield Line(file, at, value)
            if array.next() != ",":
                break
            array.expect(",")
        array.expect("]")
    if array.next():
        raise TraceError(file, array.line, None, "not JSON: something follows the array")


class _Array:
    """A moving window on a text."""

    def __init__(self, text: Text, file: str, line: int) -> None:
        self._text = text
        self._file = file
        self._buffer = ""
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode
        self.line = line

    def next(self) -> str:
        """Return the next character that is not a space, without consuming it; "" at the end."""
        while True:
            rest = self._buffer.lstrip(_SPACE)
            self._consume(len(self._buffer) - len(rest))
            if rest or self._ended:
                return rest[:1]
            self._read(_CHUNK)

    def expect(self, character: str) -> None:
        """Consume this character. Raises TraceError if another one is next."""
        found = self.next()
        if found != character:
            name = f"{found!r}" if found else "the end of the file"
            raise TraceError(self._file, self.line, None, f"not JSON: {name} where {character!r} is expected")
        self._consume(1)

    def value(self) -> tuple[int, Any]:
        """Return the next JSON value, and the line in which it begins."""
        self.next()
        line = self.line
        while True:
            try:
                value, end = self._decode(self._buffer)
            except json.JSONDecodeError as error:
                if self._ended or self._surely_wrong(error) or len(self._buffer) > MAX_ELEMENT:
                    at = line + self._buffer.count("\n", 0, error.pos)
                    raise TraceError(self._file, at, None, f"not JSON: {error.msg}") from error
                self._read(max(_CHUNK, len(self._buffer)))
            except (ValueError, RecursionError) as error:
                raise TraceError(self._file, line, None, f"not JSON: {error}") from error
            else:
                self._consume(end)
                return line, value

    def _surely_wrong(self, error: json.JSONDecodeError) -> bool:
        """Whether the error is well before the end of the window, so that more text cannot mend it."""
        return not error.msg.startswith("Unterminated string") and error.pos < len(self._buffer) - 16

    def _consume(self, count: int) -> None:
        self.line += self._buffer.count("\n", 0, count)
        self._buffer = self._buffer[count:]

    def _read(self, size: int) -> None:
        more = self._text.read(size)
        self._ended = not more
        self._buffer += more
