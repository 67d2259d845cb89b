"""The official `openai` and `anthropic` packages against a real server with the bundled model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from radixkv import Engine, SamplingParams, ToolResult
from radixkv.server_settings import Settings
from tests.selection import Later
from tests.serve.anthropic.messages import BODY, CALL, LOOK
from tests.serve.served import Hosted, hosted, hosted_engine, says

anthropic: Any = Later("anthropic")

ROOT = Path(__file__).parent.parent.parent
KEY = "correct-horse"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: Any = [{"role": "user", "content": "Hello! My name is Sam."}]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    engine, runner = Engine.load("tiny", num_blocks=1000, monitor=False), SimpleNamespace(gate=None)
    with hosted_engine(engine, runner, Settings(api_keys={"ada": KEY}, drain_timeout=5)) as found:  # type: ignore[arg-type]
        yield found


# ---- openai


def of_openai(host: Hosted, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{host.url}/v1", api_key=key, max_retries=0, timeout=60)


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, **options)


def test_the_tools_loop(host: Hosted) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with of_openai(host) as client, host.engine.chat(tools=[WEATHER], namespace="own") as session:
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


def test_models_and_errors_are_what_openais_client_expects(host: Hosted) -> None:
    with of_openai(host) as client:
        (model,) = client.models.list()
        assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
        with pytest.raises(openai.NotFoundError, match="model 'gpt-99' not found") as missing:
            client.chat.completions.create(model="gpt-99", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
            client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
        assert wrong.value.param == "temperature"
    with of_openai(host, "wrong-key") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.long
def test_the_example_of_an_agent_runs_and_hits(host: Hosted) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{host.url}/v1", "OPENAI_API_KEY": KEY}
    command = [sys.executable, str(ROOT / "examples" / "agent_http.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    costs = [tuple(map(int, found)) for found in re.findall(r"\((\d+) of (\d+) prompt", done.stdout)]
    assert len(costs) == 8  # four questions, each with a call and an answer from its result
    assert all(cached > 0.6 * prompt for cached, prompt in costs[1:])
    for stock in (4, 14, 7, 31):
        assert f" {stock} " in done.stdout


# ---- anthropic


def of_anthropic(host: Hosted, key: str = KEY) -> Any:
    return anthropic.Anthropic(base_url=host.url, api_key=key, max_retries=0)


def create(client: Any, messages: Any, **options: Any) -> Any:
    extra = {"temperature": 0, **options.pop("extra_body", {})}  # recent versions have no argument for it
    return client.messages.create(model="claude-any", max_tokens=64, messages=messages, extra_body=extra, **options)


def test_a_message_and_a_stream_are_the_reply_of_the_engine(host: Hosted) -> None:
    own = host.engine.generate([HELLO], GREEDY.but(max_tokens=64), namespace="own")[0]
    with of_anthropic(host) as client:
        whole = create(client, HELLO)
        with client.messages.stream(model="m", max_tokens=64, messages=HELLO, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
    assert text == own.text
    for each in (whole, streamed):
        assert (each.content[0].text, each.stop_reason, each.role) == (own.text, "end_turn", "assistant")
        assert each.usage.output_tokens == own.usage.output_tokens
    assert whole.model == "claude-any" and whole._request_id.startswith("req_")
    assert streamed.usage.cache_read_input_tokens == own.usage.prompt_tokens - 1


def test_thinking_and_tools_in_a_stream_of_anthropics_client() -> None:
    body: Any = {**BODY, "tools": [LOOK], "thinking": {"type": "adaptive"}}
    body["extra_body"] = {"temperature": body.pop("temperature")}
    with hosted(brain=says(f"<think>\nhm\n</think>\n\nWell. {CALL}")) as server, of_anthropic(server) as client:
        with client.beta.messages.stream(**body, betas=["any-2026-01-01"]) as stream:
            found = stream.get_final_message()
        whole = client.messages.create(**body)
        assert client.messages.count_tokens(model="m", messages=body["messages"]).input_tokens > 0
    assert [each.type for each in found.content] == [each.type for each in whole.content]
    thinking, text, call = found.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm", "Well.")
    assert thinking.signature == whole.content[0].signature
    assert (call.type, call.name, call.input, found.stop_reason) == ("tool_use", "look", {"path": "a.txt"}, "tool_use")


def test_errors_are_those_of_anthropics_client(host: Hosted) -> None:
    with of_anthropic(host) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum") as long:
            create(client, [{"role": "user", "content": "word " * 9000}])
        assert long.value.type == "invalid_request_error" and long.value.request_id
    with of_anthropic(host, "wrong-key") as stranger, pytest.raises(anthropic.AuthenticationError, match="not known"):
        create(stranger, HELLO)
    with (
        hosted(fault=lambda chunks: 1 / 0 if chunks[0].start > 30 else None) as server,
        of_anthropic(server) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        list(create(client, HELLO, stream=True, extra_body={"ignore_eos": True}))
    assert caught.value.type == "api_error"
