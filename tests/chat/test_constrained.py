"""Grammars of constrained replies: random texts that they allow are parsed, and follow the schemas."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from radixkv import SamplingParams
from radixkv.chat.calls.formats import FORMATS, CallFormat
from radixkv.chat.calls.reader import split_calls
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.constrained import CallRule, constrained
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import split_thinking
from radixkv.errors import InvalidConstraint
from tests.chat.matched import accepted, drawn
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


@pytest.mark.parametrize("written", ["[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]"])
@pytest.mark.parametrize("text", ["[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}"])
def test_calls_have_ids_if_the_template_writes_them(written: str, text: str) -> None:
    mistral = DIALECTS["Mistral, by name"]
    template = of_dialect(replace(mistral, template=mistral.template.replace("[ARGS]", written)))
    given = constrained(SamplingParams(), template, CallRule(required=True), "over")
    allowed = ("CALL_ID" in written) == ("CALL_ID" in text)
    assert accepted(template.rendering.tokenizer, template.stop_ids, given, text) == allowed


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


# ---- each format of calls

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": CITY["properties"]["city"],
        "note": {"type": "string", "description": "any text"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer", "maximum": 20},
        "sure": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}, "of": CITY}}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FREE = ("note", "maybe")  # texts that a random reply does not end
NO_TEXTS = {**NESTED, "properties": {key: each for key, each in NESTED["properties"].items() if key not in FREE}}


def in_format(form: CallFormat, parameters: Any = None) -> ChatTemplate:
    schema = parameters or (NO_TEXTS if form.shape in ("tags", "own quotes") else NESTED)
    tools = [{"type": "function", "function": {"name": "trip", "parameters": schema, "strict": True}}, TOOLS[1]]
    style = STYLES["gpt-oss" if form.name == "gpt-oss" else "Qwen3"]
    tokenizer = style.tokenizer()
    return ChatTemplate(tokenizer, style.stop_ids, tools, tool_format=form.name)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_required_calls_are_written_in_each_format_and_follow_the_schema(form: CallFormat) -> None:
    template = in_format(form)
    tools = tools_by_name(template.tools)
    given, names = constrained(SamplingParams(), template, CallRule(required=True), "over"), set()
    for seed in range(3):
        text = drawn(template.rendering.tokenizer, template.stop_ids, given, seed, most=1500)
        if text is None:
            continue
        _, said = split_thinking(text, tags=template.form.thinking_tags)
        rest, calls = split_calls(said, form, tools, "0")
        assert rest == "" and calls and all(call.complete for call in calls), text
        for call in calls:
            names.add(call.name)
            jsonschema.validate(call.arguments, tools[call.name].get("parameters", {"const": {}}))
    assert names


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_voluntary_calls_in_each_format_leave_other_text_alone(form: CallFormat) -> None:
    template = in_format(form)
    given = constrained(SamplingParams(), template, CallRule(strict=frozenset({"trip"}), parallel=False), "over")
    tools = tools_by_name(template.tools)
    for seed in range(3):
        text = drawn(template.rendering.tokenizer, template.stop_ids, given, seed)
        if text is not None:
            _, said = split_thinking(text, tags=template.form.thinking_tags)
            for call in split_calls(said, form, tools, "0")[1]:
                if call.name == "trip" and call.complete:
                    jsonschema.validate(call.arguments, tools["trip"]["parameters"])


ODD = [("glm", "a b"), ("glm", "a>b"), ("qwen3-coder", 'a"b'), ("lfm2", "a=b"), ("gemma4", "a:b"), ("lfm2", "a[]")]


@pytest.mark.parametrize(
    ("name", "parameters", "place"),
    [
        ("glm", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "/properties/a/pattern"),
        ("glm", {"properties": {}, "additionalProperties": {"type": "string"}}, "/additionalProperties"),
        ("gemma4", {"properties": {"a": {"type": "string", "maxLength": 3}}}, "/properties/a/maxLength"),
        ("gemma4", {"properties": {"a": {"type": "array", "items": {"anyOf": []}}}}, "/properties/a/items"),
        ("gemma4", {"properties": {"a": {"enum": ['<|"|>']}}}, "/properties/a"),
        ("glm", {"properties": {}, "required": ["a"]}, "/required"),
        ("glm", {"properties": {"a": {"enum": ["</arg_value>"]}}}, "/properties/a"),
        ("glm", {"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [1]}]}}}, "/properties/a/enum"),
        ("kimi-k3", {"properties": {"a": {"type": ["integer", "null"]}}}, "/properties/a"),
        *((name, {"properties": {key: {"type": "null"}}}, f"/properties/{key}") for name, key in ODD),
    ],
)
def test_a_schema_that_a_format_cannot_enforce_is_refused_with_the_place(
    name: str, parameters: Any, place: str
) -> None:
    template = in_format(next(form for form in FORMATS if form.name == name), parameters)
    with pytest.raises(InvalidConstraint, match=re.escape(f"the parameters of 'trip', at #{place}")) as caught:
        constrained(SamplingParams(), template, CallRule(required=True), "over")
    assert (caught.value.parameter, caught.value.place) == ("tools.trip", place)


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("qwen3-coder", "{c}<parameter=note>\nany <b>\n text\n</parameter>\n{d}", True),
        ("qwen3-coder", "{c}<parameter=maybe>\nnull\n</parameter>\n{d}", True),
        ("qwen3-coder", "{d}{c}", False),
        ("qwen3-coder", "{c}<parameter=note>\na </parameter> b\n</parameter>\n{d}", False),
        ("qwen3-coder", "{c}", False),
        ("qwen3-coder", "<parameter=city>\nBonn\n</parameter>\n{d}", False),
        ("qwen3-coder", "{c}<parameter=other>\n1\n</parameter>\n{d}", False),
    ],
)
def test_arguments_in_tags_are_free_where_the_schema_is(name: str, text: str, allowed: bool) -> None:
    template = in_format(next(form for form in FORMATS if form.name == name), NESTED)
    given = constrained(SamplingParams(), template, CallRule(required=True), "over")
    parts = {"c": "<parameter=city>\nOslo\n</parameter>\n", "d": "<parameter=days>\n7\n</parameter>\n"}
    call = f"<tool_call>\n<function=trip>\n{text.format(**parts)}</function>\n</tool_call>"
    assert accepted(template.rendering.tokenizer, template.stop_ids, given, call) == allowed


COLORS: dict[str, Any] = {"Color": {"type": "string", "enum": ["red", "blue"]}}
OF_TYPES: list[Any] = [
    ({"$ref": "#/$defs/Color"}, ["string"]),
    ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, ["string", "null"]),
    ({"enum": ["red", None]}, ["string", "null"]),
    ({"anyOf": [{"const": "red"}, {"const": "blue"}]}, ["string"]),
    ({"enum": ["a\x7f", "\n"]}, ["string"]),
    ({"enum": [1, 2]}, ["number"]),
    ({"const": 5}, ["number"]),
    ({"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]}, ["number", "null"]),
    ({"allOf": [{"type": "integer", "maximum": 9}]}, []),
]


@pytest.mark.parametrize("form", [form for form in FORMATS if form.shape == "tags"], ids=lambda form: form.name)
@pytest.mark.parametrize(("schema", "types"), OF_TYPES, ids=str)
def test_arguments_in_tags_have_the_type_of_their_schema_or_are_refused(
    form: CallFormat, schema: Any, types: list[str]
) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": COLORS}
    template = in_format(form, whole)
    rule = CallRule(required=True, parallel=False, only=frozenset({"trip"}))
    if len(types) != 1 and ("{type}" in form.argument or ("{string}" in form.argument and "string" in types)):
        with pytest.raises(InvalidConstraint, match="the tag of an argument names one type"):
            constrained(SamplingParams(), template, rule, "over")
        return
    given = constrained(SamplingParams(), template, rule, "over")
    texts = [drawn(template.rendering.tokenizer, template.stop_ids, given, seed) for seed in range(4)]
    read = [split_calls(text, form, tools_by_name(template.tools), "0") for text in texts if text]
    assert read
    for rest, [call] in read:
        assert rest == "" and call.complete
        jsonschema.validate(call.arguments, whole)
