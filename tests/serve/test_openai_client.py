"""The official `openai` package against a real server with the bundled model: responses equal the engine's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from radixkv import Engine, SamplingParams, ToolResult
from radixkv.chat import AsyncEngine
from radixkv.serve.server import Server, address, bind
from radixkv.server_settings import Settings
from radixkv.telemetry.records import namespace_label

ROOT = Path(__file__).parent.parent.parent
KEYS = {"ada": "correct-horse", "bob": "battery-staple"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO = [{"role": "user", "content": "Hello! My name is Sam."}]
GREEDY = SamplingParams(temperature=0)


@dataclass
class Served:
    engine: Engine
    url: str

    def client(self, name: str = "ada") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=KEYS[name], max_retries=0, timeout=60)

    def async_client(self, name: str = "ada") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key=KEYS[name], max_retries=0, timeout=60)

    def own(self, prompt: Any, params: SamplingParams = GREEDY) -> Any:
        """Return the engine's own reply, computed in another namespace."""
        return self.engine.generate([prompt], params, namespace="own")[0]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    ready = threading.Event()
    engine = Engine.load("tiny", num_blocks=1000, monitor=False)
    with engine, bind("127.0.0.1", 0) as sock:
        server = Server(AsyncEngine(engine), Settings(api_keys=KEYS, drain_timeout=5), ready.set)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            assert ready.wait(30), "the server never took connections"
            yield Served(engine, f"{address(sock)}/v1")
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def named(namespace: str) -> dict[str, str]:
    return {"X-RadixKV-Namespace": namespace}


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, **options)


def test_a_reply_and_what_it_cost(served: Served) -> None:
    with served.client() as client:
        first, second = (chat(client, HELLO, extra_headers=named("costs")) for _ in range(2))
    own = served.own(HELLO)
    for reply in (first, second):
        (choice,) = reply.choices
        assert (choice.message.role, choice.message.content) == ("assistant", own.text)
        assert (choice.index, choice.finish_reason, reply.model) == (0, "stop", "tiny")
        assert reply.usage.prompt_tokens == own.usage.prompt_tokens
        assert reply.usage.completion_tokens == own.usage.output_tokens
        assert reply.usage.total_tokens == own.usage.prompt_tokens + own.usage.output_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == own.usage.prompt_tokens - 1


def test_the_monitor_sees_conversations_and_whose_they_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int | None, str | None]] = []
    start = served.engine.client.start

    def noted(request: Any) -> Any:
        seen.append((request.session, namespace_label(request.namespace)))
        return start(request)

    monkeypatch.setattr(served.engine.client, "start", noted)
    for name in ("ada", "bob"):
        messages: list[Any] = list(HELLO)
        with served.client(name) as client:
            for _ in range(3):
                reply = chat(client, messages, extra_headers=named("seen"))
                messages += [reply.choices[0].message, {"role": "user", "content": "What is my name?"}]
            client.completions.create(model="tiny", prompt="Hello!", max_tokens=1)
    ada, *rest = (session for session, _ in seen)
    assert ada is not None and rest[3] not in (None, ada)
    assert rest == [ada, ada, None, rest[3], rest[3], rest[3], None]
    assert [name for _, name in seen] == ["(ada, seen)"] * 3 + ["(ada)"] + ["(bob, seen)"] * 3 + ["(bob)"]
    seen.clear()
    for name in ("ada", "bob"):
        with served.client(name) as client:
            key = {"prompt_cache_key": "one thread"}
            for text in ("Hello!", "Good morning."):
                chat(client, [{"role": "user", "content": text}], extra_body=key)
            client.completions.create(model="tiny", prompt="Hi", max_tokens=1, extra_body=key)
    sessions = [session for session, _ in seen]
    assert sessions == [sessions[0]] * 3 + [sessions[3]] * 3 and None not in {*sessions} and len({*sessions}) == 2


def test_the_tools_loop(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with served.client() as client, served.engine.chat(tools=[WEATHER], namespace="own") as session:
        own = session.send("What is the weather in Paris?", GREEDY)
        asked = chat(client, messages, tools=[WEATHER])
        (call,) = asked.choices[0].message.tool_calls
        assert asked.choices[0].finish_reason == "tool_calls"
        assert asked.choices[0].message.content is None
        assert (call.type, call.function.name) == ("function", own.tool_calls[0].name)
        assert json.loads(call.function.arguments) == own.tool_calls[0].arguments
        result = json.dumps({"city": "Paris", "weather": "sunny", "temperature": 21})
        messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = chat(client, messages, tools=[WEATHER])
        assert answer.choices[0].finish_reason == "stop"
        own = session.tool_results([ToolResult(own.tool_calls[0].id, result)], GREEDY)
        assert answer.choices[0].message.content == own.text
        assert answer.usage.prompt_tokens_details.cached_tokens == asked.usage.total_tokens - 1


def test_models_and_errors_are_what_the_client_expects(served: Served) -> None:
    with served.client() as client:
        (model,) = client.models.list()
        assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
        with pytest.raises(openai.NotFoundError, match="model 'gpt-99' not found") as missing:
            client.chat.completions.create(model="gpt-99", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
            client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
        assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=served.url, api_key="wrong-key", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.long
def test_the_example_of_an_agent_runs_and_hits(served: Served) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": served.url, "OPENAI_API_KEY": KEYS["bob"]}
    command = [sys.executable, str(ROOT / "examples" / "agent_http.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    costs = [tuple(map(int, found)) for found in re.findall(r"\((\d+) of (\d+) prompt", done.stdout)]
    assert len(costs) == 8  # four questions, each with a call and an answer from its result
    assert all(cached > 0.6 * prompt for cached, prompt in costs[1:])
    for stock in (4, 14, 7, 31):
        assert f" {stock} " in done.stdout
