"""`assert_cached` with responses of both SDKs from a real server, and with dicts of other servers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv_traces import assert_cached
from tests.serve.served import Hosted, hosted, says

ASKED: Any = [{"role": "user", "content": "Who is there, and why? " * 8}]


def openai_client(host: Hosted) -> Any:
    return openai.OpenAI(base_url=f"{host.url}/v1", api_key="-")


def test_responses_of_an_sdk() -> None:
    with hosted(Settings(port=0), brain=says("Me.")) as host:
        create = openai_client(host).chat.completions.create
        with pytest.raises(AssertionError, match=r"^0 of [0-9]+ prompt tokens \(0.0%\) were cached, and at least 90"):
            assert_cached(create(model="fake", messages=ASKED))
        again = create(model="fake", messages=ASKED)
    assert_cached(again)
    assert_cached(again.model_dump(), at_least=0.9)


def test_the_error_names_the_changed_part() -> None:
    with hosted(Settings(port=0), brain=says("Me.")) as host:
        for second in (1, 2):
            said = [{"role": "system", "content": f"It is 12:00:0{second}. Be kind."}, *ASKED]
            raw = openai_client(host).chat.completions.with_raw_response.create(model="fake", messages=said)
        with pytest.raises(AssertionError, match=r"the first part that changed is system$"):
            assert_cached(raw)


def openai_usage(cached: Any, prompt: Any = 200) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


def anthropic_usage(new: Any, written: Any, read: Any) -> dict[str, Any]:
    return {"input_tokens": new, "cache_creation_input_tokens": written, "cache_read_input_tokens": read}


SHARES: list[tuple[dict[str, Any], float]] = [
    (openai_usage(150), 0.75),
    ({"input_tokens": 200, "input_tokens_details": {"cached_tokens": 150}}, 0.75),
    (anthropic_usage(20, 30, 150), 0.75),
    (anthropic_usage(50, None, 150), 0.75),
    (openai_usage(50) | {"cache_read_input_tokens": 50}, 0.25),  # LiteLLM has both
    (openai_usage(7, 100), 0.07),  # 0.07 * 100 > 7
    (openai_usage(200), 1),
    (openai_usage(0), 0),
]


@pytest.mark.parametrize(("usage", "share"), SHARES)
def test_the_share_is_the_bar(usage: dict[str, Any], share: float) -> None:
    assert_cached({"usage": usage}, at_least=share)
    if share < 1:
        with pytest.raises(AssertionError):
            assert_cached({"usage": usage}, at_least=share + 0.001)


SILENT: list[Any] = [
    {"prompt_tokens": 200},
    *({"prompt_tokens": 200, "prompt_tokens_details": details} for details in (None, {})),
    *(openai_usage(cached) for cached in (None, True, 150.0, "150", 201, -1)),
    *(openai_usage(0, prompt) for prompt in (0, None)),
    *[anthropic_usage(200, 0, None), anthropic_usage(None, 0, 150), None, "a text"],
]


@pytest.mark.parametrize("response", [*({"usage": each} for each in SILENT), {}, "a text", None])
def test_a_server_that_reports_nothing_never_passes(response: Any) -> None:
    with pytest.raises(InvalidInput, match="report"):
        assert_cached(response, at_least=0)


@pytest.mark.parametrize("at_least", [-0.1, 1.1, float("nan"), float("inf"), True, "0.9", None])
def test_a_bar_is_a_share(at_least: Any) -> None:
    with pytest.raises(InvalidInput, match="at_least must be a number from 0 to 1"):
        assert_cached({"usage": openai_usage(200)}, at_least=at_least)
