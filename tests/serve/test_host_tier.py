"""Tokens that were loaded from host memory are cached tokens in the usage of every HTTP protocol."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import Served, says, served

TOLD = "Tell me a long story about the sea and the wind. " * 8
OTHER = "Write down every word that you have ever seen on a ship. " * 6


def usage(server: Served, path: str, text: str) -> dict[str, Any]:
    """Return the usage of a request for one short reply."""
    body: dict[str, Any] = {"model": server.engine.model.name, "temperature": 0}
    if path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 20}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 20}
    return dict(server.post(path, body).json()["usage"])


def cached(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the cached and all tokens of a prompt."""
    if "cache_read_input_tokens" in usage:
        found = usage["cache_read_input_tokens"]
        return found, found + usage["input_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"], usage.get("prompt_tokens") or usage["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_prompt_that_comes_back_from_the_host_is_cached(path: str) -> None:
    with served(brain=says("Aye."), num_blocks=56, host_blocks=200) as server:
        found, asked = cached(usage(server, path, TOLD))
        usage(server, path, OTHER)
        assert (found, server.engine.stats().host_tokens) == (0, 0) and asked > 100
        assert cached(usage(server, path, TOLD)) == (asked - 1, asked), "its last token is always computed"
        stats = server.engine.stats()
        assert 50 < stats.host_tokens == stats.cache.loaded_tokens
        assert stats.cached_tokens >= asked - 1
