"""Beam searches over HTTP: `use_beam_search` with `n`, as vLLM spells them, and the beams of the engine itself."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import SamplingParams
from radixkv.serve import Settings
from tests.serve.served import ASKED, CHAT, Served, served, texts

PROMPT = "Once upon a time"
PLAIN: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 6}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}


def found(server: Served, prompt: Any = PROMPT, **params: Any) -> list[Any]:
    """Return the engine's own beams, best first, computed in another namespace."""
    params = {"max_tokens": 6, "beam_width": 3, **params}
    best = server.engine.generate([prompt], SamplingParams(**params), namespace="own")[0]
    return [best, *best.alternatives]


def test_a_chat_returns_its_beams_and_remembers_all_of_them():
    with served() as server:
        answer = server.chat(**BEAMS, max_tokens=6, logprobs=True, top_logprobs=2)
        streamed = server.events("/v1/chat/completions", {**CHAT, **BEAMS, "max_tokens": 6})
        choices = answer["choices"]
        messages = [*ASKED, choices[2]["message"], *ASKED]
        again = server.chat(messages=messages, max_tokens=1)
    scores = [choice["score"] for choice in choices]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert texts(streamed) == {choice["index"]: choice["message"]["content"] for choice in choices}
    for choice in choices:
        entries = choice["logprobs"]["content"]
        assert sum(entry["logprob"] for entry in entries) / len(entries) == pytest.approx(choice["score"], abs=1e-4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]


def test_best_of_beams_return_the_best_n():
    with served() as server:
        own = found(server, beam_width=4)
        body = {**PLAIN, "use_beam_search": True, "n": 2, "best_of": 4, "prompt": [PROMPT, "Hello"]}
        answer = server.post("/v1/completions", body).json()
        streamed = server.events("/v1/completions", body)
        hello = found(server, "Hello", beam_width=4)
        single = server.post("/v1/completions", {**body, "prompt": PROMPT, "n": 1}).json()
    kept = [*own[:2], *hello[:2]]
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (index, beam.text) for index, beam in enumerate(kept)
    ]
    assert texts(streamed) == {index: beam.text for index, beam in enumerate(kept)}
    assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in (*own, *hello))
    assert [each["text"] for each in single["choices"]] == [own[0].text]


def test_what_beams_cannot_have_is_refused_by_name():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    chat, text = "/v1/chat/completions", "/v1/completions"
    with served() as server:
        for path, change, param in [
            (chat, {"response_format": {"type": "json_object"}}, "use_beam_search"),
            (chat, {"tools": [tool], "tool_choice": "required"}, "use_beam_search"),
            (chat, {"tools": [strict]}, "use_beam_search"),
            (text, {"guided_choice": ["a", "b"]}, "use_beam_search"),
            (text, {"n": 1, "best_of": 3, "guided_choice": ["a", "b"]}, "best_of"),
            (text, {"n": 3, "best_of": 2}, "best_of"),
            (text, {"prompt": ["x"] * 1000, "n": 1, "best_of": 2}, "n"),
        ]:
            body = CHAT if path == chat else PLAIN
            answer = server.post(path, {**body, **BEAMS, **change})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (change, answer.text)
        for path, body in [("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": ASKED})]:
            answer = server.post(path, {"model": "fake", "max_tokens": 1, **body, "use_beam_search": True})
            assert answer.status_code == 400 and "use_beam_search" in answer.json()["error"]["message"]


def test_parameters_of_beams_have_no_effect_without_a_search():
    with served() as server, served(Settings(strict_fields=True)) as strict:
        for change in ({"length_penalty": 2.0}, {"early_stopping": True}):
            [name] = change
            answer = server.post("/v1/completions", {**PLAIN, **change})
            assert answer.status_code == 200 and answer.headers["warning"] == f'299 radixkv "ignored: {name}"'
            refused = strict.post("/v1/completions", {**PLAIN, **change})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        defaults = {"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}
        assert strict.post("/v1/completions", {**PLAIN, **defaults}).status_code == 200


def test_each_beam_counts_as_a_stream():
    with served(Settings(max_running=2, max_waiting=1)) as server:
        assert server.post("/v1/completions", {**PLAIN, **BEAMS}).status_code == 200
        wide = server.post("/v1/completions", {**PLAIN, **BEAMS, "n": 4})
        best = server.post("/v1/completions", {**PLAIN, **BEAMS, "n": 1, "best_of": 4})
    for answer in (wide, best):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
    with served(max_sequences=2) as server:
        for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
            answer = server.post(path, {**body, **BEAMS})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "n", answer.text
            assert "max_sequences=2" in answer.json()["error"]["message"]
