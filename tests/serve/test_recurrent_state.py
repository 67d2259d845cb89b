"""HTTP chats on a model with recurrent state resume from the end of the last message before the reply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import Served, says, served

TOLD = "Tell me a long story about the sea and the wind. " * 4


def cached(server: Served, path: str, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the cached and all tokens of a prompt."""
    body = {"model": server.engine.model.name, "messages": messages, "max_tokens": 60, "temperature": 0}
    usage = server.client.post(path, json=body).json()["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_that_drops_a_part_of_the_reply_hits_all_messages_before_it(path: str) -> None:
    with served(
        brain=says("The sea is wide and the wind is strong, and so it goes on and on."), snapshots=20
    ) as server:
        asked = [{"role": "user", "content": TOLD}]
        assert cached(server, path, asked)[0] == 0
        opening = len(server.engine.model.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        whole = cached(server, path, asked)[1]
        more = [*asked, {"role": "assistant", "content": "The sea."}, {"role": "user", "content": "Go on."}]
        assert cached(server, path, more)[0] == whole - opening
