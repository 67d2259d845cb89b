"""Published sets of conversations, and batches of requests: ShareGPT, WildChat, LMSYS-Chat-1M, OpenAI's batch files.

Each object is converted to the one that `chats` reads. Such sets have no stop reasons; only WildChat has times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from radixkv_traces.chats import ChatRequest, Message, RequestLog, conversations, turns
from radixkv_traces.records import Line, Named, short_repr, unix_milliseconds

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
        messages = [_sharegpt_message(line, at, each) for at, each in enumerate(_list(line, "conversations"))]
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
    for at, each in enumerate(_list(line, "conversation")):
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


def _list(line: Line, field: str) -> list[dict[str, Any]]:
    values = line.required(field)
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise line.wrong(field, f"{short_repr(values)} is not a list of objects")
    return values


def _with(line: Line, **fields: Any) -> Line:
    return Line(line.file, line.line, fields)
