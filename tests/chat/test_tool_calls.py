"""Calls are parsed in each format, with any split of the stream into pieces; everything else is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixkv.chat.calls.choice import chosen
from radixkv.chat.calls.formats import HERMES, LLAMA, MISTRAL, CallFormat
from radixkv.chat.calls.reader import CallReader, split_calls
from tests.chat.worlds import CHATML, byte_tokenizer

NAMES: dict[str, dict[str, Any]] = {"weather": {}, "now": {}, "schön.suchen": {}}
Read = tuple[str, list[tuple[str, Any]]]


def read(pieces: list[str], form: CallFormat) -> Read:
    """Return the text and the calls; check the reader on the way."""
    reader = CallReader(form, NAMES, "7")
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    deltas = [part for part in parts if not isinstance(part, str)]
    assert [delta.call for delta in deltas if delta.call] == reader.calls
    for number, call in enumerate(reader.calls):
        of_call = [delta for delta in deltas if delta.number == number]
        assert {(delta.id, delta.name) for delta in of_call} == {(call.id, call.name)}
        assert "".join(delta.arguments for delta in of_call) == call.text
    assert all(parts), "an empty part says nothing"
    assert len({call.id for call in reader.calls}) == len(reader.calls)
    text = "".join(part for part in parts if isinstance(part, str))
    if all(call.complete for call in reader.calls):  # a call that was sent remains one
        assert (text, tuple(reader.calls)) == split_calls("".join(pieces), form, NAMES, "7")
    return text, [(call.name, call.arguments) for call in reader.calls]


NOW = ("now", {})


def now_hermes(text: str) -> str:
    return f'<tool_call>{{"name": "now", "arguments": {{"a": "{text}"}}}}</tool_call>'


GOOD = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{nonsense}</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "now", "arguments": 0}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>',
        f'<tool_call>{{"name": "now", "arguments": {json.dumps("[" * 5000)}}}</tool_call>',
        '<tool_call>{"name": "fly", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1e999}, "name": "now"}</tool_call>',
        '<tool_call>{"name": "fly", "arguments": {"a": "</tool_call>',
    ],
)
def test_what_is_broken_is_text_and_what_follows_is_read(text):
    assert read([text], HERMES) == (text, [])
    if not text.endswith('"</tool_call>'):
        assert read([f"{text} {GOOD}"], HERMES) == (text, [NOW])
        assert read(list(f"{text} {GOOD}!"), HERMES) == (f"{text} !", [NOW])


@pytest.mark.parametrize(
    ("form", "text", "sent", "said"),
    [
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', '{"a": ', "NaN}}</tool_call>"),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1e999}}', '{"a": ', "1e999}}"),
        (HERMES, f'<tool_call>{{"name": "now", "arguments": {{"a": {"9" * 5000}}}}}', '{"a": ', "9" * 5000 + "}}"),
        (HERMES, f'<tool_call>{{"name": "now", "arguments": {"[" * 2}', None, None),
        (HERMES, f'<tool_call>{{"name": "now", "arguments": {{"a": {"[" * 1000}', '{"a": ' + "[" * 99, "[" * 901),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>', '{"a": "</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "now", "arguments": {', "{", ""),
        (LLAMA, '{"name": "now", "parameters": {"a": "}"', '{"a": "}"', ""),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a" 1}', '{"a"', "1}"),
    ],
)
def test_a_call_that_was_opened_ends_as_sent(form, text, sent, said, caplog):
    for pieces in ([text], list(text)):
        reader = CallReader(form, NAMES, "0")
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert "".join(part for part in parts if isinstance(part, str)) == (text if sent is None else said)
        assert [(call.text, call.arguments, call.complete) for call in reader.calls] == [(sent, {}, False)][
            : sent is not None
        ]
        assert "".join(part.arguments for part in parts if not isinstance(part, str)) == (sent or "")
        assert ("broke off" in caplog.text) == (sent is not None)
    whole, calls = split_calls(text, form, NAMES, "0")
    cut = sent is not None and not said
    assert (whole, [(call.text, call.complete) for call in calls]) == (("", [(sent, False)]) if cut else (text, []))


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        (HERMES, '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', "}</tool_call>"),
        (HERMES, '<tool_call>{"name": "now", "arguments": {}} and </tool_call>', "and </tool_call>"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "now"}, 5]', ", 5]"),
    ],
)
def test_a_call_that_was_sent_stays_whatever_follows(form, text, said):
    assert read([text], form) == read(list(text), form) == (said, [NOW])


def test_a_quote_that_never_ends_does_not_hide_what_follows_nor_hold_it_back():
    text = '<tool_call>{"name": "now</tool_call>'
    reader = CallReader(HERMES, NAMES, "0")
    assert reader.push(text) == []
    *words, delta = reader.push(GOOD)
    assert ("".join(map(str, words)), [delta.call]) == (text, reader.calls)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, '<tool_call>{"name": "now", "arguments": {}}', "", [NOW]),  # the end is forgotten
        (HERMES, '<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", [NOW]),  # or cut by max_tokens
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
        (HERMES, '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', "", [NOW, NOW]),
        (HERMES, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "", [("fly", {})]),  # a tag is meant so
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', "", [("now", {"a": "x\ny"})]),
        (HERMES, now_hermes(r"C:\Users\me\u00e9\u12"), "", [("now", {"a": r"C:\Users\me" + "é" + r"\u12"})]),
        (
            HERMES,
            now_hermes(r"\ud800 \ud83d\ude00 \udc00\u0041 \ud800\u"),
            "",
            [("now", {"a": r"\ud800 😀 \udc00A \ud800\u"})],
        ),
        (HERMES, now_hermes(r"\x4 \U1F600 \'"), "", [("now", {"a": r"\x4 \U1F600 '"})]),
        (HERMES, f"One.\n{GOOD}\n\n{GOOD}\nTwo.\n", "One.\n\n\n\nTwo.", [NOW, NOW]),
        (HERMES, "<tool_call>\n<function=now>\n</function>\n</tool_call>", None, []),  # another format's
        (MISTRAL, '[TOOL_CALLS] {"name": "now", "arguments": {}}', "", [NOW]),
        (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        (MISTRAL, "[TOOL_CALLS]now[ARGS][1]", "[TOOL_CALLS]now[ARGS][1]", []),
        (MISTRAL, '[TOOL_CALLS]now[FOO]{"name": "now"}', None, []),
        (MISTRAL, f"[TOOL_CALLS]{'n' * 301}[ARGS]{{}}", None, []),
        (MISTRAL, f"[TOOL_CALLS]{'n' * 300}[ARGS]{{}}", "", [("n" * 300, {})]),
        (MISTRAL, "[TOOL_CALLS]now[ARGS]{} Done.", "Done.", [NOW]),
        (LLAMA, '<|python_tag|>now.call(zone="UTC")', None, []),
        (LLAMA, "<|python_tag|>{'name': 'now'}", None, []),
        (LLAMA, '{"name": "Nora", "parameters": {}}', None, []),  # an answer in JSON
        (LLAMA, "\n {1}", None, []),
        (LLAMA, '<|python_tag|>{"name": "fly", "parameters": {}}', "", [("fly", {})]),
        (LLAMA, '{"name": "now", "parameters": null}', "", [NOW]),
        (LLAMA, '{"name": "now", "arguments": "{}"}', "", [NOW]),
        (LLAMA, '{"name": "now", "parameters": {}}; and then', "; and then", [NOW]),
        (LLAMA, '{"name": "now", "parameters": {}} {"a": 1}', '{"a": 1}', [NOW]),
    ],
)
def test_what_models_write_besides(form, text, said, calls):
    assert read([text], form) == (text if said is None else said, calls)
    assert read(list(text), form) == (text if said is None else said, calls)


def test_text_is_held_back_only_while_it_may_be_a_call():
    reader = CallReader(HERMES, NAMES, "0")
    steps = [("So ", ["So"]), ("be", [" be"]), (" <tool", []), ("box>", [" <toolbox>"]), ("<tool_call>", [])]
    steps += [("hm", ["<tool_call>hm"]), (" <tool_call>", []), ("{", []), ("!", [" <tool_call>{!"])]
    for text, parts in steps:
        assert "".join(map(str, reader.push(text))) == "".join(parts), text
    assert reader.finish() == []
    bare = CallReader(LLAMA, NAMES, "0")
    assert bare.push(" ") == [] and bare.push("I ") == [" I"]  # no call without a tag after words
    assert bare.push("{") == [" {"]
    digits = "9" * 5000
    assert (
        CallReader(HERMES, NAMES, "0").push(f'<tool_call>{{"name": "now", "arguments": {{"a": {digits}')[-1] == digits
    )
    named = CallReader(MISTRAL, NAMES, "0")
    assert named.push("[TOOL_CALLS]I ") == []  # a name, perhaps
    assert "".join(map(str, named.push("c"))) == "[TOOL_CALLS]I c"


# ---- ids


def test_ids_are_the_same_each_time_and_others_for_other_replies():
    text = '[TOOL_CALLS] [{"name": "now"}, {"name": "now", "id": "a1B2c3D4e"}, {"name": "now", "id": "a1B2c3D4e"}]'
    ids = [[call.id for call in split_calls(text, MISTRAL, NAMES, seed)[1]] for seed in ("0", "0", "1")]
    assert ids[0] == ids[1] and len(set(ids[0] + ids[2])) == 5
    assert ids[0][1] == ids[2][1] == "a1B2c3D4e"  # the model's own, once
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids[0] + ids[2])
    named = "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]now[CALL_ID]short[ARGS]{}"
    first, second = split_calls(named, MISTRAL, NAMES, "0")[1]
    assert first.id == "123456789" and len(second.id) == 9
    assert [call.id for call in split_calls(GOOD + GOOD, HERMES, NAMES, "3")[1]] == ["call_3_0", "call_3_1"]
    named = '<tool_call>{"name": "now", "id": "a1B2c3D4e"}</tool_call>'
    assert [call.id for call in split_calls(named, HERMES, NAMES, "3")[1]] == ["call_3_0"]


# ---- which format it is


@pytest.mark.parametrize(
    ("template", "tokens", "form"),
    [
        (CHATML, (), HERMES),
        (CHATML, ("<|python_tag|>",), HERMES),  # a Llama that was trained further
        ("{{ messages }}", ("<|python_tag|>",), LLAMA),
        ("{{ messages }}", ("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
        ("{{ messages }}[TOOL_CALLS]", (), MISTRAL),
        ("{{ messages }}<|tool_box|>", ("<tool▁calls▁begin>",), None),
        ("{{ messages }}", (), None),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>"}, (), HERMES),
        (None, (), None),
    ],
)
def test_the_format_is_the_templates_or_else_the_vocabularys(template, tokens, form):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    assert chosen(tokenizer, None) is form
