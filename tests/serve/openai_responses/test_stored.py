"""Stored responses: read, continued, deleted, cancelled, within their limits, and by their own tenant only."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from radixkv.chat.calls.block import CallDelta
from radixkv.serve import Settings
from radixkv.serve.access import NAMESPACE_HEADER
from radixkv.serve.openai_responses.events import ResponseEvents
from radixkv.serve.openai_responses.store import Items, ResponseStore, StoredResponse
from radixkv.serve.reply import Piece
from tests.serve.openai_responses.served_responses import ASKED, PATH, WEATHER, checked, client_of, stream, whole
from tests.serve.served import hosted, says, served

KEYS = {"ada": "ada-secret-1", "bob": "bob-secret-2"}


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}", **more}


def test_the_official_client_reads_continues_and_deletes_a_response() -> None:
    with served(brain=says("Hello, you.")) as server:
        client = client_of(server)
        first = client.responses.create(model="fake", input="Hello!", temperature=0)
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(model="fake", input="And again?", temperature=0, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert first.usage is not None and second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
        items = client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.type for item in items.data] == ["message", "message"] and items.has_more
        assert len(list(client.responses.input_items.list(second.id))) == 3
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="More?", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        third = client.responses.create(model="fake", input="More?", temperature=0, previous_response_id=second.id)
        assert third.usage is not None
        assert third.usage.input_tokens_details.cached_tokens == second.usage.total_tokens - 1
        server.service.responses.check()


@pytest.mark.parametrize("settings", [Settings(), Settings(history_bytes=0)])
def test_the_cached_text_of_a_deleted_response_is_evicted_first(settings: Settings) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": [WEATHER], "instructions": "Be short.", "reasoning": {"effort": "low"}}
    with served(settings, brain=says("Hello, you.")) as server:
        tree, client = server.engine.core.cache.state.tree, client_of(server)
        first = whole(server, asked)
        numbers, ends = [first["id"]], [first["usage"]["total_tokens"]]
        for text in ("And again?", "More?"):
            answer = whole(server, {**asked, "input": text, "previous_response_id": numbers[-1]})
            numbers, ends = [*numbers, answer["id"]], [*ends, answer["usage"]["total_tokens"]]

        def demoted() -> list[tuple[int, int]]:
            server.engine.stats()  # waits for the engine's thread
            return [(node.start, node.end) for node in tree.walk() if node.demoted]

        client.responses.delete(numbers[0])
        assert demoted() == []  # two others continue it
        client.responses.delete(numbers[2])
        assert demoted() == [(ends[1], ends[2] - 1)]  # without the stored text that it continues
        again = whole(server, {**asked, "input": "More?", "previous_response_id": numbers[1]})
        client.responses.delete(numbers[1])
        client.responses.delete(again["id"])
        assert demoted() == [(0, ends[1]), (ends[1], ends[2] - 1)]  # the responses before it were deleted first


def test_instructions_are_not_continued() -> None:
    seen: list[list[int]] = []
    say = says("Hello, you.")

    def brain(tokens: list[int]) -> int:
        seen.append(tokens)
        return say(tokens)

    with served(brain=brain) as server:
        first = whole(server, {**ASKED, "instructions": "Be short."})
        second = whole(server, {**ASKED, "previous_response_id": first["id"], "instructions": "Be long."})
        text = server.engine.model.tokenizer.decode(seen[-1])
        assert "Be long." in text and "Be short." not in text
        assert (first["instructions"], second["instructions"]) == ("Be short.", "Be long.")


def test_a_streamed_response_is_stored_before_its_last_event_and_only_if_wanted() -> None:
    with served(brain=says("Hello, you.")) as server:
        last = stream(server, ASKED)[-1]["response"]
        assert server.client.get(f"{PATH}/{last['id']}").json() == last
        unstored = stream(server, {**ASKED, "store": False})[-1]["response"]
        assert server.client.get(f"{PATH}/{unstored['id']}").status_code == 404


def test_responses_and_hits_stay_with_their_tenant_and_namespace() -> None:
    with served(Settings(api_keys=KEYS), brain=says("Hello, you.")) as server:
        own = whole(server, ASKED, headers=bearer("ada"))
        part = whole(server, ASKED, headers=bearer("ada", **{NAMESPACE_HEADER: "part"}))
        assert part["usage"]["input_tokens_details"]["cached_tokens"] == 0
        paths = [f"{PATH}/{own['id']}", f"{PATH}/{own['id']}/input_items"]
        for headers in (bearer("bob"), bearer("ada", **{NAMESPACE_HEADER: "part"})):
            assert {server.client.get(path, headers=headers).status_code for path in paths} == {404}
            assert server.client.delete(paths[0], headers=headers).status_code == 404
            assert server.client.post(f"{paths[0]}/cancel", headers=headers).status_code == 404
            answer = server.post(PATH, {**ASKED, "previous_response_id": own["id"]}, headers=headers)
            assert answer.json()["error"]["code"] == "previous_response_not_found"
        assert whole(server, ASKED, headers=bearer("bob"))["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert server.client.get(paths[0]).status_code == 401
        assert server.client.get(paths[0], headers=bearer("ada")).json() == own


def test_a_call_that_is_open_when_its_response_is_cancelled_is_incomplete() -> None:
    request: Any = SimpleNamespace(echo={}, names={}, summary=False)
    events = ResponseEvents("fake", request)
    events.push(Piece(call=CallDelta(0, "c", "now", '{"a": ', opens=True)))
    events.finish("cancelled", None)
    assert [(item["status"], item["arguments"]) for item in events.output] == [("incomplete", '{"a": ')]


def test_a_running_response_can_be_cancelled_and_read() -> None:
    gate = threading.Semaphore(0)
    with hosted(brain=says("Hello, " * 100)) as server:
        server.runner.gate = gate
        gate.release(4)
        body = {**ASKED, "stream": True}
        with httpx.stream("POST", server.url + PATH, json=body, timeout=30) as answer:
            parts = answer.iter_text()
            text = next(parts)
            while "output_text.delta" not in text:
                text += next(parts)
            number = text.split('"id":"')[1].split('"')[0]
            running = httpx.get(f"{server.url}{PATH}/{number}", timeout=30).json()
            assert (running["id"], running["status"]) == (number, "in_progress")
            cancelled = httpx.post(f"{server.url}{PATH}/{number}/cancel", timeout=30).json()
            assert (cancelled["id"], cancelled["status"]) == (number, "cancelled")
            gate.release(100_000)
            last = checked(text + "".join(parts))[-1]
        assert last["type"] == "response.incomplete"
        assert (last["response"]["status"], last["response"]["output"][0]["status"]) == ("cancelled", "incomplete")
        stored = httpx.get(f"{server.url}{PATH}/{number}", timeout=30).json()
        assert stored == last["response"]
        assert httpx.post(f"{server.url}{PATH}/{number}/cancel", timeout=30).json() == stored
        assert httpx.post(f"{server.url}{PATH}/resp_none/cancel", timeout=30).status_code == 404
        assert not server.service.responses.running


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_of_input_items(order: str) -> None:
    with served(brain=says("Hello, you.")) as server:
        items = [{"role": "user", "content": f"{number}", "id": f"msg_{number}"} for number in range(5)]
        number = whole(server, {**ASKED, "input": items})["id"]
        found: list[Any] = []
        after: dict[str, str] = {}
        while True:
            page = server.client.get(
                f"{PATH}/{number}/input_items", params={"limit": 2, "order": order, **after}
            ).json()
            found += [item["content"][0]["text"] for item in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert found == sorted("01234", reverse=order == "desc")
        for wrong in (
            {"limit": "0"},
            {"limit": "101"},
            {"limit": "0100999"},
            {"limit": "x"},
            {"order": "up"},
            {"after": "msg_9"},
        ):
            assert server.client.get(f"{PATH}/{number}/input_items", params=wrong).status_code == 400


# ---- the store alone


def response(number: int, before: tuple[Items, ...] = (), text: str = "a" * 1000) -> StoredResponse:
    output = [{"type": "message", "text": text}]
    parts = (*before, Items([{"role": "user", "content": text + str(number)}]), Items(output))
    return StoredResponse({"id": f"resp_{number}", "output": output}, parts)


def test_the_least_recently_used_response_is_evicted() -> None:
    store = ResponseStore(30_000)
    for number in range(20):
        store.add("ada", "own", response(number))
        store.check()
        assert store.get("ada", "own", "resp_0") is not None  # in use, so it stays
    kept = [number for number in range(20) if store.get("ada", "own", f"resp_{number}")]
    assert kept[0] == 0 and kept[-1] == 19 and 3 < len(kept) < 12
    assert kept[1:] == list(range(kept[1], 20))
    store.add("bob", "other", response(1))  # another tenant's limit
    assert [number for number in range(20) if store.get("ada", "own", f"resp_{number}")] == kept


def test_a_conversation_counts_once_and_outlives_its_first_responses() -> None:
    store = ResponseStore(1 << 20)
    before: tuple[Items, ...] = ()
    sizes = []
    for number in range(30):
        each = response(number, before)
        store.add(None, None, each)
        store.check()
        sizes.append(store.size(None))
        before = each.conversation
    assert sizes[-1] - sizes[-2] < 1.5 * sizes[0]
    for number in range(29):
        assert store.delete(None, None, f"resp_{number}")
        assert not store.delete(None, None, f"resp_{number}")
        store.check()
    last = store.get(None, None, "resp_29")
    assert last is not None and len(last.items) == 60 and len(last.input_items) == 59
    assert store.delete(None, None, "resp_29")
    assert store.size(None) == 0


def test_without_capacity_and_beyond_it_nothing_is_stored() -> None:
    nothing, little = ResponseStore(0), ResponseStore(3000)
    nothing.add(None, None, response(1))
    little.add(None, None, response(1))
    little.add(None, None, response(2, text="a" * 5000))
    assert nothing.get(None, None, "resp_1") is None
    assert little.get(None, None, "resp_2") is None
    little.check()
