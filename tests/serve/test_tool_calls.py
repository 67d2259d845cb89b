"""Tool calls over HTTP in each format, with the official client: whole, as events, and sent back with their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.engine import Chunk
from radixkv.engine.text_stream import TextStream, decoder
from radixkv.serve.reply import TaggedText
from tests.chat.tool_call_dialects import DIALECTS, TOOLS, Dialect
from tests.serve.served import LOCAL, Served, fake_model, served

CALLS = [("weather", {"city": 'Osl"o} [ARGS] </tool_call>', "days": [1, {"é": None}]}), ("now", {})]


@contextmanager
def speaking(dialect: Dialect, reply: Callable[[str], str]) -> Iterator[tuple[openai.OpenAI, Served]]:
    tokenizer = dialect.tokenizer()
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=dialect.stops())
    with served(model=model, brain=dialect.brain(reply)) as server:
        yield openai.OpenAI(base_url=f"{LOCAL}/v1", api_key="any", max_retries=0, http_client=server.client), server


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"tools": TOOLS, "temperature": 0, **options}
    return client.chat.completions.create(model="fake", messages=messages, **options)


def asked(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", DIALECTS)
def test_calls_and_their_results_are_sent_again_and_all_of_it_is_cached(name: str) -> None:
    dialect = DIALECTS[name]
    messages: list[Any] = [user("look")]

    def reply(said: str) -> str:
        return "It is grey." if "grey" in said.rsplit("look", 1)[-1] else dialect.write(CALLS)

    with speaking(dialect, reply) as (client, _):
        computed = 0
        for _ in range(2):
            called = ask(client, messages)
            (choice,) = called.choices
            assert asked(choice.message.tool_calls) == CALLS
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
            assert called.usage.prompt_tokens_details.cached_tokens == max(computed - 1, 0)
            messages.append(choice.message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "grey"} for call in choice.message.tool_calls
            ]
            answer = ask(client, messages)
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is grey.", "stop")
            assert answer.usage.prompt_tokens_details.cached_tokens == called.usage.total_tokens - 1
            messages += [answer.choices[0].message, user("look")]
            computed = answer.usage.total_tokens
        ids = [call.id for message in messages for call in getattr(message, "tool_calls", None) or ()]
        assert len(set(ids)) == len(ids) == 2 * len(CALLS)
        if "Mistral" in name:
            assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize("known", [True, False], ids=["known", "forgotten"])
def test_results_stand_in_the_order_of_the_calls(known: bool) -> None:
    dialect = DIALECTS["Qwen"]
    prompts = []

    def reply(said: str) -> str:
        prompts.append(said)
        return "It is grey." if "grey" in said else dialect.write(CALLS)

    with speaking(dialect, reply) as (client, _):
        called = ask(client, [user("look")]).choices[0].message
        told = [user("look"), called if known else {**called.model_dump(exclude_none=True), "content": "Now."}]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"grey {at}"}
            for at, call in enumerate(called.tool_calls)
        ]
        prompts.clear()
        counted = [ask(client, [*told, *order]).usage.prompt_tokens_details for order in (results, results[::-1])]
        assert prompts and all(said.find("grey 0") < said.find("grey 1") for said in prompts)
        assert counted[1].cached_tokens > counted[0].cached_tokens  # the same prompt


def test_json_is_text_without_tools_or_such_a_tool() -> None:
    answer = '{"name": "Nora", "parameters": {"age": 9}}'
    call = '{"name": "now", "parameters": {}}'
    with speaking(DIALECTS["Llama"], lambda said: answer if "who" in said else call) as (client, _):
        for messages, options in (([user("who")], {}), ([user("look")], {"tools": openai.NOT_GIVEN})):
            choice = ask(client, messages, **options).choices[0]
            assert choice.message.content == (answer if "who" in messages[0]["content"] else call)
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert ask(client, [user("look")]).choices[0].finish_reason == "tool_calls"
        assert ask(client, [user("look")], tool_choice="none").choices[0].message.content == call


@pytest.mark.parametrize("cut", [1, 15, 20, 40, 52])
def test_a_call_that_was_cut_ends_as_sent_and_the_conversation_goes_on(cut: int) -> None:
    dialect = DIALECTS["Mistral, by name"]
    text = f"Well. {dialect.write(CALLS[:1])}"
    with speaking(dialect, lambda said: "And so." if "go on" in said else text) as (client, _):
        first = ask(client, [user("look")], max_tokens=cut)
        choice = first.choices[0]
        assert choice.finish_reason == "length"
        calls = choice.message.tool_calls or []
        assert bool(calls) == (cut > 15)
        written = dialect.write(CALLS[:1]).partition("[ARGS]")[2]
        assert [written.startswith(call.function.arguments) for call in calls] == [True] * len(calls)
        assert calls or text.startswith(choice.message.content)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "broken"} for call in calls]
        again = ask(client, [user("look"), choice.message, *results, user("go on")])
        assert again.choices[0].message.content == "And so."
        assert again.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


@pytest.mark.parametrize("name", [name for name in DIALECTS if "Mistral" in name])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "events"])
def test_a_tag_stands_where_it_was_sampled_though_a_stop_string_may_begin_before_it(name: str, streams: bool) -> None:
    dialect = DIALECTS[name]
    with speaking(dialect, lambda _: "So. " + dialect.write(CALLS)) as (client, _):
        options: Any = {"stop": ["weathers", ". x", "now?"]}
        if streams:
            body = {"model": "fake", "messages": [user("look")], "tools": TOOLS, "temperature": 0, **options}
            with client.chat.completions.stream(**body) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = ask(client, [user("look")], **options).choices[0].message
        assert (asked(message.tool_calls), message.content) == (CALLS, "So.")


@settings(max_examples=60)
@given(said=st.lists(st.sampled_from("ab12"), max_size=14), stop=st.sampled_from(["ab", "aab", "zz"]))
def test_tags_in_a_text_that_is_partly_held_back(said: list[str], stop: str) -> None:
    tokenizer = DIALECTS["Mistral, by name"].tokenizer()
    tags = dict(zip(tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "[ARGS]"]), ["<1>", "<2>"], strict=True))
    texts, tagged, out = TextStream(decoder(tokenizer), [], [stop]), TaggedText(tags), ""
    for each in said:
        token = list(tags)[int(each) - 1] if each.isdigit() else tokenizer.convert_tokens_to_ids(each)
        out += tagged.push(Chunk(texts.push(token), (token,), held=len(texts.held)))
        if texts.stopped_by:
            break
    out += tagged.push(Chunk("" if texts.stopped_by else texts.flush(), ()))
    left = "".join(said).replace("1", "").replace("2", "").partition(stop)[0]
    expected = ""
    for each in said:
        if each.isdigit():
            expected += f"<{each}>"
        elif left:
            expected, left = expected + left[0], left[1:]
        else:
            break
    assert out == expected
