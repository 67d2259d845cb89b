"""Requests of the Responses API in tests, and the types of the official client as the oracle of events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from radixkv.serve import Settings
from tests.chat.tool_call_dialects import DIALECTS
from tests.serve.served import LOCAL, Served, fake_model, served

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "fake", "input": "Hello!", "temperature": 0}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
_EVENTS = {
    each.model_fields["type"].annotation.__args__[0]: each for each in get_args(get_args(ResponseStreamEvent)[0])
}


def client_of(server: Served, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{LOCAL}/v1", api_key=key, max_retries=0, http_client=server.client)


@contextmanager
def answering(reply: Callable[[str], str], settings: Settings | None = None) -> Iterator[Served]:
    """Serve a model that writes calls in the Hermes format; `reply` maps the prompt's text to the reply's."""
    dialect = DIALECTS["Qwen"]
    tokenizer = dialect.tokenizer()
    facts = {"tokenizer": tokenizer, "vocab_size": len(tokenizer), "stop_token_ids": dialect.stops()}
    model = fake_model(**facts, max_length=16_000)  # the tokenizer has a token for each letter
    sizes = {"num_blocks": 8000, "max_batch_tokens": 16_500, "prefill_chunk": 16_000}
    with served(settings, model=model, brain=dialect.brain(reply), **sizes) as server:
        yield server


def stream(server: Served, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the events of one request, after a check of each against the client's types."""
    answer = server.post(PATH, {**body, "stream": True}, **options)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return checked(answer.text)


def checked(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        listed = json.loads(data.removeprefix("data: "))
        if event["type"] == "response.failed" and event["response"]["error"]["code"] == "context_length_exceeded":
            listed["response"]["error"]["code"] = "server_error"  # OpenAI sends this code, but does not list it
        check_known(_EVENTS[event["type"]].model_validate(listed, strict=True))
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    check_places(events)
    return events


def whole(server: Served, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = server.post(PATH, body, **options)
    assert answer.status_code == 200, answer.text
    check_known(Response.model_validate(answer.json(), strict=True))
    return dict(answer.json())


def check_known(value: Any) -> None:
    """Check that the client's types name every field."""
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            check_known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            check_known(each)


def check_places(events: list[dict[str, Any]]) -> None:
    """Check that each item begins, has its text and ends once, and that the last event has the same items."""
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif event["type"] == "response.output_item.done":
            at = event["output_index"]
            assert event["item"]["id"] == items[at]["id"]
            items[at] = event["item"]
        elif event["type"].endswith(".delta"):
            assert items[event["output_index"]]["id"] == event["item_id"]
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"].endswith("_text.done"):
            assert texts.get(event["item_id"], "") == event["text"]
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete", "response.failed")
    if last["type"] != "response.failed":
        assert last["response"]["output"] == items
    for item in items:
        if item["type"] == "function_call":
            assert texts[item["id"]] == item["arguments"]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without the repetitions of deltas."""
    short = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(short) if at == 0 or kind != short[at - 1]]


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without ids and times."""

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(each) for each in value]
        if isinstance(value, dict):
            return {
                name: without(each) for name, each in value.items() if name not in ("id", "created_at", "completed_at")
            }
        return value

    return dict(without(response))
