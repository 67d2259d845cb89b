"""OpenTelemetry spans with the GenAI conventions, as OTLP JSON: {"resourceSpans": [...]}, one object a line.

Exporters write content only on request. Spans without messages have lengths only. OpenLLMetry numbers the parts of
messages instead (`gen_ai.prompt.0.role`, `gen_ai.prompt.0.content`); they are converted to the conventions' messages.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

from radixkv_traces.chats import ROLES, ChatRequest, Message, RequestLog
from radixkv_traces.records import Line, Named, TraceRequest, is_count, short_repr

_OTHER_OPERATIONS = ("invoke_agent", "create_agent", "execute_tool", "embeddings", "invoke_workflow", "retrieval")
_NUMBERED = {"gen_ai.input.messages": "gen_ai.prompt", "gen_ai.output.messages": "gen_ai.completion"}
_OLDER_NAMES = {
    "gen_ai.usage.input_tokens": "gen_ai.usage.prompt_tokens",
    "gen_ai.usage.output_tokens": "gen_ai.usage.completion_tokens",
}

Span = dict[str, Any]


def spans(objects: Iterator[Named]) -> Iterator[ChatRequest | TraceRequest]:
    """Return a request for each span of a call of a model; the first one decides between text and lengths only.

    The session is `gen_ai.conversation.id`, or the trace. Other spans are skipped.
    """
    log, begin, text = RequestLog(), None, None
    for name, line in objects:
        for number, span in enumerate(_spans(line)):
            found = _attributes(line, span)
            if "gen_ai.usage.input_tokens" not in found and "gen_ai.input.messages" not in found:
                continue
            if found.get("gen_ai.operation.name") in _OTHER_OPERATIONS:
                continue
            start = _nanoseconds(line, span)
            begin = start if begin is None else begin
            text = "gen_ai.input.messages" in found if text is None else text
            session = found.get("gen_ai.conversation.id") or span.get("traceId") or f"{name}, span {number}"
            time = (start - begin) / 1e6
            yield (
                log.shared([_chat(line, found, time, str(session))])[0]
                if text
                else TraceRequest(
                    time,
                    _count(line, found, "gen_ai.usage.input_tokens"),
                    _count(line, found, "gen_ai.usage.output_tokens"),
                    array("q"),
                    str(session),
                    stop=_stop(found),
                )
            )


def _chat(line: Line, found: dict[str, Any], time: float, session: str) -> ChatRequest:
    if "gen_ai.input.messages" not in found:
        raise line.wrong("gen_ai.input.messages", "missing, where earlier spans have it")
    messages = [{"role": "system", "content": _joined(line, found, "gen_ai.system_instructions")}]
    messages = messages if messages[0]["content"] else []
    for each in _json(line, found, "gen_ai.input.messages"):
        messages += _messages(line, each)
    if not messages:
        raise line.wrong("gen_ai.input.messages", "empty: there is no prompt")
    outputs = [said for each in _json(line, found, "gen_ai.output.messages") for said in _messages(line, each)]
    counted = "gen_ai.usage.output_tokens" in found
    output = _count(line, found, "gen_ai.usage.output_tokens") if counted else None if outputs else 0
    tools = tuple(each for each in _json(line, found, "gen_ai.tool.definitions") if isinstance(each, dict))
    turn = 1 + sum(each["role"] == "assistant" for each in messages)
    reply = outputs[0] if outputs else None
    return ChatRequest(time, tuple(messages), session, turn, output, reply, _stop(found), None, tools)


def _messages(line: Line, message: Any) -> list[Message]:
    """Return a message of the conventions, {"role", "parts"}, as OpenAI's; each result of a tool is one of its own."""
    if not isinstance(message, dict):
        raise line.wrong("gen_ai.input.messages", f"{short_repr(message)} is not an object")
    role = message.get("role") if message.get("role") in ROLES else "user"
    if isinstance(message.get("content"), str):  # before version 1.37
        return [{"role": role, "content": message["content"]}]
    texts, calls, results = [], [], []
    parts = message.get("parts")
    for part in parts if isinstance(parts, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_call":
            function = {"name": part.get("name"), "arguments": _written(part.get("arguments"))}
            calls.append({"id": str(part.get("id")), "type": "function", "function": function})
        elif kind == "tool_call_response":
            text = _written(part.get("response", part.get("result")))
            results.append({"role": "tool", "tool_call_id": str(part.get("id")), "content": text})
        elif kind == "text":
            texts.append(_written(part.get("content")))
        elif kind is not None and kind != "reasoning":
            texts.append(f"[{kind}]")
    found: list[Message] = [{"role": role, "content": "".join(texts)}] if texts or calls or not results else []
    if calls:
        found[0]["tool_calls"] = calls
    return found + results


def _joined(line: Line, found: dict[str, Any], field: str) -> str:
    values = _json(line, found, field)
    return "\n".join(_written(each.get("content")) if isinstance(each, dict) else _written(each) for each in values)


def _json(line: Line, found: dict[str, Any], field: str) -> list[Any]:
    """Return a list that is an attribute of its own, or JSON in a string."""
    value = found.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value] if field == "gen_ai.system_instructions" else value
    if value is None:
        return []
    if not isinstance(value, list):
        raise line.wrong(field, f"{short_repr(value)} is not a list")
    return value


def _written(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _stop(found: dict[str, Any]) -> str | None:
    reasons = found.get("gen_ai.response.finish_reasons")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    return {"tool_calls": "tool_use", "tool_call": "tool_use", "stop": "end_turn"}.get(str(first), first and str(first))


def _count(line: Line, found: dict[str, Any], field: str) -> int:
    value = found.get(field, 0)
    if not is_count(value):
        raise line.wrong(field, f"{short_repr(value)} is not an int >= 0")
    return int(value)


def _nanoseconds(line: Line, span: Span) -> int:
    value = span.get("startTimeUnixNano")
    if not (isinstance(value, int) or (isinstance(value, str) and value.isdigit())) or int(value) >= 1 << 63:
        raise line.wrong("startTimeUnixNano", f"{short_repr(value)} is not a number of nanoseconds")
    return int(value)


def _spans(line: Line) -> Iterator[Span]:
    for resource in line.objects("resourceSpans", line.fields):
        for scope in line.objects("scopeSpans", resource):
            yield from line.objects("spans", scope)


def _attributes(line: Line, span: Span) -> dict[str, Any]:
    found = {str(each.get("key")): _value(each.get("value")) for each in line.objects("attributes", span)}
    for name, older in _OLDER_NAMES.items():
        if name not in found and older in found:
            found[name] = found[older]
    for name, prefix in _NUMBERED.items():
        if name not in found and (numbered := _unnumbered(found, prefix)):
            found[name] = [_message(each) for each in numbered]
    return found


def _unnumbered(found: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return the objects whose fields are attributes `prefix.0.field`, `prefix.1.field`, ..., in order."""
    objects: dict[int, dict[str, Any]] = {}
    for key, value in found.items():
        number, _, field = key.removeprefix(prefix + ".").partition(".")
        if key.startswith(prefix + ".") and number.isdecimal() and field:
            objects.setdefault(int(number), {})[field] = value
    return [each for _, each in sorted(objects.items())]


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the conventions from the fields of a numbered one."""
    calls = _unnumbered(fields, "tool_calls")
    if fields.get("role") == "tool":
        part = {"type": "tool_call_response", "id": fields.get("tool_call_id"), "response": fields.get("content")}
        return {"role": "tool", "parts": [part]}
    text = [{"type": "text", "content": fields["content"]}] if fields.get("content") else []
    return {"role": fields.get("role"), "parts": [*text, *({**call, "type": "tool_call"} for call in calls)]}


def _value(value: Any) -> Any:
    """Return an OTLP value: {"stringValue": ...}, {"intValue": "7"}, {"arrayValue": {"values": [...]}}, ..."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, inner),) = value.items()
    if kind == "intValue":
        return int(inner) if isinstance(inner, int) or (isinstance(inner, str) and inner.isdecimal()) else None
    if kind in ("arrayValue", "kvlistValue"):
        values = inner.get("values") if isinstance(inner, dict) else None
        items = [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
        if kind == "arrayValue":
            return [_value(each) for each in items]
        return {str(each.get("key")): _value(each.get("value")) for each in items}
    return inner
