"""Identical retries of one request cost one prefill: after failures, all at once, and one after the other."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.served import CHAT, Hosted, ask, fake_model, hosted, until

RETRIES = 30
BODY: dict[str, Any] = {
    **CHAT,
    "messages": [{"role": "system", "content": "Be brief and kind. " * 50}, {"role": "user", "content": "Hello!"}],
    "max_tokens": 4,
}


def token(_: list[int]) -> int:
    return 300


def computed(host: Hosted) -> int:
    return host.engine.stats().computed_tokens


def check(host: Hosted, replies: list[httpx.Response], before: int) -> None:
    """Check that `replies` computed one prompt beyond `before` tokens, besides their own tokens."""
    spent = [reply.json()["usage"] for reply in replies]
    (prompt,) = {each["prompt_tokens"] for each in spent}
    assert prompt > 250
    outputs = sum(each["completion_tokens"] for each in spent)
    # Each reply computes the last token of the prompt again, and all of its own tokens except the last.
    assert prompt <= computed(host) - before + 1 <= prompt + outputs
    assert sorted(each["prompt_tokens_details"]["cached_tokens"] for each in spent)[1:] == [prompt - 1] * (RETRIES - 1)


def test_retries_one_after_the_other() -> None:
    with hosted(brain=token) as host:
        check(host, [ask(host, BODY) for _ in range(RETRIES)], 0)


def test_retries_all_at_once() -> None:
    with hosted(brain=token, max_sequences=64) as host, ThreadPoolExecutor(RETRIES) as pool:
        check(host, list(pool.map(lambda _: ask(host, BODY), range(RETRIES))), 0)


def test_retries_of_clients_that_leave_in_the_middle_of_a_reply() -> None:
    with hosted(brain=token, model=fake_model(max_length=2000)) as host:
        for _ in range(RETRIES):
            body = {**BODY, "stream": True, "max_tokens": 1000}
            with httpx.stream("POST", f"{host.url}/v1/chat/completions", json=body, timeout=30) as stream:
                lines = stream.iter_lines()
                while not (line := next(lines)) or not json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    pass
            until(lambda: host.service.limiter.streams == 0)
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
        until(lambda: host.service.limiter.streams == 0)
        host.runner.gate.release(1000)
        usage = ask(host, BODY).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
        assert computed(host) == usage["prompt_tokens"] + usage["completion_tokens"] - 1
