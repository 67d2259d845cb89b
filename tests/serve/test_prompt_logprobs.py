"""Log probabilities of prompts over HTTP: `echo` with `logprobs`, `prompt_logprobs`, and prompts without a reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from radixkv import SamplingParams
from radixkv.serve import Settings
from tests.engine.fakes import chain, logits_of
from tests.serve.served import ASKED, CHAT, Served, fake_model, served, tokenizer

TEXT = "/v1/completions"
PROMPT = "Once upon a time, in a house by the sea"
SCORED: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "echo": True}
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def rows(ids: Sequence[int]) -> list[np.ndarray]:
    """Return the log probabilities after each token, computed from the fake model's function alone."""
    state, found = 0, []
    for token in ids:
        state = chain(state, int(token))
        logits = logits_of(state, 1536).astype(np.float64)
        found.append(logits - np.log(np.exp(logits).sum()))
    return found


def expected(ids: Sequence[int]) -> list[float]:
    """Return the log probability of each token but the first."""
    return [float(row[token]) for row, token in zip(rows(ids), ids[1:], strict=False)]


def post(server: Served, **change: Any) -> dict[str, Any]:
    answer = server.post(TEXT, {**SCORED, **change})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_an_echo_has_the_log_probabilities_of_the_prompt_and_then_of_the_reply():
    ids = tokenizer().encode(PROMPT)
    with served() as server:
        answer = post(server, logprobs=2)
        reply = post(server, logprobs=2, echo=False)["choices"][0]
        own = server.engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3))[0]
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    whole = [*ids, *own.token_ids]
    assert choice["text"] == PROMPT + own.text
    assert shown["tokens"] == [tokenizer().decode([token]) for token in whole]
    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1:] == pytest.approx(expected(whole), abs=1e-5)
    for field in FIELDS[:3]:
        assert shown[field][len(ids) :] == reply["logprobs"][field]
    assert [place - len(PROMPT) for place in shown["text_offset"][len(ids) :]] == reply["logprobs"]["text_offset"]
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_the_alternatives_include_the_token_itself():
    """lm-evaluation-harness compares a token with the largest of its alternatives."""
    ids = tokenizer().encode(PROMPT)
    with served() as server:
        for count in (0, 1, 5):
            shown = post(server, logprobs=count, max_tokens=1)["choices"][0]["logprobs"]
            for row, token, value, top in zip(
                rows(ids), ids[1:], shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=False
            ):
                best = np.argsort(-row).tolist()
                assert max(top.values()) == value or token != best[0]
                for other in (best[0], token)[count == 0 :]:
                    assert top[tokenizer().decode([other])] == pytest.approx(row[other], abs=1e-5)
                assert {*top} == {tokenizer().decode([each]) for each in (*best[:count], token)}
                assert (max(top.values()) == value) == (count == 0 or token == best[0])


@pytest.mark.parametrize("change", [{}, {"n": 2}, {"max_tokens": 0}, {"use_beam_search": True, "n": 2}])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, [5, 6, 7]]], ids=["one", "two"])
def test_a_stream_has_the_same_log_probabilities(prompt, change):
    with served() as server:
        whole = post(server, prompt=prompt, logprobs=2, **change)
        parts = server.events(TEXT, {**SCORED, "prompt": prompt, "logprobs": 2, **change})
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in parts for choice in event["choices"]):
        each = found.setdefault(choice["index"], {"text": "", "ends": [], **{field: [] for field in FIELDS}})
        each["text"] += choice["text"]
        each["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        for field in FIELDS if choice["logprobs"] else ():
            each[field] += choice["logprobs"][field]
    for choice in whole["choices"]:
        logprobs = {field: choice["logprobs"][field] for field in FIELDS}
        assert found[choice["index"]] == {"text": choice["text"], "ends": [choice["finish_reason"]], **logprobs}
    assert len(found) == len(whole["choices"])


def test_a_prompt_alone_is_scored_without_a_reply():
    ids = tokenizer().encode(PROMPT)
    with served() as server:
        scored = post(server, max_tokens=0, logprobs=1)
        echoed = post(server, max_tokens=0)
        streamed = server.events(TEXT, {**SCORED, "max_tokens": 0})
        bare = post(server, max_tokens=0, echo=False, prompt_logprobs=0)
    [choice] = scored["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected(ids), abs=1e-5)
    assert scored["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "total_tokens": len(ids),
        "prompt_tokens_details": None,
    }
    assert (echoed["choices"][0]["text"], echoed["choices"][0]["logprobs"]) == (PROMPT, None)
    assert [event["choices"][0]["finish_reason"] for event in streamed] == [None, "length"]
    assert bare["choices"][0]["text"] == "" and len(bare["choices"][0]["prompt_logprobs"]) == len(ids)


def test_prompt_logprobs_have_vllms_shape():
    with served() as server:
        ids = server.post("/tokenize", {"messages": ASKED}).json()["tokens"]
        chat = server.chat(max_tokens=1, prompt_logprobs=2, n=2)
        text = post(server, prompt=ids, prompt_logprobs=2, logprobs=5, max_tokens=1)
        none = server.chat(max_tokens=1)
    found = chat["prompt_logprobs"]
    assert text["choices"][0]["prompt_logprobs"] == found and "prompt_logprobs" not in none
    assert "prompt_logprobs" not in chat["choices"][0] and len(text["choices"][0]["logprobs"]["top_logprobs"][1]) >= 5
    assert found[0] is None and len(found) == len(ids)
    for row, token, entries in zip(rows(ids), ids[1:], found[1:], strict=False):
        order = np.argsort(-row).tolist()
        assert {*entries} == {str(token), *map(str, order[:2])}
        for each, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(each)], abs=1e-5)
            assert entry["rank"] == order.index(int(each)) + 1
            assert entry["decoded_token"] == tokenizer().decode([int(each)])


def test_scores_that_cannot_be_returned_are_refused_by_name():
    with served() as server:
        for path, change, param in [
            (TEXT, {"max_tokens": 0, "echo": False}, "max_tokens"),
            (TEXT, {"max_tokens": 0, "n": 2}, "n"),
            (TEXT, {"max_tokens": 0, "n": 2, "use_beam_search": True}, "n"),
            (TEXT, {"max_tokens": -1}, "max_tokens"),
            (TEXT, {"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
            (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs"),
            (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
            (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ]:
            answer = server.post(path, {**(SCORED if path == TEXT else CHAT), **change})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (change, answer.text)


def test_a_response_has_a_bounded_number_of_scores():
    prompts = [[7] * 1000] * 16
    with served(Settings(max_running=2048)) as server:
        for change, param in [
            ({"logprobs": 20, "n": 13}, "logprobs"),
            ({"logprobs": 0, "prompt_logprobs": 11, "n": 21}, "logprobs"),
            ({"prompt_logprobs": 20, "n": 13, "echo": False}, "prompt_logprobs"),
        ]:
            answer = server.post(TEXT, {**SCORED, "prompt": prompts, **change})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
            assert " at most 4194304 are returned" in answer.json()["error"]["message"]


def test_long_arrays_are_encoded_as_short_ones_are():
    prompt = [5 + place % 1000 for place in range(200)]
    with served() as server:
        answer = server.post(TEXT, {**SCORED, "prompt": prompt, "logprobs": 1, "prompt_logprobs": 1})
        stream = server.post(TEXT, {**SCORED, "prompt": prompt, "logprobs": 1, "stream": True}).text
    shown = answer.json()["choices"][0]
    assert len(shown["prompt_logprobs"]) == 200 and len(shown["logprobs"]["tokens"]) == 203
    assert answer.text == json.dumps(answer.json(), ensure_ascii=False, separators=(",", ":"))
    for line in stream.splitlines()[:-2:2]:
        event = json.loads(line.removeprefix("data: "))
        assert line == "data: " + json.dumps(event, separators=(",", ":"))


def test_a_prompt_that_fills_the_context_can_be_scored_but_a_longer_one_cannot():
    with served(model=fake_model(max_length=40)) as server:
        full = post(server, prompt=[7] * 40, max_tokens=0, logprobs=0)
        longer = server.post(TEXT, {**SCORED, "prompt": [7] * 41, "max_tokens": 0, "logprobs": 0})
        reply = server.post(TEXT, {**SCORED, "prompt": [7] * 40, "max_tokens": 1, "logprobs": 0})
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 40
    for answer in (longer, reply):
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
