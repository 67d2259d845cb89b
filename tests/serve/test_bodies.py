"""A wrong body is refused with a sentence that names the field; fields without effect are accepted."""

from __future__ import annotations

import json
import re

import pytest

from radixkv.chat.calls.values import DEEPEST
from radixkv.serve import Settings
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import parse_object
from tests.serve.served import ASKED, CHAT, read_messages, served

_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
UNKNOWN = [
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]}, "messages[0].content[0].a"),
    ({"stream": True, "stream_options": {"include_cost": True}}, "stream_options.include_cost"),
    ({"tools": [{"type": "function", "function": _FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "function", "function": {**_FUNCTION, "mood": "good"}}]}, "tools[0].function.mood"),
    ({"temprature": 1}, "temprature"),
    ({"options": {"num_ctx": 4096}}, "options"),
]
# Known fields whose values have no effect.
WITHOUT_EFFECT = [
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"enabled": True, "exclude": False}}, "reasoning.enabled"),
    ({"thinking": {"type": "disabled"}}, "thinking"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs.tone"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
    ({"verbosity": "low"}, "verbosity"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
]


def test_values_without_effect_are_named_in_a_warning_and_refused_by_a_strict_server():
    with served() as server, served(Settings(strict_fields=True)) as strict:
        for change, path in WITHOUT_EFFECT:
            answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **change})
            assert answer.status_code == 200, answer.text
            assert answer.headers["warning"] == f'299 radixkv "ignored: {path}"'
            refused = strict.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **change})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == path, refused.text


def test_n_predict_of_llama_cpp_limits_a_reply():
    """llama.vim sends 0 while a person writes an instruction, so that the prompt is cached, and reads no reply."""
    with served() as server:
        unlimited = server.chat()["usage"]["completion_tokens"]
        for limit, tokens in ((0, 1), (3, 3), (-1, unlimited)):
            answer = server.post("/v1/chat/completions", {**CHAT, "n_predict": limit})
            assert answer.json()["usage"]["completion_tokens"] == tokens and "warning" not in answer.headers
        assert server.chat(n_predict=3, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_normal_traffic_of_clients_has_no_warning():
    """LiteLLM sends back fields of its own, and some clients send empty texts for none."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    more = {"provider_specific_fields": {"refusal": None}}
    said = {"role": "assistant", "content": None, "tool_calls": [{**call, **more}], **more}
    asked = {**CHAT, "max_tokens": 2, "messages": [*ASKED, said, {"role": "tool", "content": "x", "tool_call_id": "a"}]}
    with served() as server:
        answers = [server.post("/v1/chat/completions", {**asked, "stop": ""})]
        text = {"model": "fake", "prompt": "Hi", "temperature": 0}
        answers += [server.post("/v1/completions", {**text, **none}) for none in ({}, {"stop": "", "suffix": ""})]
        assert all(each.status_code == 200 and "warning" not in each.headers for each in answers)
        assert answers[1].json()["choices"] == answers[2].json()["choices"]


def test_unknown_fields_are_named_in_a_warning_and_in_the_log(caplog):
    caplog.set_level("INFO", "radixkv.serve")
    with served() as server:
        for change, path in UNKNOWN:
            answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, **change})
            assert answer.status_code == 200, answer.text
            assert answer.headers["warning"] == f'299 radixkv "ignored: {path}"'
            assert caplog.records[-1].getMessage().endswith(f" ignored={path}")
        for path, body in [("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/tokenize", {"prompt": "x"})]:
            answer = server.post(path, {"model": "fake", **body, "one": 1, "two": {"three": 3}, "four": None})
            assert answer.status_code == 200 and answer.headers["warning"] == '299 radixkv "ignored: one, two"'
            assert "warning" not in server.post(path, {"model": "fake", **body, "four": None}).headers


def test_hints_on_messages_and_tools_change_no_prompt_and_warn_of_nothing():
    hint = {"cache_control": {"type": "ephemeral"}}
    said = {"role": "assistant", "content": "Hi."}
    plain = [*ASKED, said, *ASKED]
    marked = [ASKED[0] | hint, said | hint, ASKED[0] | hint]
    tools = [{"type": "function", "function": _FUNCTION}]
    with served(Settings(strict_fields=True)) as server:
        bodies = [{"messages": plain, "tools": tools}, {"messages": marked, "tools": [tools[0] | hint]}]
        found = [server.post("/tokenize", body) for body in bodies]
    assert found[0].json() == found[1].json() and "warning" not in found[1].headers


def test_reasoning_of_a_message_is_its_thinking():
    said = {"role": "assistant", "content": "Hi."}
    forms = [{"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"reasoning_content": "Hm.", "reasoning": "So?"}]
    found = [read_messages([{**said, **form}]) for form in forms]
    assert found == [[{**said, "reasoning_content": "Hm."}]] * 3


def test_a_strict_server_refuses_unknown_fields():
    with served(Settings(strict_fields=True)) as server:
        for change, path in [*UNKNOWN, ({"temprature": None}, "temprature")]:
            answer = server.post("/v1/chat/completions", {**CHAT, **change})
            assert answer.status_code == 400 and "warning" not in answer.headers, answer.text
            assert answer.json()["error"]["param"] == path and answer.json()["error"]["code"] == "unknown_parameter"
        assert server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2.0}).status_code == 200


def test_a_warning_is_bounded_and_safe_in_a_header():
    many = {f"field{at}": 1 for at in range(1000)}
    odd = {'a"b\\c\r\nset-cookie: x': 1, "\u00e9": 1, "x" * 5000: 1, "\U0001f600": 1}
    moods = [{"role": "user", "content": "x", "mood": at} for at in range(20)]
    with served() as server:
        found = server.post("/tokenize", {"prompt": "x", **many}).headers["warning"]
        assert found.endswith(' field14, field15, ..."') and len(found) < 300
        answer = server.post("/tokenize", {"prompt": "x", **odd})
        assert answer.status_code == 200 and "set-cookie" not in answer.headers
        assert re.fullmatch(r'299 radixkv "ignored: [A-Za-z0-9_.\[\]?, -]*"', answer.headers["warning"])
        assert len(answer.headers["warning"]) < 200
        once = server.post("/tokenize", {"messages": moods}).headers["warning"]
        assert once == '299 radixkv "ignored: messages[0].mood"'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
def test_what_is_no_json_object(body):
    with pytest.raises(ApiError) as refused:
        parse_object(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_what_is_nested_too_deeply_is_named():
    path = "/tokenize"

    def nested(depth):
        inner = {"type": "string"}
        for _ in range(depth):
            inner = {"items": inner}
        return inner

    def tools(depth):
        return [{"type": "function", "function": {"name": "f", "parameters": nested(depth)}}]

    with served() as server:
        deep = server.post(path, {"model": "fake", "messages": ASKED, "tools": tools(600)})
        fits = server.post(path, {"model": "fake", "messages": ASKED, "tools": tools(DEEPEST - 4)})
        over = server.post(path, {"model": "fake", "messages": ASKED, "tools": tools(DEEPEST - 3)})
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(nested(600))}}
        told = server.post(path, {"model": "fake", "messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}]})
    for answer in (deep, over):
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "tools" and f"more than {DEEPEST} deep" in error["message"]
    assert fits.status_code == 200, fits.text
    assert told.status_code in (200, 400) and "recursion" not in told.text, told.text


def test_what_only_the_engine_or_the_template_can_tell():
    with served() as server:
        for path, body, param in [
            ("/v1/completions", {"prompt": [5000]}, "prompt"),
            ("/v1/completions", {"prompt": "x", "stop_token_ids": [5000]}, "stop_token_ids"),
            ("/v1/completions", {"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias"),
            ("/v1/completions", {"prompt": "x", "min_tokens": 17}, "min_tokens"),
            ("/v1/completions", {"prompt": "x", "n": 100}, "n"),
            ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
            ("/tokenize", {"messages": ASKED * 3000}, "messages"),
        ]:
            answer = server.post(path, {"model": "fake", **body})
            assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
            assert answer.json()["error"]["param"] == param, answer.text
            assert answer.json()["error"]["code"] in ("invalid_value", "context_length_exceeded"), answer.text
