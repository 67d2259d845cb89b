"""POST /api/chat and /api/generate over HTTP: both forms, hits of the next turn, options, loads and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv.chat.calls.formats import HERMES
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import IgnoredFields
from radixkv.serve.ollama.schemas import read_chat, read_generate
from tests.chat.tool_call_dialects import DIALECTS, TOOLS, Dialect
from tests.grammar.engines import RandomRunner
from tests.serve.served import ASKED, Served, fake_model, says, served
from tests.serve.test_infill import coder, middle, text
from tests.serve.test_openapi import fits, responses
from tests.serve.test_tool_calls import CALLS

BODY: dict[str, Any] = {"model": "fake", "messages": ASKED, "options": {"temperature": 0}}
PROMPT: dict[str, Any] = {"model": "fake", "prompt": "Hello!", "options": {"temperature": 0}}
THOUGHT = "<think>\nHm, so.\n</think>\n\nHello, <b>you</b>."


def whole(server: Served, path: str = "/api/chat", **fields: Any) -> dict[str, Any]:
    answer = server.post(path, {**(BODY if path == "/api/chat" else PROMPT), "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def lines(server: Served, path: str = "/api/chat", **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(path, {**(BODY if path == "/api/chat" else PROMPT), **fields})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of a stream as one answer, put together as a client does."""
    *pieces, last = lines
    assert last["done"] and not any(each["done"] for each in pieces)
    messages = [each["message"] for each in lines]
    message = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
    if thinking := "".join(each.get("thinking", "") for each in messages):
        message["thinking"] = thinking
    if calls := [call for each in messages for call in each.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return {**last, "message": message}


def spent(answer: dict[str, Any]) -> int:
    return int(answer["prompt_eval_count"] + answer["eval_count"])


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    assert all(value > 0 for name, value in answer.items() if name.endswith("_duration"))
    return {name: value for name, value in answer.items() if "duration" not in name and name != "created_at"}


# ---- both forms


def test_a_stream_says_the_same_as_a_whole_answer_and_both_are_as_documented():
    with served(brain=says(THOUGHT)) as server:
        answer, streamed = whole(server), lines(server)
        assert without_times(joined(streamed)) | {"cached_prompt_count": 0} == without_times(answer)
        assert answer["message"] == {"role": "assistant", "content": "Hello, <b>you</b>.", "thinking": "Hm, so."}
        assert (answer["model"], answer["done_reason"]) == ("fake", "stop")
        generated = whole(server, "/api/generate", system="Be kind.", model="fake:latest")
        assert (generated["response"], generated["thinking"]) == ("Hello, <b>you</b>.", "Hm, so.")
        assert generated["model"] == "fake:latest"
        pieces = lines(server, "/api/generate", prompt="Hello!", system="Be kind.")
        assert "".join(each["response"] for each in pieces) == generated["response"]
    for path, found in (("/api/chat", [answer, *streamed]), ("/api/generate", [generated, *pieces])):
        content = responses(path)["200"]["content"]
        assert all(fits(content["application/json"]["schema"], each) for each in found)


def test_a_raw_prompt_is_a_text_completion():
    with served() as server:
        once = {"model": "fake", "prompt": "Once", "max_tokens": 6, "temperature": 0}
        expected = server.post("/v1/completions", once).json()
        asked = {"prompt": "Once", "raw": True, "options": {"temperature": 0, "num_predict": 6}}
        answer = whole(server, "/api/generate", **asked)
        assert answer["response"] == expected["choices"][0]["text"] and answer["done_reason"] == "length"
        assert (
            answer["prompt_eval_count"]
            == expected["usage"]["prompt_tokens"]
            < whole(server, "/api/generate")["prompt_eval_count"]
        )
        assert "".join(each["response"] for each in lines(server, "/api/generate", **asked)) == answer["response"]


def test_a_suffix_is_a_text_completion_with_one():
    with served(model=coder(), brain=middle(*text("and"))) as server:
        expected = server.post("/v1/completions", {"model": "fake", "prompt": "one", "suffix": "two"}).json()
        for asked in ({"prompt": "one", "suffix": "two"}, {"prompt": "", "suffix": "two"}):
            answer = whole(server, "/api/generate", **asked)
            assert answer["response"] == expected["choices"][0]["text"] == "and"
        assert server.post("/api/show", {"model": "fake"}).json()["capabilities"][-1] == "insert"


def test_a_failing_stream_ends_with_an_error_line_and_a_silent_one_stays_valid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("radixkv.serve.responses.KEEP_ALIVE", 0.0)
    with served(brain=says("Hi.")) as server:
        assert joined(lines(server))["message"]["content"] == "Hi."
    with served(fault=lambda chunks: 1 / 0) as server:
        assert [*lines(server)[-1]] == ["error"]


# ---- the next turn


@contextmanager
def speaking(dialect: Dialect, reply: Callable[[str], str]) -> Iterator[Served]:
    own = dialect.tokenizer()
    model = fake_model(tokenizer=own, vocab_size=len(own), stop_token_ids=dialect.stops())
    with served(model=model, brain=dialect.brain(reply)) as server:
        yield server


def sent_back(message: dict[str, Any], ids: str) -> dict[str, Any]:
    """Return a message with calls as clients send it back: with our ids, with ids of their own, or without."""
    calls = [
        {"function": each["function"], **({} if ids == "none" else {"id": each["id"] if ids == "ours" else f"own{at}"})}
        for at, each in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("ids", ["ours", "their own", "none"])
@pytest.mark.parametrize("name", ["Qwen", "Mistral, a list"])
def test_calls_come_back_with_any_ids_and_all_of_it_hits(name: str, ids: str):
    dialect, prompts, history, before = DIALECTS[name], [], [{"role": "user", "content": "look"}], 0

    def reply(said: str) -> str:
        prompts.append(said)
        return "It is grey." if "grey" in said.rsplit("look", 1)[-1] else dialect.write(CALLS)

    with speaking(dialect, reply) as server:
        for streamed in (True, False):
            asked = {"messages": history, "tools": TOOLS}
            called = joined(lines(server, **asked)) if streamed else whole(server, **asked)
            assert called["cached_prompt_count"] == max(before - 1, 0)
            functions = [each["function"] for each in called["message"]["tool_calls"]]
            assert [(each["name"], each["arguments"]) for each in functions] == CALLS
            history.append(sent_back(called["message"], ids))
            results = [{"role": "tool", "content": f"grey {at}", "tool_name": call[0]} for at, call in enumerate(CALLS)]
            history += reversed(results)  # each belongs to its call by its name
            answer = whole(server, messages=history, tools=TOOLS)
            assert answer["cached_prompt_count"] == spent(called) - 1 and answer["message"]["content"] == "It is grey."
            assert prompts[-1].rfind("grey 0") < prompts[-1].rfind("grey 1")
            history += [answer["message"], {"role": "user", "content": "look"}]
            before = spent(answer)


def test_a_call_that_the_limit_cuts_is_left_out():
    dialect = DIALECTS["Mistral, a list"]
    with speaking(dialect, lambda _: '[TOOL_CALLS][{"name": "now", "arguments": {"zone": "UTC and more"}}]') as server:
        asked = {"messages": [{"role": "user", "content": "look"}], "tools": TOOLS}
        length = whole(server, **asked)["eval_count"]
        for most in (1, length // 2, length - 2, length - 1):
            options = {"temperature": 0, "num_predict": most}
            for answer in (whole(server, **asked, options=options), joined(lines(server, **asked, options=options))):
                functions = [each["function"] for each in answer["message"].get("tool_calls", ())]
                assert all(each["arguments"] == {"zone": "UTC and more"} for each in functions)
                assert answer["done_reason"] == "length"


def test_an_id_that_the_model_writes_does_not_make_a_miss():
    dialect = DIALECTS["Mistral, a list"]
    written = '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcDEF123"}]'
    with speaking(dialect, lambda said: "noon" if "12" in said else written) as server:
        messages = [{"role": "user", "content": "look"}]
        called = whole(server, messages=messages, tools=TOOLS)
        messages += [sent_back(called["message"], "none"), {"role": "tool", "content": "12"}]
        assert whole(server, messages=messages, tools=TOOLS)["cached_prompt_count"] == spent(called) - 1


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([{"tool_call_id": "b"}, {"tool_call_id": "a"}], [1, 0]),
        ([{"tool_call_id": "call_1_2"}, {"tool_name": "now"}, {}], [2, 1, 0]),
        ([{}, {"tool_name": "now"}, {"tool_call_id": "a"}], [2, 1, 0]),
        ([{"tool_name": "look"}, {"tool_name": "look"}], [0, 1]),
        ([{}, {}, {}, {}], [0, 1, 2, 3]),
    ],
)
def test_a_result_belongs_to_a_call_by_id_by_name_or_by_order(results: list[Any], expected: list[int]):
    names = ("look", "now", "look")
    calls = [
        {"id": number, "function": {"name": name, "arguments": {}}} for number, name in zip("abc", names, strict=True)
    ]
    told = [{"role": "tool", "content": str(at), **each} for at, each in enumerate(results)]
    given = {**BODY, "messages": [*ASKED, {"role": "assistant", "tool_calls": calls}, *told]}
    asked = read_chat(given, None, HERMES).chat
    assert asked is not None and [int(each["content"]) for each in asked.messages[2:]] == expected


# ---- options


def test_options_limit_the_reply():
    with served(brain=says("one two three END four")) as server:
        for options, reason in (
            ({"num_predict": 3}, "length"),
            ({"stop": ["END"]}, "stop"),
            ({"num_predict": -1}, "stop"),
        ):
            answer = whole(server, options={"temperature": 0, **options})
            assert answer["done_reason"] == reason and ("END" in answer["message"]["content"]) == (
                "num_predict" in options and options["num_predict"] < 0
            )
        prompt = answer["prompt_eval_count"]
        for more in ({}, {"num_predict": 100}):
            assert whole(server, options={"num_ctx": prompt + 4, **more})["eval_count"] == 4
        refused = server.post("/api/chat", {**BODY, "options": {"num_ctx": prompt}})
        assert refused.status_code == 400 and "num_ctx" in refused.json()["error"]


def test_options_without_effect_are_named_and_a_strict_server_refuses_them():
    body = {**BODY, "options": {"num_gpu": 1, "seed": -1, "mirostat": 0, "temperature": 0.5}, "truncate": True}
    ignored = IgnoredFields()
    asked = read_chat(body, ignored, HERMES).chat
    assert ignored.text() == "options.num_gpu, options.mirostat, truncate"
    assert asked is not None and (asked.options.params.seed, asked.options.params.temperature) == (None, 0.5)
    with pytest.raises(ApiError, match="unknown field"):
        read_chat(body, None, HERMES)


@pytest.mark.parametrize(
    "format", ["json", {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}]
)
def test_a_format_holds(format: Any):
    with served(runner_class=RandomRunner, num_blocks=2000) as server:
        options = {"seed": 3, "num_predict": 300}
        for path, raw in (("/api/chat", {}), ("/api/generate", {}), ("/api/generate", {"raw": True})):
            answer = whole(server, path, format=format, options=options, **raw)
            said = answer["message"]["content"] if path == "/api/chat" else answer["response"]
            assert answer["done_reason"] == "length" or isinstance(json.loads(said), dict)
            assert format == "json" or json.loads(said)["age"] in (1, 2)


@pytest.mark.parametrize(
    ("think", "arguments"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_think_sets_variables_of_the_template(think: Any, arguments: dict[str, Any]):
    for asked in (
        read_chat({**BODY, "think": think}, None, HERMES).chat,
        read_generate({**PROMPT, "think": think}, None).chat,
    ):
        assert asked is not None
        [option] = asked.template_options
        assert option.name == "think" and arguments.items() <= dict(option.values).items()
    with served(brain=says("Hi.")) as server:
        assert "think" in server.post("/api/chat", {**BODY, "think": True}).headers["warning"]


# ---- loads, errors, tenants


@pytest.mark.parametrize(("given", "seconds", "reason"), [("5m", 300, "load"), (0, 0, "unload"), (None, None, "load")])
def test_an_empty_request_only_loads_the_model(given: Any, seconds: float | None, reason: str):
    for read, body in (
        (lambda body: read_chat(body, None, HERMES), {"messages": []}),
        (lambda body: read_generate(body, None), {}),
    ):
        request = read({"model": "fake", "keep_alive": given, **body})
        assert (request.keep_alive, request.chat, request.text) == (seconds, None, "")
    with served() as server:
        for path, field in (("/api/chat", "message"), ("/api/generate", "response")):
            answer = server.post(path, {"model": "fake", "keep_alive": given}).json()
            assert (answer["done"], answer["done_reason"]) == (True, reason) and field in answer
        assert server.engine.stats().finished == 0
