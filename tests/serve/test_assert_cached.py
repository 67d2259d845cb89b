"""`assert_cached` with responses of both SDKs from a real server, and with dicts of other servers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv_traces import assert_cached
from tests.serve.served import Hosted, hosted, says

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("anthropic.types")

WHO = {"name": "who", "description": "Say who is there. " * 8, "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": WHO}]
ASKED: Any = [{"role": "user", "content": "Who is there, and why? " * 8}]


def chat(host: Hosted, **fields: Any) -> Any:
    return openai.OpenAI(base_url=f"{host.url}/v1", api_key="-").chat.completions.create(
        model="fake", messages=ASKED, **fields
    )


def responses(host: Hosted) -> Any:
    client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="-")
    return client.responses.create(model="fake", input=ASKED[0]["content"])


def messages(host: Hosted) -> Any:
    client = anthropic.Anthropic(base_url=host.url, api_key="-")
    return client.messages.create(model="fake", max_tokens=32, messages=ASKED)


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_responses_of_the_sdks(ask: Any) -> None:
    with hosted(Settings(port=0), brain=says("Me.")) as host:
        with pytest.raises(AssertionError, match=r"^0 of [0-9]+ prompt tokens \(0.0%\) were cached, and at least 90"):
            assert_cached(ask(host))
        again = ask(host)
    assert_cached(again)
    assert_cached(again.model_dump(), at_least=0.9)


USAGES: dict[str, tuple[dict[str, Any], float]] = {
    "chat completions": ({"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 150}}, 0.75),
    "responses": ({"input_tokens": 200, "input_tokens_details": {"cached_tokens": 150}}, 0.75),
    "messages": (
        {"input_tokens": 20, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 150},
        0.75,
    ),
    "messages without writes": (
        {"input_tokens": 50, "cache_creation_input_tokens": None, "cache_read_input_tokens": 150},
        0.75,
    ),
    "both forms at once": (
        {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 50}, "cache_read_input_tokens": 50},
        0.25,
    ),
    "all": ({"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 200}}, 1),
    "none": ({"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 0}}, 0),
}


@pytest.mark.parametrize("name", USAGES)
def test_the_share_is_the_bar(name: str) -> None:
    usage, share = USAGES[name]
    assert_cached({"usage": usage}, at_least=share)
    if share < 1:
        with pytest.raises(AssertionError):
            assert_cached({"usage": usage}, at_least=share + 0.001)


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"usage": None},
        {"usage": {"prompt_tokens": 200}},
        {"usage": {"prompt_tokens": 200, "prompt_tokens_details": None}},
        {"usage": {"prompt_tokens": 200, "prompt_tokens_details": {}}},
        {"usage": {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": None}}},
        {"usage": {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": True}}},
        {"usage": {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 201}}},
        {"usage": {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}},
        {"usage": {"input_tokens": 200, "cache_read_input_tokens": None}},
        {"usage": {"input_tokens": 200, "cache_creation_input_tokens": 0}},
        {"usage": {"cache_read_input_tokens": 150}},
        "a text",
        None,
    ],
)
def test_a_server_that_reports_nothing_never_passes(response: Any) -> None:
    with pytest.raises(InvalidInput, match="report"):
        assert_cached(response, at_least=0)


@pytest.mark.parametrize("at_least", [-0.1, 1.1, float("nan"), float("inf"), True, "0.9", None])
def test_a_bar_is_a_share(at_least: Any) -> None:
    with pytest.raises(InvalidInput, match="at_least must be a number from 0 to 1"):
        assert_cached({"usage": USAGES["all"][0]}, at_least=at_least)
