"""Compressed prefixes over HTTP: they are made, named in requests and released, each in the namespace of its caller."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from radixkv import AsyncEngine, Engine
from radixkv.serve import Settings, create_app
from tests.serve.served import LOCAL, events, hosted_engine, texts, until

BEGUN = [{"role": "system", "content": "Ann, Ben and Cleo share a house by the sea. " * 8}]
ASKED = [{"role": "user", "content": "Who lives there?"}]
FORM = {"model": "tiny", "temperature": 0, "max_tokens": 8}
CHAT, TEXT, MADE = "/v1/chat/completions", "/v1/completions", "/v1/prefixes"


@contextmanager
def served(settings: Settings | None = None) -> Iterator[tuple[Engine, TestClient]]:
    engine = Engine.load("tiny", num_blocks=400, monitor=False)
    with engine, TestClient(create_app(AsyncEngine(engine), settings), LOCAL) as client:
        yield engine, client


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Engine, TestClient]]:
    with served() as found:
        yield found


def post(client: TestClient, path: str, body: dict[str, Any], status: int = 200, key: str = "") -> Any:
    form = {"model": "tiny"} if path == MADE else FORM
    answer = client.post(path, json={**form, **body}, headers={"X-Api-Key": key})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_requests_after_a_whole_prefix_answer_as_after_its_text(tiny: tuple[Engine, TestClient]) -> None:
    _, client = tiny
    exact = post(client, CHAT, {"messages": [*BEGUN, *ASKED], "n": 2})["choices"]
    made = post(client, MADE, {"messages": BEGUN, "keep": 1})
    assert made["object"] == "prefix" and made["tokens"] == made["slots"] > 50
    body = {"messages": ASKED, "prefix": made["id"], "n": 2}
    answer = post(client, CHAT, body)
    assert [each["message"] for each in answer["choices"]] == [each["message"] for each in exact]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["slots"]
    stream = client.post(CHAT, json={**FORM, **body, "stream": True})
    assert texts(events(stream.text)) == {at: each["message"]["content"] for at, each in enumerate(exact)}


def test_texts_after_a_prefix_have_no_special_tokens(tiny: tuple[Engine, TestClient]) -> None:
    text, rest = "Once upon a time there was a small house. " * 4, " In it lived"
    engine, client = tiny
    ids = engine.client.inputs.encode(text)
    after = engine.client.inputs.encode_after([], ids, rest)
    exact = post(client, TEXT, {"prompt": [*ids.tolist(), *after.tolist()]})
    name = post(client, MADE, {"prompt": text, "keep": 1, "method": "snapkv"})["id"]
    assert post(client, TEXT, {"prompt": rest, "prefix": name})["choices"] == exact["choices"]
    assert "of messages" in post(client, CHAT, {"messages": ASKED, "prefix": name}, 400)["error"]["message"]


def test_foreign_and_released_prefixes_are_unknown() -> None:
    ann, ben = "secret-ann", "secret-ben"
    with served(Settings(api_keys={"ann": ann, "ben": ben})) as (engine, client):
        made, again = (post(client, MADE, {"messages": BEGUN}, key=ann) for _ in range(2))
        assert made["slots"] < made["tokens"] and made == again
        path, body = f"{MADE}/{made['id']}", {"messages": ASKED, "prefix": made["id"]}
        unknown = post(client, CHAT, {**body, "prefix": "x"}, 404, ben)
        assert post(client, CHAT, body, 404, ben) == unknown and unknown["error"]["param"] == "prefix"
        assert client.delete(path, headers={"X-Api-Key": ben}).json() == unknown
        post(client, CHAT, body, key=ann)
        released = client.delete(path, headers={"X-Api-Key": ann}).json()
        assert released == {"id": made["id"], "object": "prefix", "deleted": True}
        assert post(client, CHAT, body, 404, ann) == client.delete(path, headers={"X-Api-Key": ann}).json() == unknown
        assert engine.stats().cache.pinned_blocks == 0


def test_a_prefix_keeps_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (engine, client):
        codec: Any = engine.model.codec
        monkeypatch.setattr(codec, "chat_template", "{{ strftime_now('%d %b %Y') }}" + codec.chat_template)
        body = {"messages": ASKED, "prefix": post(client, MADE, {"messages": BEGUN})["id"]}
        monkeypatch.setattr("radixkv.serve.conversations.today", lambda: "29 Nov 2040")
        said = post(client, CHAT, body)["choices"][0]["message"]
        post(client, CHAT, {**body, "messages": [*ASKED, said, *ASKED]})


def test_wrong_bodies_are_refused(tiny: tuple[Engine, TestClient]) -> None:
    wrong: list[dict[str, Any]] = [*({"keep": keep} for keep in (0, 1.5, True, "0.5")), {"method": "best"}]
    engine, client = tiny
    pinned = engine.stats().cache.pinned_blocks
    for each in (*wrong, {"messages": None}, {"messages": None, "prompt": "short"}, {"messages": []}):
        param = "prompt" if each.get("messages", ()) is None else next(iter(each))
        assert post(client, MADE, {"messages": BEGUN, **each}, 400)["error"]["param"] == param
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert post(client, MADE, {"prompt": "a " * 99, "tools": tools}, 400)["error"]["param"] == "tools"
    assert "pin_budget" in post(client, MADE, {"prompt": "a " * 3400}, 503)["error"]["message"]
    infill = {"input_prefix": "a", "input_suffix": "b"}
    for path in ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/infill"):
        others = client.post(path, json={**FORM, **infill, "input": "a", "messages": ASKED, "prefix": "x"})
        assert others.status_code == 400 and "prefix is not supported" in others.text
    assert engine.stats().cache.pinned_blocks == pinned


def test_a_client_that_disconnects_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def step(_: Any) -> bool:
        begun.set()
        return not time.sleep(0.001)  # there is always another piece

    body = json.dumps({"model": "tiny", "messages": BEGUN}).encode()
    head = f"POST {MADE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    engine = Engine.load("tiny", num_blocks=400, monitor=False)
    monkeypatch.setattr(engine.core.runner, "compression", lambda *_: SimpleNamespace(step=step))
    with hosted_engine(engine, SimpleNamespace(gate=None)) as host:  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", host.port)) as connection:
            connection.sendall(head.encode() + body)
            assert begun.wait(20) and engine.stats().cache.pinned_blocks
        until(lambda: engine.stats().cache.pinned_blocks == 0)
