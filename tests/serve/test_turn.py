"""The neutral core of a chat request: pieces and ends, limits of the reply, and what the history stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from radixkv.chat.calls.formats import HERMES
from radixkv.serve.errors import ApiError
from radixkv.serve.reply import Piece
from radixkv.serve.responses import COMMENT, sse_event
from radixkv.serve.schemas import read_chat
from radixkv.serve.service import Service
from radixkv.serve.turn import End, Turn, respond
from tests.serve.served import CHAT, Served, says, served

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]


class Noted:
    """An encoder that records the neutral events or the whole replies of a turn."""

    keep_alive = COMMENT
    seen: list[Any]
    turn: Turn

    def __init__(self, turn: Turn) -> None:
        Noted.seen, Noted.turn = [], turn

    async def whole(self) -> bytes:
        Noted.seen = await self.turn.replies()
        return b"{}"

    async def events(self) -> AsyncGenerator[bytes, None]:
        async for step in self.turn.steps():
            ended = [] if step.end is None else [step.end]
            Noted.seen += [(step.index, each) for each in (*step.pieces, *ended)]
        assert [reply.end for reply in await self.turn.replies()] == [each for _, each in ends()]
        yield b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        return sse_event(error.body())


def ends() -> list[tuple[int, End]]:
    return sorted(((index, each) for index, each in Noted.seen if isinstance(each, End)), key=lambda pair: pair[0])


async def noted(service: Service, request: Request) -> Response:
    return await respond(service, request, read_chat, Noted, any_model=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("radixkv.serve.chats.create", noted)
    return served


def ask(server: Served, **fields: Any) -> list[Any]:
    answer = server.post("/v1/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return Noted.seen


def test_events_are_pieces_and_one_end(server: Any) -> None:
    with server(brain=says(f"<think>hm</think>Wait. {CALL}")) as world:
        world.service.call_format = HERMES
        seen = ask(world, stream=True, tools=TOOLS, model="any-name")
        pieces = [each for _, each in seen if isinstance(each, Piece)]
        deltas = [piece.call for piece in pieces if piece.call]
        call = deltas[-1].call
        assert (call.name, call.arguments) == ("weather", {"city": "Oslo"})
        assert "".join(delta.arguments for delta in deltas) == call.text
        assert "".join(piece.content for piece in pieces).strip() == "Wait."
        assert "".join(piece.thinking for piece in pieces).strip() == "hm"
        assert ends() == [(0, End("tool_calls"))] and seen[-1] == ends()[0]
        (reply,) = ask(world, tools=TOOLS, model="any-name")
        assert (reply.calls, reply.content.strip(), reply.thinking.strip()) == ((call,), "Wait.", "hm")


@pytest.mark.parametrize("stream", [True, False])
def test_max_tokens_is_limited_to_the_room(server: Any, stream: bool) -> None:
    with server(brain=lambda _: 300, num_blocks=8, block_size=16) as world:
        for most, full in ((5, False), (100_000, True)):
            seen = ask(world, stream=stream, max_tokens=most)
            end = ends()[0][1] if stream else seen[0].end
            assert end == End("length", context_full=full)
            room = world.engine.context_limit - Noted.turn.prompt_tokens
            assert Noted.turn.usage.output_tokens == min(most, room)


def test_replies_share_the_room_only_if_the_pool_cannot_hold_them(server: Any) -> None:
    with server(brain=lambda _: 300, num_blocks=32, block_size=16) as world:
        replies = ask(world, n=2, max_tokens=100_000)
        assert {reply.end for reply in replies} == {End("length", context_full=True)}
        assert len(replies[0].completion.token_ids) == len(replies[1].completion.token_ids) > 150
        replies = ask(world, n=2, max_tokens=200)
        assert [len(reply.completion.token_ids) for reply in replies] == [200, 200]
