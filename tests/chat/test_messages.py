"""Messages without a role or without text: what is refused, by which index, and what is written."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import SamplingParams
from radixkv.errors import InvalidInput
from tests.chat.worlds import chat_engine

GREEDY = SamplingParams(temperature=0, max_tokens=4)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "seen"}

_END = "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
# The ways in which templates write content.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '!' if m.tool_calls }}\n" + _END
ADDS = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ '!' if m.tool_calls }}\n" + _END
SKIPS = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ '!' if m.tool_calls }}\n" + _END
GETS = "{% for m in messages %}{{ m.role }}: {{ m.get('content') }}{{ '!' if m.tool_calls }}\n" + _END


def text_of(template: str, messages: list[Any]) -> str:
    with chat_engine(template=template) as engine:
        prompt = engine.client.inputs.encode(messages, reply=True)
        with engine.chat(messages=messages[:-1]) as chat:
            chat.send(messages[-1]["content"], GREEDY)
            assert chat.token_ids[: len(prompt)] == prompt.tolist()  # a session writes the same
        return str(engine.model.tokenizer.decode(prompt.tolist()))


@pytest.mark.parametrize("wrong", [{"content": "x"}, {"role": None, "content": "x"}, {"role": "", "content": "x"}, {}])
def test_a_message_without_a_role_is_refused_by_its_index(wrong: dict[str, Any]) -> None:
    with chat_engine() as engine:
        for ask in (engine.submit, engine.warm, engine.probe, lambda messages: engine.chat(messages=messages)):
            with pytest.raises(InvalidInput, match="message 2 has no role"):
                ask([USER, {"role": "assistant", "content": "y"}, wrong])


@pytest.mark.parametrize("wrong", ["look", [None], ["look"], [{"function": "look"}], {"name": "look"}, 1])
def test_tool_calls_that_are_no_list_of_objects_are_refused_by_the_index(wrong: object) -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": wrong}]
    with chat_engine() as engine:
        for ask in (engine.submit, lambda messages: engine.chat(messages=messages)):
            with pytest.raises(InvalidInput, match="message 1 has tool_calls that are no list of dicts"):
                ask(messages)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("template", [GETS, ADDS])
@pytest.mark.parametrize("wrong", [{"content": None}, {}])
def test_content_of_none_that_the_template_cannot_write_is_refused_by_its_index(
    role: str, template: str, wrong: dict[str, Any]
) -> None:
    messages = [USER, CALLS, RESULT, {"role": role, **wrong}, USER]
    with chat_engine(template=template) as engine:
        with pytest.raises(InvalidInput, match="message 3 has no content"):
            engine.submit(messages, GREEDY)
        with engine.chat(messages=messages[:-1]) as chat, pytest.raises(InvalidInput, match="message 3 has no content"):
            chat.send("hi")


@pytest.mark.parametrize("template", [PLAIN, ADDS, GETS, SKIPS])
def test_none_with_calls_is_written_as_an_empty_text(template: str) -> None:
    said = text_of(template, [USER, CALLS, RESULT, USER])
    assert said == "user: hi\nassistant: !\ntool: seen\nuser: hi\nassistant:"
    without = {name: value for name, value in CALLS.items() if name != "content"}
    assert text_of(template, [USER, without, RESULT, USER]) == said


@pytest.mark.parametrize("template", [SKIPS, PLAIN])
def test_none_without_calls_is_taken_by_a_template_that_can_write_it(template: str) -> None:
    said = text_of(template, [USER, {"role": "assistant", "content": None}, USER])
    assert said == "user: hi\nassistant: \nuser: hi\nassistant:"


def test_tools_in_the_system_prompt_do_not_shift_the_index() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with chat_engine(template=ADDS) as engine:
        chat = engine.chat(messages=[USER, {"role": "assistant", "content": None}], tools=tools)
        with pytest.raises(InvalidInput, match="message 1 has no content"):
            chat.send("x")
