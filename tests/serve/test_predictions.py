"""Drafts as clients see them: predictions, requests without drafts, usage, metrics, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai.types.chat import ChatCompletion
from starlette.testclient import TestClient

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.errors import InvalidInput
from radixkv.serve import create_app
from tests.models.recurrent.hybrids import hybrid
from tests.serve.served import LOCAL

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    engine = Engine.load("tiny", num_blocks=400, monitor=False, speculate="ngram")
    # Rows that cost nothing: on a busy machine the measured ones may make drafts too dear.
    engine.core.speculation._length.costs.__init__(((1, 1.0), (2, 1.001)))
    engine.core.speculation._length._corrects = False
    with engine, TestClient(create_app(AsyncEngine(engine)), LOCAL) as client:
        yield client


def answered(client: TestClient, **fields: object) -> ChatCompletion:
    response = client.post(PATH, json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def test_a_predicted_reply_is_the_same_and_its_tokens_are_counted(client: TestClient) -> None:
    plain = answered(client, speculate=False, ignore_eos=True)
    assert plain.usage and plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content or ""
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        found = answered(client, ignore_eos=True, prediction={"type": "content", "content": content})
        assert found.choices[0].message.content == text and found.usage
        details = found.usage.completion_tokens_details
        assert details and (details.accepted_prediction_tokens or 0) > 10
        assert (details.rejected_prediction_tokens or 0) >= 0
    numbers = client.get("/metrics").text
    assert 'radixkv:accepted_tokens_total{source="prediction"}' in numbers
    assert "radixkv:drafting_steps_total" in numbers


def test_a_stream_has_the_counts_in_its_last_event(client: TestClient) -> None:
    text = answered(client, ignore_eos=True).choices[0].message.content
    asked = {**ASKED, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    events = client.post(PATH, json={**asked, "prediction": {"type": "content", "content": text}}).text
    assert "accepted_prediction_tokens" in events.splitlines()[-4]


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


def test_a_request_without_drafts_ignores_a_prediction_with_a_warning(client: TestClient) -> None:
    asked = {**ASKED, "speculate": False, "prediction": {"type": "content", "content": "Hello"}}
    assert client.post(PATH, json=asked).headers["warning"] == '299 radixkv "ignored: prediction"'


def test_unknown_modes_and_wrong_predictions_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"speculate='trie': allowed are 'ngram', 'tree', None"):
        Engine.load("tiny", speculate="trie")
    with pytest.raises(InvalidInput, match="prediction must be a text"):
        SamplingParams(prediction=7)  # type: ignore[arg-type]


def test_models_that_cannot_verify_are_refused_and_deterministic_engines_draft_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidInput, match="a draft that is rejected cannot be taken out of a recurrent state"):
        Engine.load(hybrid("lfm2"), speculate="tree", monitor=False, num_blocks=20)
    with Engine.load("tiny", deterministic=True, speculate="tree", monitor=False, num_blocks=100) as engine:
        assert engine.core.speculation is None and engine.config.speculate is None
    assert "speculate='tree' is off: deterministic=True" in caplog.text


def test_past_text_is_shared_within_a_namespace_only() -> None:
    """A reply of one namespace is the draft of its retry, and no draft of another namespace."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Engine.load("tiny", speculate="tree", monitor=False, num_blocks=200) as engine:
        (first,) = engine.generate(["Hello"], params, namespace="ann")
        before = engine.stats()
        (theirs,) = engine.generate(["Hello"], params, namespace="ben")
        between = engine.stats()
        (again,) = engine.generate(["Hello"], params, namespace="ann")
        assert first.token_ids == again.token_ids == theirs.token_ids
        after = engine.stats()
        assert between.drafted_from_tree == before.drafted_from_tree == 0
        assert between.drafted_from_past == before.drafted_from_past
        assert after.drafted_from_tree >= after.accepted_from_tree
        engine.clear_cache()
        assert not engine.core.cache.past_text.namespaces()
