"""The vendors' SDKs put streamed calls together, over each API: equal to the calls that are not streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from tests.chat.tool_call_dialects import DIALECTS, TOOLS, Dialect
from tests.selection import Later
from tests.serve.served import fake_model, hosted

anthropic: Any = Later("anthropic")

CALLS = [("weather", {"city": 'Osl"o}\n' + "é " * 40, "days": [1, {"x": None}]}), ("now", {})]
WRITTEN = DIALECTS["Qwen"].write(CALLS)
USER = [{"role": "user", "content": "look"}]


@dataclass
class Turn:
    """One reply as a client has it: names and JSON texts of its calls, and what the client sends back."""

    calls: list[tuple[str, str]]
    ended: str
    tokens: int
    cached: int
    sent_back: list[Any]
    deltas: int


@contextmanager
def serving(text: str, dialect: Dialect = DIALECTS["Qwen"]) -> Iterator[str]:
    tokenizer = dialect.tokenizer()
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=dialect.stops())
    with hosted(model=model, brain=dialect.brain(lambda said: "Grey." if "grey" in said else text)) as host:
        yield host.url


def chat(url: str, given: list[Any], *, streams: bool, limit: int = 900, **more: Any) -> Turn:
    options: Any = {"model": "fake", "tools": TOOLS, "temperature": 0, "max_tokens": limit, "messages": given, **more}
    deltas = 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        found: Any = None if streams else client.chat.completions.create(**options)
        if streams:
            with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                try:
                    deltas = sum(each.type == "tool_calls.function.arguments.delta" for each in stream)
                    found = stream.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    found = error.completion
    message, calls = found.choices[0].message, found.choices[0].message.tool_calls or ()
    results = [{"role": "tool", "tool_call_id": call.id, "content": "grey"} for call in calls]
    asked = [(call.function.name, call.function.arguments) for call in calls]
    cached, back = found.usage.prompt_tokens_details.cached_tokens, message.model_dump(exclude_none=True)
    ended = found.choices[0].finish_reason
    return Turn(asked, ended, found.usage.total_tokens, cached, [back, *results], deltas)


def responses(url: str, given: list[Any], *, streams: bool, limit: int = 900) -> Turn:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    options: Any = {"model": "fake", "tools": tools, "temperature": 0, "max_output_tokens": limit, "input": given}
    deltas: list[Any] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        found: Any = None if streams else client.responses.create(**options)
        if streams:
            with client.responses.stream(**options) as stream:
                events: list[Any] = list(stream)
            found, deltas = events[-1].response, [each for each in events if each.type.endswith("arguments.delta")]
    calls = [item for item in found.output if item.type == "function_call"]
    for call in calls if streams else ():
        assert "".join(each.delta for each in deltas if each.item_id == call.id) == call.arguments
    if calls:
        assert [call.status for call in calls] == ["completed"] * (len(calls) - 1) + [found.status]
    back = [item.model_dump(exclude_none=True) for item in found.output]
    back += [{"type": "function_call_output", "call_id": call.call_id, "output": "grey"} for call in calls]
    asked = [(call.name, call.arguments) for call in calls]
    cached = found.usage.input_tokens_details.cached_tokens
    return Turn(asked, found.status, found.usage.total_tokens, cached, back, len(deltas))


def messages(url: str, given: list[Any], *, streams: bool, limit: int = 900, **more: Any) -> Turn:
    tools = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS]
    extra = {"temperature": 0, **({"stop_sequences": [more["stop"]]} if more else {})}
    options: Any = {"model": "m", "tools": tools, "max_tokens": limit, "messages": given, "extra_body": extra}
    deltas: dict[int, str] = {}
    count = 0
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        found = None if streams else client.messages.create(**options)
        if streams:
            with client.messages.stream(**options) as stream:
                for each in stream:
                    if each.type == "content_block_delta" and each.delta.type == "input_json_delta":
                        deltas[each.index] = deltas.get(each.index, "") + each.delta.partial_json
                        count += 1
                found = stream.get_final_message()
    assert found is not None
    calls = [block for block in found.content if block.type == "tool_use"]
    texts = list(deltas.values()) if streams else [json.dumps(call.input) for call in calls]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "grey"} for call in calls]
    back = [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    usage, asked = found.usage, list(zip([call.name for call in calls], texts, strict=True))
    tokens = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    return Turn(asked, str(found.stop_reason), tokens, usage.cache_read_input_tokens, back, count)


APIS: list[Callable[..., Turn]] = [chat, responses, messages]


@pytest.mark.parametrize("ask", APIS)
@pytest.mark.parametrize("before", ["", "<think>\nhm\n</think>\n\nI look. "])
def test_streamed_calls_equal_the_whole_ones_and_hit_when_they_are_sent_back(ask: Any, before: str) -> None:
    with serving(before + WRITTEN) as url:
        whole, streamed = ask(url, USER, streams=False), ask(url, USER, streams=True)
        again = ask(url, [*USER, *streamed.sent_back], streams=True)
    for turn in (whole, streamed):
        assert [(name, json.loads(text)) for name, text in turn.calls] == CALLS
        assert turn.ended == {chat: "tool_calls", responses: "completed", messages: "tool_use"}[ask]
    assert ask is messages or whole.calls == streamed.calls  # a whole message has objects
    assert streamed.deltas > 60 and again.calls == []
    assert again.cached == streamed.tokens - 1


@pytest.mark.parametrize("ask", APIS)
def test_a_call_that_turned_out_wrong_is_text_unless_it_was_streamed_and_no_client_should_run_it(ask: Any) -> None:
    with serving('<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": NaN}}</tool_call>') as url:
        whole, streamed = (ask(url, USER, streams=streams) for streams in (False, True))
    assert whole.calls == [] and streamed.calls == [("weather", '{"city": "Oslo", "days": ')]
    assert whole.ended == {chat: "stop", responses: "completed", messages: "end_turn"}[ask]
    assert streamed.ended == {chat: "stop", responses: "incomplete", messages: "end_turn"}[ask]


@pytest.mark.parametrize(
    ("ask", "limit"), [*((ask, {"limit": 90}) for ask in APIS), (chat, {"stop": "é é"}), (messages, {"stop": "é é"})]
)
def test_a_call_that_was_cut_ends_as_it_was_streamed(ask: Any, limit: dict[str, Any]) -> None:
    with serving(f"I look. {WRITTEN}") as url:
        whole, streamed = (ask(url, USER, streams=streams, **limit) for streams in (False, True))
    ((name, text),) = streamed.calls
    assert name == "weather" and json.dumps(CALLS[0][1], ensure_ascii=False).startswith(text) and len(text) > 10
    assert whole.ended == streamed.ended
    assert whole.calls == ([("weather", "{}")] if ask is messages else streamed.calls)


@pytest.mark.parametrize("streams", [False, True])
def test_a_required_call_of_an_unknown_format_is_read_where_its_tags_are_tokens(streams: bool) -> None:
    qwen = DIALECTS["Qwen, tags as control tokens"]
    dialect = replace(qwen, template=qwen.template.replace('<tool_call>\n{"name"', '<tool_call>run {"name"'))
    with serving(qwen.write(CALLS[1:]), dialect) as url:
        turn = chat(url, USER, streams=streams, tool_choice="required")
        free = chat(url, USER, streams=streams)
    assert turn.calls == [("now", "{}")] and turn.ended == "tool_calls"
    assert free.calls == [] and free.sent_back[0]["content"] == qwen.write(CALLS[1:])
