"""A small server, replayed against as any server with OpenAI's HTTP API."""

import asyncio
import socket
import threading
from array import array

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.formats import TraceRequest
from radixkv_traces.live.http_target import HttpTarget, TargetError
from radixkv_traces.live.player import Pace, Player
from radixkv_traces.live.requests import PromptMaker, plan_requests
from tests.traces.live.targets import http_server

PROMPT_MAKER = PromptMaker(100, 4)
BLOCKS = TraceRequest(0.0, 7, 3, array("q", [1, 2]))
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CHAT = ChatRequest(0.0, ({"role": "user", "content": "Hi"},), "a", 1, 2, tools=(TOOL,))


def play(server, *requests, model=None, **options):
    async def run():
        target = await HttpTarget.at(server.url, model, **options)
        try:
            return (await Player(target, PROMPT_MAKER, Pace()).play(plan_requests(requests, PROMPT_MAKER))).outcomes
        finally:
            await target.close()

    return asyncio.run(run())


def test_token_ids_are_completed_and_what_was_cached_is_read():
    with http_server() as server:
        (outcome,) = play(server, BLOCKS, api_key="secret")
    path, body, key = server.bodies[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "small",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "prompt": PROMPT_MAKER.prompt(BLOCKS).tolist(),
        "max_tokens": 3,
    }
    assert key == "Bearer secret"
    assert len(outcome.arrivals) == 3
    assert (outcome.answer.prompt_tokens, outcome.answer.cached_tokens, outcome.answer.output_tokens) == (7, 3, 3)
    assert outcome.error is None


def test_messages_and_tools_go_through_the_chat():
    with http_server() as server:
        (outcome,) = play(server, CHAT, model="large", extra={"ignore_eos": None, "user": "me"})
    path, body, key = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert body["tools"] == [TOOL]
    assert body["model"] == "large"
    assert "ignore_eos" not in body
    assert body["user"] == "me"
    assert key is None
    assert outcome.answer.output_tokens == 2


def test_a_server_that_tells_nothing_leaves_its_figures_open():
    with http_server("tells nothing") as server:
        (outcome,) = play(server, BLOCKS)
    assert outcome.answer.output_tokens == 3  # the number of pieces
    assert outcome.answer.cached_tokens is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refused", "TargetError: HTTP 400: unknown field ignore_eos"),
        ("html", "TargetError: HTTP 502: <html>bad gateway</html>"),
        ("breaks off", "TargetError: the stream broke off before"),
        ("garbage", "TargetError: no JSON in the stream"),
        ("error in the stream", "TargetError: out of memory"),
    ],
)
def test_what_a_server_does_wrong_is_the_requests_error(fault, message):
    with http_server(fault) as server:
        outcomes = play(server, BLOCKS, BLOCKS)
    assert len(outcomes) == 2
    assert all(outcome.error.startswith(message) for outcome in outcomes)
    assert all(outcome.answer is None for outcome in outcomes)


def test_a_stopped_replay_hangs_up():
    with http_server("hangs") as server:

        async def stopped():
            target = await HttpTarget.at(server.url)
            task = asyncio.create_task(Player(target, PROMPT_MAKER, Pace()).play(plan_requests([BLOCKS], PROMPT_MAKER)))
            await asyncio.to_thread(server.hanging.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await target.close()
            return target

        ended = threading.Thread(target=asyncio.run(stopped())._threads.shutdown, daemon=True)
        ended.start()
        ended.join(20)
        assert not ended.is_alive()  # its thread has ended, though the server still hangs


def test_a_url_may_end_in_v1_and_a_server_need_not_name_its_models():
    with http_server("no models") as server:
        server.url += "/v1/"
        play(server, BLOCKS, model="mine")
        with pytest.raises(InvalidInput, match="say which with --model"):
            play(server, BLOCKS)
    assert [body["model"] for _, body, _ in server.bodies] == ["mine"]


def test_a_missing_engine_is_reported_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(TargetError, match="does not answer"):
            asyncio.run(HttpTarget.at(f"http://127.0.0.1:{free.getsockname()[1]}"))


@pytest.mark.parametrize("key", ["secret\n", "geheimnüs", ""])
def test_a_key_that_no_header_can_have_is_refused(key):
    with pytest.raises(InvalidInput, match="API key"):
        asyncio.run(HttpTarget.at("http://127.0.0.1:1", api_key=key))


def test_a_client_that_stops_waiting_for_the_models_hangs_up():
    with http_server("no models ever") as server:

        async def stopped():
            task = asyncio.create_task(HttpTarget.at(server.url))
            await asyncio.to_thread(server.hanging.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        ended = threading.Thread(target=asyncio.run, args=(stopped(),), daemon=True)
        ended.start()
        ended.join(20)
        assert not ended.is_alive()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"choices": ["x"]}, "a choice is a JSON str"),
        ({"choices": {"text": "x"}}, "choices is a JSON dict"),
        ({"choices": [{"delta": "x"}]}, "delta is a JSON str"),
        ({"usage": 5}, "usage is a JSON int"),
        ({"usage": {"prompt_tokens": "10"}}, "prompt_tokens: '10'"),
        ({"usage": {"completion_tokens": -5}}, "completion_tokens: '-5'"),
        ({"usage": {"prompt_tokens_details": [1]}}, "prompt_tokens_details is a JSON list"),
        ([1], "[1]"),
        ("[" * 100_000, "no JSON in the stream"),
    ],
)
def test_an_odd_event_is_the_requests_error_alone(event, message):
    with http_server("odd event") as server:
        server.event = event
        (outcome,) = play(server, BLOCKS)
    assert outcome.error.startswith("TargetError: ")
    assert message in outcome.error
    assert outcome.answer is None
