"""Clients that send the whole conversation with each request, as Codex does: the cache has all but the new text."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.serve.openai_responses.items import messages_of, stored_items
from radixkv.serve.role_order import RoleOrder
from tests.chat.tool_call_dialects import DIALECTS
from tests.serve.openai_responses.served_responses import ASKED, WEATHER, answering, stream, whole
from tests.serve.served import says, served

FILLER = "Rules of this project: keep functions short, name things well, test each change. "


def developer(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def session(thread: str, *asked: str) -> dict[str, Any]:
    """Return a request of the shape that a coding agent sends, with filler for its instructions."""
    inner = {**WEATHER, "name": "read"}
    return {
        "model": "fake",
        "temperature": 0,
        "tools": [
            WEATHER,
            {"type": "namespace", "name": "files", "description": "", "tools": [inner]},
            {"type": "web_search"},
        ],
        "input": [developer(FILLER * 4), developer(FILLER), user(f"in {FILLER}"), *map(user, asked)],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": thread,
        "parallel_tool_calls": True,
        "client_metadata": {"thread": thread},
    }


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("streams", [False, True])
def test_each_turn_hits_the_previous_prompt_and_reply(streams: bool) -> None:
    calls = [("weather", {"city": "Oslo", "days": [1, {"é": None}]}), ("files__read", {"city": "Rome"})]

    def reply(prompt: str) -> str:
        return (
            "It is grey." if "grey" in prompt.rsplit("look", 1)[-1] else "Let me see. " + DIALECTS["Qwen"].write(calls)
        )

    with answering(reply) as server:
        body = session("thread-1", "look")
        before = 0
        for turn in range(4):
            response = stream(server, body)[-1]["response"] if streams else whole(server, body)
            assert cached(response) == max(before - 1, 0)
            before = response["usage"]["total_tokens"]
            for item in response["output"]:
                sent = {name: value for name, value in item.items() if name not in ("id", "status")}
                body["input"].append(sent)
            found = [item for item in response["output"] if item["type"] == "function_call"]
            assert [(call.get("namespace"), call["name"]) for call in found] == (
                [(None, "weather"), ("files", "read")] if turn % 2 == 0 else []
            )
            body["input"] += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "grey"}
                for call in reversed(found)
            ] or [user("look")]


def test_texts_and_parts_ids_and_status_are_one_conversation() -> None:
    with served(brain=says("Hello, you.")) as server:
        first = whole(server, ASKED)
        said = first["output"][0]
        spellings: list[Any] = [
            said,
            {"role": "assistant", "content": "Hello, you."},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello, you."}]},
        ]
        for spelling in spellings:
            items = [{"role": "user", "content": "Hello!"}, spelling, user("Again?")]
            assert cached(whole(server, {**ASKED, "input": items})) >= first["usage"]["total_tokens"] - 1


def messages(*items: dict[str, Any], **order: bool) -> list[Any]:
    return messages_of("Be kind.", stored_items(items), RoleOrder(**order))


def test_system_and_developer_messages_before_the_first_reply_open_the_prompt() -> None:
    said = {"role": "assistant", "content": "Yes."}
    late = (
        developer("Be short."),
        user("Hi."),
        {"role": "system", "content": "Be quick."},
        said,
        developer("Be long."),
    )
    opening = {"role": "system", "content": "Be kind.\n\nBe short.\n\nBe quick."}
    begun = [opening, {"role": "user", "content": "Hi."}, said]
    assert messages(*late) == [*begun, {"role": "system", "content": "Be long."}]
    as_text = messages(*late, user("Go on."), late_system=False)
    assert as_text == [*begun, {"role": "user", "content": "Be long.\nGo on."}]


def test_items_of_one_reply_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    before, after = {"role": "assistant", "content": "I look. "}, {"role": "assistant", "content": "Now."}
    skipped = {"type": "web_search_call", "id": "ws_1"}
    _, asked, *rest = messages(user("a"), user("b"), thought, before, skipped, call, after)
    assert asked == {"role": "user", "content": "a\nb"}
    reply = {"role": "assistant", "content": "I look. Now.", "reasoning_content": "Hm.", "tool_calls": [called]}
    assert rest == [reply]
    two = messages(user("a"), before, after)
    assert [each["content"] for each in two[2:]] == ["I look. ", "Now."]
    results = [{"type": "function_call_output", "call_id": number, "output": number} for number in ("c2", "c1")]
    *_, first, second = messages(user("a"), call, {**call, "call_id": "c2"}, *results)
    assert (first["tool_call_id"], second["tool_call_id"]) == ("c1", "c2")
