"""Drafts as clients see them: predictions, requests without drafts, usage, metrics, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai.types.chat import ChatCompletion
from starlette.testclient import TestClient

from radixkv import AsyncEngine, Engine
from radixkv.errors import InvalidInput
from radixkv.serve import Settings, create_app
from radixkv.serve.schemas import read_chat
from tests.models.recurrent.hybrids import hybrid
from tests.serve.served import LOCAL

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40}
PATH = "/v1/chat/completions"


def drafting(mode: str) -> Engine:
    """An engine whose rows cost nothing: on a busy machine the measured ones may make drafts too dear."""
    engine = Engine.load("tiny", num_blocks=400, monitor=False, speculate=mode)
    engine.core.speculation._length.costs.__init__(((1, 1.0), (2, 1.001)))
    engine.core.speculation._length._corrects = False
    return engine


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    engine = drafting("ngram")
    with engine, TestClient(create_app(AsyncEngine(engine), Settings(vllm_metrics=True)), LOCAL) as client:
        yield client


def answered(client: TestClient, **fields: object) -> ChatCompletion:
    response = client.post(PATH, json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def counter(client: TestClient, name: str, labels: str = "") -> float:
    """Return the value of a counter of /metrics, the only one with this name and these labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name}_total{labels}")]
    assert len(lines) == 1, name
    return float(lines[0].rpartition(" ")[2])


def test_a_predicted_reply_is_the_same_and_its_tokens_are_counted(client: TestClient) -> None:
    plain = answered(client, speculate=False, ignore_eos=True)
    assert plain.usage and plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content or ""
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    before = None
    for content, n in ((text, 1), (parts, 3)):
        found = answered(client, ignore_eos=True, n=n, prediction={"type": "content", "content": content})
        assert found.choices[0].message.content == text and found.usage
        details = found.usage.completion_tokens_details
        assert details and (details.accepted_prediction_tokens or 0) > 10
        drafted, accepted = (
            counter(client, f"radixkv:{kind}_tokens", '{source="prediction"}') for kind in ("drafted", "accepted")
        )
        assert before is None or details.rejected_prediction_tokens == drafted - accepted - before
        before = drafted - accepted
    numbers = client.get("/metrics").text
    assert 'radixkv:accepted_tokens_total{source="prediction"}' in numbers
    assert "radixkv:drafting_steps_total" in numbers
    assert counter(client, "radixkv:drafts") == counter(client, "vllm:spec_decode_num_drafts") > 0
    assert counter(client, "vllm:spec_decode_num_draft_tokens") >= counter(client, "vllm:spec_decode_num_drafts")


def test_the_parts_of_a_prediction_are_one_text() -> None:
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "main"}]
    assert read_chat({**ASKED, "prediction": {"type": "content", "content": parts}}).options.params.prediction == (
        "def main"
    )
    assert read_chat({**ASKED, "prediction": None}).options.params.prediction == ""


@pytest.mark.parametrize(
    ("path", "body", "options"),
    [
        (PATH, {"messages": ASKED["messages"]}, {"max_tokens": 4}),
        ("/v1/completions", {"prompt": "Hello"}, {"max_tokens": 4}),
        ("/v1/responses", {"input": "Hello"}, {"max_output_tokens": 4}),
        ("/v1/messages", {"messages": ASKED["messages"]}, {"max_tokens": 4}),
        ("/api/chat", {"messages": ASKED["messages"], "stream": False}, {"num_predict": 4}),
        ("/api/generate", {"prompt": "Hello", "stream": False}, {"num_predict": 4}),
    ],
)
def test_each_api_can_leave_a_request_without_drafts(
    client: TestClient, path: str, body: dict[str, object], options: dict[str, object]
) -> None:
    def steps(speculate: bool) -> float:
        before, chosen = counter(client, "radixkv:drafting_steps"), {**options, "speculate": speculate}
        asked = {"options": chosen} if path.startswith("/api") else chosen
        response = client.post(path, json={"model": "tiny", **body, **asked})
        assert response.status_code == 200 and "warning" not in response.headers, response.text
        return counter(client, "radixkv:drafting_steps") - before

    assert steps(speculate=True) > 0 == steps(speculate=False)


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ({"type": "content", "content": 3}, "must be a string or an array of text parts"),
        ({"type": "code", "content": "x"}, "content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}, "text"),
        ({"type": "content", "content": "word " * 5000}, "tokens, and prompt and reply together at most"),
        ("x", "object"),
    ],
)
def test_a_prediction_that_is_no_text_or_too_long_is_refused(client: TestClient, prediction: object, said: str) -> None:
    response = client.post(PATH, json={**ASKED, "prediction": prediction})
    assert response.status_code == 400 and said in response.json()["error"]["message"], response.text
    assert response.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(
    "without",
    [{"speculate": False}, {"use_beam_search": True, "n": 2}, {"prompt_logprobs": 1}],
    ids=lambda each: next(iter(each)),
)
def test_a_request_without_drafts_ignores_a_prediction_with_a_warning(
    client: TestClient, without: dict[str, object]
) -> None:
    asked = {**ASKED, **without, "prediction": {"type": "content", "content": "Hello"}}
    response = client.post(PATH, json=asked)
    assert response.headers["warning"] == '299 radixkv "ignored: prediction"'
    assert "completion_tokens_details" not in response.json()["usage"]


def test_models_that_cannot_verify_are_refused_and_deterministic_engines_draft_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidInput, match="a draft that is rejected cannot be taken out of a recurrent state"):
        Engine.load(hybrid("lfm2"), speculate="tree", monitor=False, num_blocks=20)
    with Engine.load("tiny", deterministic=True, speculate="tree", monitor=False, num_blocks=100) as engine:
        assert engine.core.speculation is None and engine.config.speculate is None
    assert "speculate='tree' is off: deterministic=True" in caplog.text
