"""Requests and event streams of Anthropic's Messages API, for tests without its SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.serve.served import Served

ASKED = [{"role": "user", "content": "Hello!"}]
BODY: dict[str, Any] = {"model": "claude-any", "max_tokens": 200, "messages": ASKED, "temperature": 0}
LOOK = {
    "name": "look",
    "description": "Look at a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a.txt"}}\n</tool_call>'
MARK = {"cache_control": {"type": "ephemeral"}}


def message(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(server: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/messages?beta=true", {**BODY, **fields, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return events(answer.text)


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each is the type of its JSON."""
    found = []
    for each in text.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a complete stream, put together as a client does; check the order of the events."""
    events = [each for each in events if each["type"] != "ping"]
    assert [each["type"] for each in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    answer = events[0]["message"]
    assert answer["content"] == [] and answer["stop_reason"] is None and answer["stop_sequence"] is None
    arguments, is_open = "", False
    for each in events[1:-2]:
        content = answer["content"]
        if each["type"] == "content_block_start":
            assert not is_open and each["index"] == len(content)
            content.append(each["content_block"])
            arguments, is_open = "", True
            continue
        assert is_open and each["index"] == len(content) - 1
        if each["type"] == "content_block_stop":
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(arguments)
            continue
        assert each["type"] == "content_block_delta"
        match each["delta"]:
            case {"type": "text_delta", "text": text}:
                content[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                content[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": signature}:
                content[-1]["signature"] += signature
            case {"type": "input_json_delta", "partial_json": text}:
                arguments += text
            case other:
                raise AssertionError(f"unknown delta {other}")
    assert not is_open
    answer |= events[-2]["delta"]
    answer["usage"] |= events[-2]["usage"]
    return answer


def prompt_tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
