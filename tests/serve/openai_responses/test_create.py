"""Responses, whole and as events: each field and event is one of the official client's types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.serve import Settings
from tests.chat.test_live_styles import Scripted
from tests.chat.test_traced_replies import OWN, OWN_TAGS, tokenizer_of
from tests.chat.tool_call_dialects import DIALECTS
from tests.serve.openai_responses.served_responses import (
    ASKED,
    PATH,
    WEATHER,
    answering,
    client_of,
    kinds,
    plain,
    stream,
    whole,
)
from tests.serve.served import fake_model, says, served

CALLS = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
TEXT_EVENTS = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "completed",
]


def test_a_text_whole_and_as_events() -> None:
    with served(brain=says("Hello, you.")) as server:
        response = whole(server, ASKED)
        events = stream(server, ASKED)
    (message,) = response["output"]
    assert (message["type"], message["role"], message["content"][0]["text"]) == ("message", "assistant", "Hello, you.")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert kinds(events) == TEXT_EVENTS
    assert sum(event["type"] == "response.output_text.delta" for event in events) > 1
    last = events[-1]["response"]
    assert plain(last) == plain({**response, "usage": last["usage"]})
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == response["usage"]["input_tokens"] - 1
    used = response["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": used["input_tokens"]}


def test_a_limit_makes_a_response_incomplete() -> None:
    body = {**ASKED, "max_output_tokens": 2}
    with served(brain=says("Hello, you are here.")) as server:
        response, events = whole(server, body), stream(server, body)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 2
    assert kinds(events)[-1] == "incomplete"


def test_calls_whole_and_as_events() -> None:
    body = {**ASKED, "tools": [WEATHER]}
    with answering(lambda _: DIALECTS["Qwen"].write(CALLS)) as server:
        response, events = whole(server, body), stream(server, body)
    for output in (response["output"], events[-1]["response"]["output"]):
        calls = [item for item in output if item["type"] == "function_call"]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert response["tools"] == [WEATHER]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events)[-9:] == [*call, *call, "completed"]


@pytest.mark.parametrize(("summary", "part"), [(None, "content"), ("auto", "summary")])
def test_reasoning_whole_and_as_events_and_sent_back(summary: str | None, part: str) -> None:
    tokenizer = tokenizer_of(OWN_TAGS, *OWN)
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=stops)
    reply = tokenizer.encode("<|muse>deep\nHm, so.\n<muse|>Hello, you.<|im_end|>", add_special_tokens=False)
    body = {**ASKED, "reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    with served(model=model, brain=Scripted([reply] * 3)) as server:
        response, events = whole(server, body), stream(server, body)
        thought, said = response["output"]
        assert [each["text"] for each in thought[part]] == ["Hm, so."]
        assert said["content"][0]["text"] == "Hello, you."
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert plain(events[-1]["response"])["output"] == plain(response)["output"]
        middle = "reasoning_text" if part == "content" else "reasoning_summary_text"
        assert f"{middle}.delta" in kinds(events)
        only_sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
        follow = [{"role": "user", "content": "Hello!"}, only_sealed, said, {"role": "user", "content": "And?"}]
        used = whole(server, {**body, "input": follow})["usage"]
        assert used["input_tokens_details"]["cached_tokens"] > 0


def test_an_error_in_the_middle_of_a_stream_fails_the_response() -> None:
    def fault(inputs: Any) -> None:
        if any(each.start > 20 for each in inputs):
            raise RuntimeError("a broken step")

    with served(brain=says("Hello, " * 40), fault=fault) as server:
        events = stream(server, ASKED)
    *_, error, last = events
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert last["response"]["error"]["code"] == "server_error"


def test_a_prompt_that_is_too_long() -> None:
    body = {**ASKED, "input": "Hello there! " * 3000}
    with served() as server:
        answer = server.post(PATH, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert error["message"].startswith("Your input exceeds the context window of this model")
        events = stream(server, body)
        assert kinds(events) == ["created", "in_progress", "error", "failed"]
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
        assert events[-2]["code"] == "context_length_exceeded"


def test_other_fields_items_and_tools_are_ignored_with_a_warning() -> None:
    body = {
        **ASKED,
        "tools": [{"type": "file_search"}, WEATHER, {"type": "web_search"}],
        "input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "Hi"}],
        "context_management": [],
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "client_metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "truncation": "auto",
        "background": True,
        "text": {"verbosity": "low", "format": {"type": "text"}},
    }
    with answering(lambda _: "Hello, you.") as server:
        answer = server.post(PATH, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["tools"] == [WEATHER]
        for name in ("tools[0].type", "input[0].type", "include", "background", "truncation", "text.verbosity"):
            assert name in answer.headers["warning"]
    with answering(lambda _: "Hello, you.", Settings(strict_fields=True)) as server:
        assert server.post(PATH, body).status_code == 400


def test_the_web_search_of_codex_is_left_out_without_a_warning() -> None:
    for strict in (False, True):
        with answering(lambda _: "Hello, you.", Settings(strict_fields=strict)) as server:
            answer = server.post(PATH, {**ASKED, "tools": [WEATHER, {"type": "web_search", "filters": {}}]})
            assert answer.status_code == 200 and "warning" not in answer.headers
            assert answer.json()["tools"] == [WEATHER]


def test_log_probabilities_of_the_text_whole_and_as_events() -> None:
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with served(brain=says("<think>\nhm\n</think>\n\nHello, you.")) as server:
        whole = server.post(PATH, asked).json()["output"][1]["content"][0]
        found = stream(server, asked)
        plain = server.post(PATH, ASKED).json()["output"][1]["content"][0]
    deltas = [each for event in found if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    [done] = [event["logprobs"] for event in found if event["type"] == "response.output_text.done"]
    assert [each["logprob"] for each in done] == [each["logprob"] for each in whole["logprobs"]]
    assert whole["logprobs"] == found[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert deltas == done[: len(deltas)] and plain["logprobs"] == []
    assert "".join(each["token"] for each in done) == "Hello, you.<|im_end|>"
    assert all(len(each["top_logprobs"]) == 2 and each["logprob"] <= 0 for each in done)


def test_the_length_of_a_prompt_is_counted_and_other_endpoints_are_404() -> None:
    with served(brain=says("Hello, you.")) as server:
        client = client_of(server)
        first = client.responses.create(model="fake", input="Hello!", instructions="Be kind.")
        more = {"model": "fake", "input": "And now?", "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(**more)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == client.responses.create(**more).usage.input_tokens
        long = client.responses.input_tokens.count(model="fake", input="word " * 5000)
        assert long.input_tokens > 5000
        answers = [server.post(f"{PATH}/{name}", ASKED) for name in ("compact", first.id)]
        assert [each.status_code for each in answers] == [404, 405]
