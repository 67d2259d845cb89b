"""The official `anthropic` package against a real server with the bundled model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from radixkv import Engine, SamplingParams
from radixkv.chat import AsyncEngine
from radixkv.serve.server import Server, address, bind
from radixkv.server_settings import Settings
from tests.selection import Later
from tests.serve.anthropic.messages import BODY, CALL, LOOK
from tests.serve.served import hosted, says

anthropic: Any = Later("anthropic")

KEYS = {"ada": "correct-horse", "bob": "battery-staple"}
HELLO: Any = [{"role": "user", "content": "Hello! My name is Sam."}]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@dataclass
class Served:
    engine: Engine
    url: str

    def client(self, name: str = "ada") -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=KEYS[name], max_retries=0)

    def own(self, text: str) -> Any:
        with self.engine.chat(namespace="own") as session:
            return session.send(text, GREEDY)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    ready = threading.Event()
    with Engine.load("tiny", num_blocks=1000, monitor=False) as engine, bind("127.0.0.1", 0) as sock:
        server = Server(AsyncEngine(engine), Settings(api_keys=KEYS, drain_timeout=5), ready.set)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            assert ready.wait(30), "the server never took connections"
            yield Served(engine, address(sock))
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def create(client: Any, messages: Any, **options: Any) -> Any:
    extra = {"temperature": 0, **options.pop("extra_body", {})}  # recent versions have no argument for it
    return client.messages.create(model="claude-any", max_tokens=64, messages=messages, extra_body=extra, **options)


def test_a_message_and_a_stream_are_the_reply_of_the_engine(served: Served):
    own = served.own(HELLO[0]["content"])
    with served.client() as client:
        whole = create(client, HELLO)
        with client.messages.stream(model="m", max_tokens=64, messages=HELLO, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        raw = [each.type for each in create(client, HELLO, stream=True)]
    assert text == own.text
    for each in (whole, streamed):
        assert (each.content[0].text, each.stop_reason, each.role) == (own.text, "end_turn", "assistant")
        assert each.usage.output_tokens == own.usage.output_tokens
    assert whole.model == "claude-any" and whole._request_id.startswith("req_")
    assert streamed.usage.cache_read_input_tokens == own.usage.prompt_tokens - 1
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]


def test_thinking_and_tools_in_a_stream_of_the_sdk():
    body: Any = {**BODY, "tools": [LOOK], "thinking": {"type": "adaptive"}}
    body["extra_body"] = {"temperature": body.pop("temperature")}
    with (
        hosted(brain=says(f"<think>\nhm\n</think>\n\nWell. {CALL}")) as host,
        anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0) as client,
    ):
        with client.beta.messages.stream(**body, betas=["any-2026-01-01"]) as stream:
            found = stream.get_final_message()
        whole = client.messages.create(**body)
        assert client.messages.count_tokens(model="m", messages=body["messages"]).input_tokens > 0
    assert [each.type for each in found.content] == [each.type for each in whole.content]
    thinking, text, call = found.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm", "Well.")
    assert thinking.signature == whole.content[0].signature
    assert (call.type, call.name, call.input, found.stop_reason) == ("tool_use", "look", {"path": "a.txt"}, "tool_use")


def test_errors_are_the_sdks_own(served: Served):
    with served.client() as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum") as long:
            create(client, [{"role": "user", "content": "word " * 9000}])
        assert long.value.type == "invalid_request_error" and long.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            create(client, HELLO, tools=[LOOK], tool_choice={"type": "tool", "name": "none"})
    stranger = anthropic.Anthropic(base_url=served.url, api_key="wrong-key", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="not known"):
        create(stranger, HELLO)


def test_an_error_in_a_stream_is_raised_by_the_sdk():
    with hosted(fault=lambda chunks: 1 / 0 if chunks[0].start > 30 else None) as host:
        client = anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError) as caught:
            list(create(client, HELLO, stream=True, extra_body={"ignore_eos": True}))
    assert caught.value.type == "api_error"
