"""The vendors' SDKs through the frontend, and what a reply costs and hits there."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from radixkv import Engine, SamplingParams
from tests.fleet.processes import Fleet, fleet, low_port, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.py"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"place": {"enum": ["A", "B"]}}}},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("fleet")
    with fleet(folder, 1, "--dyn-tool-call-parser", "hermes") as made:
        yield made


@pytest.fixture
def client(one: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)


def test_openais_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 20}
    whole = client.chat.completions.create(**asked, temperature=0)
    parts = [
        part.choices[0].delta.content or ""
        for part in client.chat.completions.create(**asked, temperature=0, stream=True)
        if part.choices
    ]
    assert "".join(parts) == whole.choices[0].message.content
    assert "Radix" in "".join(parts)


def test_openais_completions_take_texts_and_token_ids(client: openai.OpenAI) -> None:
    for prompt in ("Once", [5, 6, 7]):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, logprobs=2)
        assert found.usage is not None
        assert found.usage.completion_tokens == 4


def test_all_replies_to_a_prompt_are_whole(client: openai.OpenAI) -> None:
    """Dynamo takes nothing after the first `finish_reason`, which the other replies must outlive."""
    ids = list(range(5, 25))
    params = SamplingParams(n=3, seed=1, temperature=2.0, max_tokens=40)
    with Engine.load("tiny") as engine:
        whole = engine.generate([ids], params)[0]
    replies = (whole, *whole.alternatives)
    assert len({len(each.token_ids) for each in replies}) > 1
    found = client.completions.create(model="tiny", prompt=ids, max_tokens=40, temperature=2.0, seed=1, n=3)
    assert {each.index: each.text for each in found.choices} == {each.index: each.text for each in replies}
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(each.usage.output_tokens for each in replies)


def test_openais_responses(client: openai.OpenAI) -> None:
    assert "Radix" in client.responses.create(model="tiny", input="Who are you?", temperature=0).output_text


def test_a_schema_and_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    schema = {
        "name": "s",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    form: Any = {"type": "json_schema", "json_schema": schema}
    messages: Any = [{"role": "user", "content": "Where?"}]
    found = client.chat.completions.create(model="tiny", messages=messages, response_format=form, max_tokens=40)
    assert found.choices[0].message.content is not None
    assert found.choices[0].message.content.replace(" ", "") in ('{"a":1}', '{"a":2}')
    tools: Any = {"tools": [TOOL], "tool_choice": "required"}
    called = client.chat.completions.create(model="tiny", messages=messages, max_tokens=60, **tools)
    assert called.choices[0].message.tool_calls
    assert called.choices[0].message.tool_calls[0].function.name == "find"  # type: ignore[union-attr]


def test_anthropics_messages_streamed(one: Fleet) -> None:
    client = anthropic.Anthropic(base_url=one.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    cold = {"temperature": 0}
    with client.messages.stream(model="tiny", max_tokens=20, messages=messages, extra_body=cold) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Radix" in text
    assert final.usage.output_tokens > 4


def test_a_salt_separates_and_the_router_sees_what_it_has(one: Fleet) -> None:
    text = "A long story about boats, kites, clocks and shelves. " * 4
    first, again = (one.stream(text, 3, cache_salt="ann") for _ in range(2))
    other = one.stream(text, 3, cache_salt="ben")
    cached = [each.usage["prompt_tokens_details"]["cached_tokens"] for each in (first, again, other)]
    assert cached[0] == cached[2] == 0
    assert cached[1] == again.usage["prompt_tokens"] - 1
    until(lambda: one.stream(text, 3, cache_salt="ann").overlap > 0.8, "the router knows")
    assert one.stream(text, 3, cache_salt="cleo").overlap == 0


def test_the_metrics_of_radixkv_are_among_dynamos(tmp_path: Path) -> None:
    made, port = Fleet(tmp_path), low_port()
    try:
        made.worker(DYN_SYSTEM_PORT=str(port))

        def text() -> str:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
            except httpx.HTTPError:
                return ""

        until(lambda: "radixkv:engine_info" in text() and "dynamo_component" in text(), "both are there")
    finally:
        made.close()


def test_the_example_serves_two_conversations_and_stops_all(tmp_path: Path) -> None:
    made = Fleet(tmp_path)
    try:
        example = made.run("example", str(EXAMPLE), "--port", str(made.port))
        until(lambda: "Ctrl-C stops all" in example.output, "both conversations")
        assert example.output.count("&\n") == 3
        hits = re.findall(r"(\d+) of (\d+) prompt tokens", example.output)
        assert [int(cached) > 100 for cached, _ in hits] == [False, True, False, True]
        assert made.models() == ["tiny"]
        example.signal(signal.SIGINT)
        assert example.ended() == 0
        assert not made.models()
    finally:
        made.close()
