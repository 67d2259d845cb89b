"""Identical retries of one request cost one prefill: after failures, all at once, and one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.selection import mostly_long
from tests.serve.served import CHAT, Hosted, ask, fake_model, hosted, until

RETRIES = 30
# Less than one prefill chunk: a request that joins before a last short chunk computes that chunk itself.
RULES = "Be brief and kind. " * 40
SAID = [{"role": "user", "content": "Hello!"}]
BODY: dict[str, Any] = {**CHAT, "messages": [{"role": "system", "content": RULES}, *SAID], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODY,
    "/v1/messages": {**CHAT, "system": RULES, "messages": SAID, "max_tokens": 4},
    "/v1/responses": {"model": "fake", "temperature": 0, "instructions": RULES, "input": SAID, "max_output_tokens": 4},
}
each_endpoint = pytest.mark.parametrize("path", mostly_long(BODIES, "/v1/messages"))


def token(_: list[int]) -> int:
    return 300


def computed(host: Hosted) -> int:
    return host.engine.stats().computed_tokens


def send(host: Hosted, path: str) -> dict[str, Any]:
    """Return the usage of one request."""
    reply = httpx.post(host.url + path, json=BODIES[path], timeout=30)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["usage"])


def costs(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return the tokens of prompt, hits and reply, in the form of any of the endpoints."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    if "total_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def check(host: Hosted, usages: list[dict[str, Any]]) -> None:
    """Check that the requests computed one prompt, besides their own tokens."""
    spent = [costs(each) for each in usages]
    (prompt,) = {each[0] for each in spent}
    assert prompt > 250
    outputs = sum(each[2] for each in spent)
    # Each reply computes the last token of the prompt again, and all of its own tokens except the last.
    assert prompt <= computed(host) + 1 <= prompt + outputs
    assert sorted(each[1] for each in spent)[1:] == [prompt - 1] * (RETRIES - 1)


@each_endpoint
def test_retries_all_at_once(path: str) -> None:
    with hosted(brain=token, max_sequences=64) as host, ThreadPoolExecutor(RETRIES) as pool:
        check(host, list(pool.map(lambda _: send(host, path), range(RETRIES))))


@each_endpoint
def test_retries_of_clients_that_leave_in_the_middle_of_a_reply(path: str) -> None:
    body = {**BODIES[path], "stream": True}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 1000
    with hosted(brain=token, model=fake_model(max_length=2000)) as host:
        for _ in range(RETRIES):
            before = host.engine.stats().output_tokens
            with httpx.stream("POST", host.url + path, json=body, timeout=30) as stream:
                parts = stream.iter_raw()  # kept: an iterator that is dropped closes the connection
                next(parts)
                until(lambda before=before: host.engine.stats().output_tokens > before)  # type: ignore[misc]
            until(lambda: host.service.gate.limiter.streams == 0)
        stats = host.engine.stats()
        prompt = stats.prompt_tokens // RETRIES
        assert stats.prompt_tokens == RETRIES * prompt and prompt > 250
        assert stats.cached_tokens >= (RETRIES - 1) * (prompt - 1)


def test_an_abandoned_prefill_is_not_computed_twice() -> None:
    """The chunks that were computed for a client that left stay cached for its retry."""
    with hosted(brain=token, prefill_chunk=64) as host:
        host.runner.gate = threading.Semaphore(0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{host.url}/v1/chat/completions", json=BODY, timeout=0.5)
        host.runner.gate.release(2)
        until(lambda: host.service.gate.limiter.streams == 0)
        host.runner.gate.release(1000)
        usage = ask(host, BODY).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
        assert computed(host) == usage["prompt_tokens"] + usage["completion_tokens"] - 1
