"""Constrained replies over HTTP: formats, forced calls and vLLM's fields of each API, and the errors of schemas."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from radixkv.grammar import compiler, constraint
from radixkv.serve import Settings
from tests.chat.styles import STYLES
from tests.grammar.engines import RandomRunner
from tests.selection import mostly_long
from tests.serve.served import ASKED, Served, fake_model, served

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOK = {"name": "look", "description": "Look.", "parameters": SCHEMA}
WAIT = {"name": "wait", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
BAD = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
AT = "at #/properties/a~1b/uniqueItems: uniqueItems cannot be enforced"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(runner_class=RandomRunner, num_blocks=2000) as found:
        yield found


def body(path: str, **fields: Any) -> dict[str, Any]:
    """Return a request; tools in the form of chat completions are converted to that of the endpoint."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt = {TEXT: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}.get(path, {"messages": ASKED})
    given = {"model": "fake", limit: 200, "seed": 3, **prompt, **fields}
    if functions := given.pop("functions", None):
        given["tools"] = [tool(path, each) for each in functions]
    return given


def tool(path: str, function: dict[str, Any]) -> dict[str, Any]:
    if path == RESPONSES:
        return {"type": "function", **function}
    if path == MESSAGES:
        rest = {name: value for name, value in function.items() if name != "parameters"}
        return {**rest, "input_schema": function["parameters"]}
    return {"type": "function", "function": function}


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of a whole reply without calls, from each API's own form."""
    if "choices" in answer:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop" and not choice.get("message", {}).get("tool_calls")
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if answer.get("object") == "response":
        assert answer["status"] == "completed"
        return str(answer["output"][0]["content"][0]["text"])
    assert answer["stop_reason"] == "end_turn"
    return str(answer["content"][0]["text"])


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the calls of a whole reply that has nothing else."""
    if "choices" in answer:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(each["name"], json.loads(each["arguments"])) for each in functions]
    if answer.get("object") == "response":
        assert answer["status"] == "completed" and {item["type"] for item in answer["output"]} == {"function_call"}
        return [(item["name"], json.loads(item["arguments"])) for item in answer["output"]]
    assert answer["stop_reason"] == "tool_use" and {block["type"] for block in answer["content"]} == {"tool_use"}
    return [(block["name"], block["input"]) for block in answer["content"]]


def post(server: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, body(path, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


_NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
FORMATS = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": _NAMED}}),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **_NAMED}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    *[(path, {"guided_json": SCHEMA}) for path in (CHAT, TEXT, RESPONSES, MESSAGES)],
    *[(path, {"structured_outputs": {"json": json.dumps(SCHEMA)}}) for path in (CHAT, TEXT, RESPONSES, MESSAGES)],
]


@pytest.mark.parametrize(("path", "fields"), FORMATS)
def test_replies_follow_a_schema(server: Served, path: str, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text_of(post(server, path, **fields))), SCHEMA)


@pytest.mark.parametrize("path", mostly_long([CHAT, TEXT, RESPONSES, MESSAGES], CHAT, TEXT))
def test_replies_follow_other_constraints(server: Served, path: str) -> None:
    for fields in ({"guided_regex": "[a-c]{3}"}, {"structured_outputs": {"regex": "[a-c]{3}"}}):
        reply = text_of(post(server, path, **fields))
        assert len(reply) == 3 and {*reply} <= {*"abc"}
    for fields in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert text_of(post(server, path, **fields)) in ("yes", "no")
    for grammar in ('start: "a" /[xyz]{1,2}/', 'root ::= "a" tail\ntail ::= [x-z]{1,2}'):
        for fields in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
            reply = text_of(post(server, path, **fields))
            assert reply[0] == "a" and 2 <= len(reply) <= 3 and {*reply[1:]} <= {*"xyz"}
    assert isinstance(json.loads(text_of(post(server, path, structured_outputs={"json_object": True}))), dict)


FORCED = {
    CHAT: ("required", {"type": "function", "function": {"name": "look"}}),
    RESPONSES: ("required", {"type": "function", "name": "look"}),
    MESSAGES: ({"type": "any"}, {"type": "tool", "name": "look"}),
}


@pytest.mark.parametrize("path", FORCED)
def test_calls_are_forced(server: Served, path: str) -> None:
    required, named = FORCED[path]
    schemas = {"look": SCHEMA, "wait": WAIT["parameters"]}
    for seed in range(2):
        more = {"functions": [LOOK, WAIT], "seed": seed}
        for name, arguments in calls_of(post(server, path, tool_choice=required, **more)):
            jsonschema.validate(arguments, schemas[name])
        [(name, arguments)] = calls_of(post(server, path, tool_choice=named, **more))
        assert name == "look"
        jsonschema.validate(arguments, SCHEMA)


def test_one_call_at_most(server: Served) -> None:
    bias = {"1534": 30}  # the tag of a call
    alone = {CHAT: {"parallel_tool_calls": False}, RESPONSES: {"parallel_tool_calls": False}}
    alone[MESSAGES] = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for path, fields in alone.items():
        fields = {**fields, "functions": [{**LOOK, "strict": True}], "logit_bias": bias}
        [(name, arguments)] = calls_of(post(server, path, **fields))
        assert name == "look"
        jsonschema.validate(arguments, SCHEMA)


def test_only_allowed_tools_are_called(server: Served) -> None:
    function = {"type": "function", "function": {"name": "wait"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    calls = calls_of(post(server, CHAT, functions=[LOOK, WAIT], tool_choice=allowed, parallel_tool_calls=False))
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
    answer = post(server, RESPONSES, functions=[LOOK, WAIT], tool_choice=flat, parallel_tool_calls=False)
    assert calls == calls_of(answer) == [("wait", {})]
    assert answer["tool_choice"] == flat and answer["parallel_tool_calls"] is False


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_reply_that_is_cut_ends_with_length(server: Served, path: str) -> None:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}
    for fields in ({"guided_json": SCHEMA}, {"functions": [LOOK], "tool_choice": FORCED[path][1]}):
        answer = post(server, path, **fields, **limit)
        if path == CHAT:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert not answer["choices"][0]["message"].get("tool_calls")
        elif path == RESPONSES:
            assert answer["status"] == "incomplete" and answer["output"][0]["type"] == "message"
        else:
            assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["type"] == "text"


_ANY = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": _ANY}, "response_format.json_schema.schema", AT),
    (TEXT, {"response_format": _ANY}, "response_format.json_schema.schema", AT),
    (CHAT, {"response_format": _ANY, "functions": [LOOK]}, "response_format.json_schema.schema", AT),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}}, "text.format.schema", AT),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "", AT),
    (CHAT, {"guided_json": json.dumps(BAD)}, "guided_json", AT),
    (CHAT, {"structured_outputs": {"json": BAD}}, "structured_outputs.json", AT),
    (CHAT, {"guided_json": "{"}, "guided_json", "guided_json is no JSON"),
    (CHAT, {"guided_regex": "("}, "guided_regex", "guided_regex: "),
    (CHAT, {"guided_regex": ""}, "guided_regex", "guided_regex must be a text"),
    (CHAT, {"guided_choice": []}, "guided_choice", "must be an array of 1 to 10000 strings"),
    (CHAT, {"guided_grammar": "start ("}, "guided_grammar", "guided_grammar: "),
    (CHAT, {"guided_grammar": "root ::= ("}, "guided_grammar", "guided_grammar: "),
    (TEXT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "is not supported"),
    (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "at most one constraint"),
    (CHAT, {"functions": [LOOK, {"name": "odd", "parameters": BAD}], "tool_choice": "required"}, "tools", AT),
    (CHAT, {"functions": [{"name": "odd", "parameters": BAD, "strict": True}]}, "tools", "the parameters of 'odd'"),
    (RESPONSES, {"functions": [{"name": "odd", "parameters": BAD}], "tool_choice": "required"}, "tools", AT),
    (MESSAGES, {"functions": [{"name": "odd", "parameters": BAD}], "tool_choice": {"type": "any"}}, "", AT),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": "sometimes"}, "tool_choice", "must be 'auto', 'none' or 'required'"),
    (CHAT, {"tool_choice": {"type": "custom"}}, "tool_choice.type", "must be one of function, allowed_tools"),
    (CHAT, {"functions": [LOOK], "tool_choice": FORCED[RESPONSES][1]}, "tool_choice.function", "is required"),
    (CHAT, {"functions": [WAIT], "tool_choice": FORCED[CHAT][1]}, "tool_choice", 'not in tools: "look"'),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    (CHAT, {"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "must be an object"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), WRONG)
def test_errors_come_before_the_stream(
    server: Served, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        answer = server.post(path, body(path, **fields, stream=stream))
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/json", answer.text
        error = answer.json()["error"]
        assert words in error["message"] and (path == MESSAGES or error["param"] == param), error


def test_without_the_extra_constraints_are_refused_and_other_rules_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    monkeypatch.setattr(constraint, "find_spec", lambda _: None)
    one = {"functions": [{**LOOK, "strict": True}], "parallel_tool_calls": False, "max_tokens": 2}
    with served(runner_class=RandomRunner) as server:
        for fields in ({"guided_json": SCHEMA}, {"guided_regex": "a"}, {**one, "tool_choice": "required"}):
            answer = server.post(CHAT, body(CHAT, **fields))
            assert answer.status_code == 400 and "pip install 'radixkv[grammar]'" in answer.text
        answer = server.post(CHAT, body(CHAT, **one))
        assert answer.status_code == 200 and "parallel_tool_calls" in answer.headers["warning"]
    with served(Settings(strict_fields=True), runner_class=RandomRunner) as server:
        assert server.post(CHAT, body(CHAT, **one)).status_code == 400


def test_a_request_times_out_while_its_constraint_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles, other = threading.Event(), compiler.grammar_of
    monkeypatch.setattr(compiler, "grammar_of", lambda constraint: compiles.wait(10) and other(constraint))
    with served(Settings(timeout=0.2)) as server:
        answer = server.post(CHAT, body(CHAT, guided_json=SCHEMA))
        assert answer.status_code == 504 and not compiles.is_set()
        compiles.set()


def test_thinking_comes_before_the_answer() -> None:
    style = STYLES["Qwen3"]
    tokenizer = style.tokenizer()
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=style.stop_ids)
    bias = {str(tokenizer.convert_tokens_to_ids(token)): 7 for token in ("<think>", "</think>", '"', "}")}
    kinds = set()
    with served(model=model, num_blocks=2000) as server:
        for seed in range(6):
            answer = post(server, CHAT, guided_json=SCHEMA, seed=seed, max_tokens=900, logit_bias=bias)
            jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
            kinds.add("reasoning_content" in answer["choices"][0]["message"])
    assert True in kinds
