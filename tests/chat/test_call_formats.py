# ruff: noqa: RUF001 - DeepSeek's control tokens have wide bars
"""Calls of each family are read as the family writes them, whole and in pieces, and streamed as they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.chat.calls.formats import FORMATS, CallFormat
from radixkv.chat.calls.reader import CallReader, split_calls

KINDS = {"text": "string", "count": "integer", "share": "number", "sure": "boolean", "many": "array", "more": "object"}
PARAMETERS = {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}}
TOOLS: dict[str, dict[str, Any]] = {"look_up": {"parameters": PARAMETERS}, "now": {}}
BY_NAME = {form.name: form for form in FORMATS}
Calls = list[tuple[str, dict[str, Any]]]


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """A value between tags: a text as it is, others as JSON."""
    return value if isinstance(value, str) else written(value)


def quoted(value: Any, quote: str) -> str:
    """A value with bare keys, and a quote of its own."""
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{quoted(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(quoted(each, quote) for each in value) + "]"
    return written(value)


def objects(calls: Calls, name: str = "name", arguments: str = "arguments") -> list[str]:
    return [written({name: called, arguments: given}) for called, given in calls]


def inside(call: str, argument: str) -> Callable[[Calls], list[str]]:
    """How a family with tags writes calls: `{n}`, `{a}` and `{k}`, `{v}` stand for name, arguments, key, value."""

    def write(calls: Calls) -> list[str]:
        rows = [
            (name, "".join(argument.replace("{k}", key).replace("{v}", plain(value)) for key, value in given.items()))
            for name, given in calls
        ]
        return [call.replace("{n}", name).replace("{a}", text) for name, text in rows]

    return write


def headed(call: str) -> Callable[[Calls], list[str]]:
    return lambda calls: [call.replace("{n}", name).replace("{a}", written(given)) for name, given in calls]


def python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]


def parted(tag: str, end: str, write: Callable[[Calls], list[str]] = objects) -> Callable[[Calls], str]:
    return lambda calls: "\n".join(f"{tag}{call}{end}" for call in write(calls))


def joined(
    start: str, end: str, write: Callable[[Calls], list[str]] = objects, between: str = "\n"
) -> Callable[[Calls], str]:
    return lambda calls: start + between.join(write(calls)) + end


def of_cohere(calls: Calls) -> str:
    rows = [{"tool_call_id": str(at), "tool_name": name, "parameters": given} for at, (name, given) in enumerate(calls)]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(map(written, rows)) + "\n]<|END_ACTION|>"


QWEN3_CODER = inside("\n<function={n}>\n{a}</function>", "<parameter={k}>\n{v}\n</parameter>\n")
SEED = inside("\n<function={n}>\n{a}</function>", "<parameter={k}>{v}</parameter>\n")
GLM = inside("{n}\n{a}", "<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n")
KIMI = headed("<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{a}<|tool_call_end|>")
V3 = headed("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>")
V31 = headed("<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{a}<｜tool▁call▁end｜>")
SOLAR = headed("<|tool_call:begin|>c1<|tool_call:name|>{n}<|tool_call:args|>{a}<|tool_call:end|>")
MINIMAX = inside('\n<invoke name="{n}">\n{a}</invoke>', '<parameter name="{k}">{v}</parameter>\n')
HUNYUAN = inside(
    "\n<tool_call:opensource>{n}<tool_sep:opensource>\n{a}</tool_call:opensource>",
    "<arg_key:opensource>{k}</arg_key:opensource>\n<arg_value:opensource>{v}</arg_value:opensource>\n",
)


def of_kimi_k3(calls: Calls) -> list[str]:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return [
        f'<|open|>call tool="{name}" index="1"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
            for key, value in given.items()
        )
        + "<|close|>call<|sep|>"
        for name, given in calls
    ]


def of_dsml(calls: Calls) -> list[str]:
    tag = "｜DSML｜"
    return [
        f'\n<{tag}invoke name="{name}">\n'
        + "".join(
            f'<{tag}parameter name="{key}" string="{is_text}">{plain(value)}</{tag}parameter>\n'
            for key, value in given.items()
            for is_text in [str(isinstance(value, str)).lower()]
        )
        + f"</{tag}invoke>"
        for name, given in calls
    ]


def in_quotes(tag: str, quote: str, end: str) -> Callable[[Calls], str]:
    return lambda calls: "".join(f"{tag}call:{name}{quoted(given, quote)}{end}" for name, given in calls)


# How the models of each family write calls: from the words of their model cards and templates.
WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": parted("<tool_call>\n", "\n</tool_call>"),
    "mistral": parted("[TOOL_CALLS]", "", headed("{n}[ARGS]{a}")),
    "llama": lambda calls: "; ".join(objects(calls, arguments="parameters")),
    "nemotron": joined("<TOOLCALL>[", "]</TOOLCALL>", between=", "),
    "tool_calls": joined("<tool_calls>\n", "\n</tool_calls>"),
    "granite": joined("<|tool_call|>[", "]", between=", "),
    "phi-4-mini": joined("<|tool_call|>[", "]<|/tool_call|>", between=", "),
    "cohere": of_cohere,
    "apertus": lambda calls: f"<|tools_prefix|>{written([{name: given} for name, given in calls])}<|tools_suffix|>",
    "gigachat": parted("<|function_call|>", ""),
    "gigachat-role": parted("function call<|role_sep|>\n", ""),
    "kimi-k2": joined("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", KIMI, ""),
    "deepseek-v3": joined("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", V3),
    "deepseek-v3.1": joined("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", V31, ""),
    "solar": joined("<|tool_calls|>", "<|calls|>", SOLAR, ""),
    "functionary-v3.1": parted("", "", headed("<function={n}>{a}</function>")),
    "gpt-oss": joined(
        "", "", headed("<|start|>assistant to=functions.{n}<|channel|>commentary json<|message|>{a}<|call|>")
    ),
    "qwen3-coder": parted("<tool_call>", "\n</tool_call>", QWEN3_CODER),
    "seed-oss": parted("<seed:tool_call>", "\n</seed:tool_call>", SEED),
    "glm": parted("<tool_call>", "</tool_call>", GLM),
    "hunyuan": joined("<tool_calls:opensource>", "\n</tool_calls:opensource>", HUNYUAN),
    "minimax-m2": joined("<minimax:tool_call>", "\n</minimax:tool_call>", MINIMAX, ""),
    "minicpm": parted(
        "", "", inside('<function name="{n}">{a}</function>', '<param name="{k}"><![CDATA[{v}]]></param>')
    ),
    "kimi-k3": joined("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", of_kimi_k3, ""),
    "deepseek-v3.2": joined("<｜DSML｜function_calls>", "\n</｜DSML｜function_calls>", of_dsml, ""),
    "deepseek-v4": joined("<｜DSML｜tool_calls>", "\n</｜DSML｜tool_calls>", of_dsml, ""),
    "lfm2": joined("<|tool_call_start|>[", "]<|tool_call_end|>", python, ", "),
    "olmo3": joined("<function_calls>\n", "\n</function_calls>", python),
    "llama4": joined("[", "]", python, ", "),
    "gemma4": in_quotes("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": in_quotes("<start_function_call>", "<escape>", "<end_function_call>"),
}

HARD = ['"', "'", "\\", *"{}[](),:", "\n", "é", "🎈", " ", "<", "</", "<tool_call>", "123", "True"]
WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
    st.lists(st.sampled_from(HARD), max_size=6).map("".join),
)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.sampled_from(["a", "b_1", "größe"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "many": st.lists(VALUES, max_size=3),
        "more": st.dictionaries(KEYS, VALUES, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.just("look_up"), ARGUMENTS), min_size=1, max_size=3)


def read(form: CallFormat, text: str, size: int) -> tuple[str, Calls]:
    """Read a text in pieces; the deltas of each call are its text, in order."""
    reader = CallReader(form, TOOLS, "7")
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])] + reader.finish()
    deltas = [part for part in parts if not isinstance(part, str)]
    assert [delta.call for delta in deltas if delta.call] == reader.calls
    assert all(first.number <= second.number for first, second in pairwise(deltas))
    for number, call in enumerate(reader.calls):
        of_call = [delta for delta in deltas if delta.number == number]
        assert {(delta.id, delta.name) for delta in of_call} == {(call.id, call.name)}
        assert "".join(delta.arguments for delta in of_call) == call.text
        assert not call.complete or json.loads(call.text) == call.arguments
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [(call.name, call.arguments) for call in reader.calls]


def test_each_family_has_a_writer() -> None:
    assert WRITERS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=8, deadline=None)
@given(CALLS, st.integers(1, 7))
def test_calls_of_each_family_are_read_as_written(family: str, calls: Calls, size: int) -> None:
    form = BY_NAME[family]
    # A text that holds the closing tag cannot be told from its end, and a bare key is one word.
    hidden = {"tags": "</", "own quotes": "größe"}.get(form.shape)
    if hidden is not None:
        calls = [(name, {key: each for key, each in given.items() if hidden not in str(each)}) for name, given in calls]
    text = WRITERS[family](calls)
    assert read(form, text, len(text)) == ("", calls)
    assert read(form, text, size) == ("", calls)


# ---- values, broken calls and cost

TEXTS = [
    ("text", "123", "123"),
    ("text", "True", "True"),
    ("text", " a\n", " a\n"),
    ("count", "123", 123),
    ("count", "a few", "a few"),
    ("sure", "True", True),
    ("sure", "true", True),
    ("more", "{'a': None}", {"a": None}),
    ("many", '["1", 2]', ["1", 2]),
    ("many", "[1, 2", "[1, 2"),
    ("many", "[" * 1000, "[" * 1000),
    ("unknown", "7", 7),
    ("unknown", "seven", "seven"),
    ("either", "7", "7"),
    ("either", "null", None),
    ("size", "XL", "XL"),
    ("size", "4", "4"),
    ("odd", "1", 1),
]
EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMA = {
    "properties": {**PARAMETERS["properties"], "either": EITHER, "size": {"$ref": "#/$defs/size"}, "odd": {"type": 3}},
    "$defs": {"size": {"enum": ["XL", "4"]}, "loop": {"$ref": "#/$defs/loop"}},
}


@pytest.mark.parametrize(("key", "text", "value"), TEXTS)
def test_a_value_without_a_type_takes_it_from_the_schema(key: str, text: str, value: Any) -> None:
    call = f"<tool_call>\n<function=look_up>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for size in (1, 3, len(call)):
        reader = CallReader(BY_NAME["qwen3-coder"], {"look_up": {"parameters": SCHEMA}}, "0")
        for at in range(0, len(call), size):
            reader.push(call[at : at + size])
        assert (reader.finish(), [each.arguments for each in reader.calls]) == ([], [{key: value}])


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=8, deadline=None)
@given(CALLS, st.data())
def test_random_and_broken_texts_never_raise_and_what_is_no_call_stays(
    family: str, calls: Calls, data: st.DataObject
) -> None:
    form, text = BY_NAME[family], WRITERS[family](calls)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    junk = data.draw(st.lists(st.sampled_from([*HARD, *form.tags, "look_up", text[:9]]), max_size=5).map("".join))
    text = text[:start] + junk + text[end:]
    said, found = read(form, text, len(text) or 1)
    assert read(form, text, 1) == read(form, text, 3) == (said, found)
    assert found or said == text


@pytest.mark.parametrize(
    ("family", "text", "said", "calls"),
    [
        (
            "hermes",
            '<tool_call>{"function": {"name": "now", "arguments": {}}, "arguments": {"a": 1}}',
            "",
            [("now", {})],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "parameters": {"a": 1}}', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "parameters": {"a": 1}, "arguments": {}}', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "parameters": {"a": 1}, "meta": {}}', "", [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now", "args": {"a": 1}}</tool_call>', None, []),
        ("glm", "I use <tool_call>x</tool_call> tags.", None, []),
        ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
        ("kimi-k2", WRITERS["kimi-k2"]([("mcp:go", {})]), "", [("mcp:go", {})]),
        ("hermes", "<tool_call>" + '{"function": ' * 5000, None, []),
        ("apertus", '<|tools_prefix|>[{"now": {}, "now": {}}]', "{}}]", [("now", {})]),
    ],
)
def test_odd_calls_are_read_or_stay_text(family: str, text: str, said: str | None, calls: Calls) -> None:
    for size in (1, len(text)):
        assert read(BY_NAME[family], text, size) == (text if said is None else said, calls)


MANY = 20_000


@pytest.mark.parametrize(
    ("family", "begun", "again"),
    [
        ("hermes", "", "<tool_call>{"),
        ("hermes", "", '<tool_call>{"name": "fly", "arguments": {"a": "'),
        ("qwen3-coder", "", "<tool_call><function=fly><parameter=a>"),
        ("gpt-oss", "", " to=functions."),
        ("llama", "", "{"),
        ("lfm2", "<|tool_call_start|>[look_up(a=", "["),
        ("gemma4", "<|tool_call>call:look_up{", "a:{"),
    ],
)
def test_each_character_is_read_a_few_times_at_most(family: str, begun: str, again: str) -> None:
    """A cost that grew with the square of the text would take minutes."""
    text = begun + again * MANY
    assert split_calls(text, BY_NAME[family], TOOLS, "0") == (text, ())


def test_a_closing_tag_without_its_line_break_costs_no_search_to_the_end() -> None:
    """A cost that grew with the square of the text would take minutes."""
    text = "<tool_call><function=look_up>" + "<parameter=text>1</parameter>" * 8_000 + "</function></tool_call>"
    said, (call,) = split_calls(text, BY_NAME["qwen3-coder"], TOOLS, "0")
    assert (said, call.complete, call.text.count('"text": "1"')) == ("", True, 8_000)


def test_long_arguments_are_sent_while_they_are_read() -> None:
    reader = CallReader(BY_NAME["hermes"], TOOLS, "0")
    assert reader.push('<tool_call>\n{"name": "look_up", "arguments"') == []
    [opening] = reader.push(': {"text": "')
    assert (opening.number, opening.name, opening.arguments, opening.call) == (0, "look_up", '{"text": "', None)  # type: ignore[union-attr]
    piece = "eight by" * 1024
    for _ in range(1024):
        [delta] = reader.push(piece)
        assert not isinstance(delta, str) and delta.arguments == piece
    *_, last = reader.push('"}}</tool_call>')
    assert not isinstance(last, str) and last.call is not None
    assert last.call.arguments == {"text": piece * 1024}
    assert reader.finish() == []
