"""Grammars of constrained replies: random texts that they allow are parsed, and follow the schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from radixkv import SamplingParams
from radixkv.chat.constrained import CallRule, constrained, strict_tools
from radixkv.chat.reply_parser import split_calls
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import split_thinking
from radixkv.chat.tool_call_formats import HERMES
from radixkv.errors import InvalidConstraint
from tests.chat.matched import drawn
from tests.chat.styles import STYLES, Style
from tests.chat.tool_call_dialects import DIALECTS, Dialect
from tests.selection import mostly_long

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", 'Rio "R"', "</tool"]}, "days": {"type": "integer", "maximum": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": CITY, "now": {"const": {}}}
ASKED = [{"role": "user", "content": "Where?"}]


def of_dialect(dialect: Dialect, tools: Any = TOOLS) -> ChatTemplate:
    return ChatTemplate(dialect.tokenizer(), dialect.stops(), tools)


def replies(template: ChatTemplate, rule: CallRule, params: SamplingParams, count: int = 8) -> list[str]:
    """Return random whole replies to a prompt."""
    state = template.thinking_at(template.opening(ASKED))
    given = constrained(params, template, rule, state)
    texts = [drawn(template.rendering.tokenizer, template.stop_ids, given, seed) for seed in range(count)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > count // 2
    return whole


def calls_of(text: str, template: ChatTemplate) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    _, said = split_thinking(text, tags=template.form.thinking_tags)
    rest, calls = split_calls(said, template.call_format or HERMES, {"weather", "now"}, "0")
    return rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", mostly_long(DIALECTS, "Qwen", "Mistral, by name"))
def test_required_calls_follow_the_schemas_of_their_tools(name: str) -> None:
    template, counts = of_dialect(DIALECTS[name]), set()
    for text in replies(template, CallRule(required=True), SamplingParams(), 16):
        rest, calls = calls_of(text, template)
        assert rest == "" and calls, text
        counts.add(len(calls))
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called])
    assert (max(counts) > 1) == (DIALECTS[name].most_calls > 1)


@pytest.mark.parametrize("name", mostly_long(DIALECTS, "Llama"))
@pytest.mark.parametrize(
    "rule",
    [CallRule(required=True, parallel=False), CallRule(required=True, parallel=False, only=frozenset({"weather"}))],
)
def test_one_call_is_required(name: str, rule: CallRule) -> None:
    template = of_dialect(DIALECTS[name])
    for text in replies(template, rule, SamplingParams()):
        rest, [(called, arguments)] = calls_of(text, template)
        assert rest == "" and called in (rule.only or {"weather", "now"})
        jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("name", mostly_long(DIALECTS, "Mistral, a list"))
def test_voluntary_calls_of_strict_tools_follow_their_schemas(name: str) -> None:
    template, said, called = of_dialect(DIALECTS[name]), 0, 0
    rule = CallRule(strict=strict_tools(TOOLS))
    given = constrained(SamplingParams(), template, rule, "over")
    for seed in range(30):
        text = drawn(template.rendering.tokenizer, template.stop_ids, given, seed)
        rest, calls = calls_of(text or "", template)
        said, called = said + bool(rest), called + len(calls)
        for tool, arguments in calls:
            if tool == "weather":
                jsonschema.validate(arguments, CITY)
    assert said


ANSWERS = {
    "schema": SamplingParams(json_schema=PERSON),
    "regex": SamplingParams(regex="[a-c]{2,5}/|x{1,2}"),
    "grammar": SamplingParams(
        grammar='start: "(" item{1,3} ")"\nitem: "a" | %json {"enum": ["}", 1]} | /[xy]{1,2}/ // }'
    ),
    "choice": SamplingParams(choice=['"yes"', "no", "</think>"]),
}


def assert_follows(kind: str, answer: str) -> None:
    match kind:
        case "schema":
            jsonschema.validate(json.loads(answer), PERSON)
        case "regex":
            assert re.fullmatch("[a-c]{2,5}/|x{1,2}", answer)
        case "grammar":
            assert re.fullmatch(r'\((a|"}"|1|[xy]{1,2}){1,3}\)', answer)
        case "choice":
            assert answer in ('"yes"', "no", "</think>")


@pytest.mark.parametrize("kind", mostly_long(ANSWERS, "schema"))
@pytest.mark.parametrize("style", mostly_long(STYLES.values(), STYLES["Qwen3"]), ids=repr)
def test_the_answer_follows_the_constraint_after_free_thinking(style: Style, kind: str) -> None:
    template = ChatTemplate(style.tokenizer(), style.stop_ids)
    prompt = template.opening(ASKED)
    thoughts = set()
    for text in replies(template, CallRule(), ANSWERS[kind], 12):
        thinking, answer = split_thinking(
            text, opened=template.opens_thinking(prompt), tags=template.form.thinking_tags
        )
        assert_follows(kind, answer)
        thoughts.add(bool(thinking))
    assert (True in thoughts) == (template.form.thinking_in is not None)


def test_the_reply_is_an_answer_or_calls() -> None:
    template = of_dialect(DIALECTS["Qwen"])
    kinds = set()
    for text in replies(template, CallRule(), SamplingParams(json_schema=PERSON), 12):
        rest, calls = calls_of(text, template)
        assert bool(rest) != bool(calls)
        kinds.add(bool(calls))
        if rest:
            jsonschema.validate(json.loads(rest), PERSON)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("parameters", "place", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not", "at #/properties/a/not"),
        ({"type": "string"}, "/type", "at #/type: the arguments of a tool are an object"),
    ],
)
def test_a_schema_of_a_tool_that_cannot_be_enforced_is_refused(parameters: Any, place: str, words: str) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    template = of_dialect(DIALECTS["Qwen"], tools)
    with pytest.raises(InvalidConstraint, match=f"the parameters of 'odd', {re.escape(words)}") as caught:
        constrained(SamplingParams(), template, CallRule(required=True), "over")
    assert (caught.value.parameter, caught.value.place) == ("tools.odd", place)
    assert constrained(SamplingParams(), template, CallRule(required=True, only=frozenset({"now"})), "over").constraint
    assert constrained(SamplingParams(), template, CallRule(parallel=False), "over").constraint  # any object
