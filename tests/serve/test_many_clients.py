"""Many clients stream from each endpoint at once: whole replies, no block held after them, no hits across tenants.

The formats and the clients are those of benchmarks/http_load.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from http_load_parts.connection import Connection
from http_load_parts.endpoints import ENDPOINTS, Endpoint, Message, Tokens

from radixkv.serve import Settings
from radixkv.serve.access import NAMESPACE_HEADER
from tests.engine.fakes import check
from tests.serve.served import Hosted, hosted, says_in_turn, until
from tests.serve.test_auth import KEYS, bearer

CLIENTS = 16
SYSTEM = "You are brief."
REPLIES = ("Yes, and here is why it is so.", "No.")
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


@each_endpoint
def test_streams_of_many_namespaces_are_whole_and_hit_their_own_turns_only(endpoint: Endpoint) -> None:
    """All clients send the same words at once, each in a namespace of its own."""

    async def one(url: str, headers: dict[str, str]) -> list[Tokens]:
        messages: list[Message] = []
        found = []
        async with await Connection.to(url) as connection:
            for reply in REPLIES:
                messages.append({"role": "user", "content": "Is it so?"})
                body = endpoint.body(SYSTEM, messages, 100, temperature=0)
                events = [event async for event in connection.events(endpoint, body, **headers)]
                assert "".join(map(endpoint.text, events)) == reply
                messages.append({"role": "assistant", "content": reply})
                found += [tokens for event in events if (tokens := endpoint.tokens(event))]
        return found

    async def all_at_once(url: str) -> list[list[Tokens]]:
        callers = [
            bearer(key, **({NAMESPACE_HEADER: f"part {number}"} if number else {}))
            for key in KEYS.values()
            for number in range(CLIENTS // len(KEYS))
        ]
        return await asyncio.gather(*(one(url, headers) for headers in callers))

    settings = Settings(port=0, api_keys=KEYS, model_name="tiny", drain_timeout=5)
    with hosted(settings, brain=says_in_turn(*REPLIES), num_blocks=4000) as host:
        turns = asyncio.run(all_at_once(host.url))
        assert len(turns) == CLIENTS
        for first, second in turns:
            assert first.cached == 0
            assert second.cached == first.prompt + first.output - 1  # the last token was sampled, not computed
        is_freed(host)


def is_freed(host: Hosted) -> None:
    until(lambda: host.service.gate.limiter.streams == 0 and not host.engine.core.scheduler.running)
    assert not host.service.responses.running
    check(host.engine)


# ---- the benchmark
