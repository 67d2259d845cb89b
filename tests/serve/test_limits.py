"""What is too much, too long, too slow or plainly wrong is refused with a sentence that helps."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest

from radixkv.cli.main import main
from radixkv.errors import RequestTimedOut
from radixkv.serve import Settings
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import DEEPEST
from radixkv.serve.limits import Gate
from radixkv.serve.messages import written
from tests.serve.served import ASKED, CHAT, ask, fake_model, hosted, served, tokenizer, until

SMALL = Settings(max_running=2, max_waiting=1)


def test_the_gate_counts_streams():
    gate = Gate(Settings(max_running=3, max_waiting=1, max_per_key=2, retry_after=7))
    with gate.enter("a") as place:
        place.widen(2)
        with pytest.raises(ApiError) as refused, gate.enter("a"):
            pass
        assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "7"}
        with gate.enter("b"), gate.enter("b") as another:
            assert gate.inside == 4
            with pytest.raises(ApiError, match="busy"), gate.enter("c"):
                pass
            with pytest.raises(ApiError) as too_wide:
                another.widen(2)
            assert too_wide.value.status == 429 and gate.inside == 4
        with pytest.raises(ApiError, match="more than this server takes"), gate.enter("b") as wide:
            wide.widen(3)
    assert gate.inside == 0 and gate.refused == 3
    with suppress(KeyError), gate.enter("a") as place:
        place.widen(2)
        raise KeyError
    assert gate.inside == 0


def test_who_comes_on_top_is_told_when_to_come_back():
    with hosted(SMALL) as host:
        host.runner.gate = threading.Semaphore(0)
        body = {**CHAT, "max_tokens": 3, "ignore_eos": True}
        answers = []
        inside = [threading.Thread(target=lambda: answers.append(ask(host, body))) for _ in range(3)]
        for each in inside:
            each.start()
        assert host.runner.began.acquire(timeout=20)
        until(lambda: host.service.gate.inside == 3)
        refused = ask(host, body)
        counted = httpx.post(f"{host.url}/tokenize", json={"prompt": "x"}, timeout=30)
        host.runner.gate.release(1000)
        for each in inside:
            each.join(20)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert counted.status_code == 429
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert ask(host, body).status_code == 200
        too_wide = ask(host, {**body, "n": 4})
        assert too_wide.status_code == 400 and too_wide.json()["error"]["param"] == "n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_body_counts_before_it_is_there(path):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n".encode()
    with hosted(Settings(max_running=1, max_waiting=0, body_timeout=20)) as host:
        with socket.create_connection(("127.0.0.1", host.port), 20) as slow:
            slow.sendall(head + b"{")
            until(lambda: host.service.gate.inside == 1)
            with socket.create_connection(("127.0.0.1", host.port), 20) as another:
                another.sendall(head)  # it is not waited for what never comes
                assert another.recv(10_000).startswith(b"HTTP/1.1 429 ")
        until(lambda: host.service.gate.inside == 0)  # its client left


@contextmanager
def busy(host):
    """Others' prompts take a while."""
    others = threading.Event()
    try:
        host.service._thinking.submit(others.wait, 120)  # longer than `until` has patience
        yield
        assert not others.is_set() and host.service.gate.inside == 0
    finally:
        others.set()


WAITING = [
    ("/v1/chat/completions", {"messages": ASKED}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": " " * 150_000}]}),  # read by the thread, too
    ("/v1/completions", {"prompt": "x"}),
    ("/tokenize", {"prompt": "x"}),
    ("/tokenize", {"messages": ASKED}),
]


@pytest.mark.parametrize(("path", "asked"), WAITING)
def test_who_leaves_before_a_prompt_is_encoded_leaves_the_gate(path, asked):
    body = json.dumps({"model": "fake", **asked}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with hosted() as host, busy(host):
        with socket.create_connection(("127.0.0.1", host.port), 20) as client:
            client.sendall(head + body)
            until(lambda: host.service._thinking._work_queue.qsize() == 1)
            assert host.service.gate.inside == 1
        until(lambda: host.service.gate.inside == 0)


@pytest.mark.parametrize(("path", "asked"), WAITING)
def test_time_passes_before_a_prompt_is_encoded_too(path, asked):
    with hosted(Settings(timeout=0.05)) as host, busy(host):
        answer = httpx.post(host.url + path, json={"model": "fake", **asked}, timeout=30)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


def test_the_engine_has_the_time_that_is_left(monkeypatch):
    given = []
    with served(Settings(timeout=100.0)) as server:
        submit = server.service.engine.submit

        def noted(*args, timeout, **options):
            given.append(timeout)
            return submit(*args, timeout=timeout, **options)

        monkeypatch.setattr(server.service.engine, "submit", noted)
        server.chat(max_tokens=1)
        over = SimpleNamespace(state=SimpleNamespace(deadline=0.0))  # between being encoded and being handed over

        async def left() -> None:
            server.service.time_left(over)

        with pytest.raises(RequestTimedOut, match="100 s have passed"):
            asyncio.run(left())
    assert len(given) == 1 and 0 < given[0] < 100


def test_bodies_that_are_too_large():
    with served(Settings(max_body=200)) as server:
        post = server.client.post
        declared = post("/v1/chat/completions", content=b"{" + b" " * 300)
        chunked = post("/v1/chat/completions", content=iter([b"{", b" " * 150, b" " * 150]))
        fits = post("/v1/chat/completions", content=json.dumps(CHAT).ljust(200).encode())
    assert (declared.status_code, chunked.status_code) == (413, 413)
    assert "200 bytes" in chunked.json()["error"]["message"]
    assert fits.status_code == 200


def test_a_body_that_never_comes_is_not_waited_for():
    with hosted(Settings(body_timeout=0.2)) as host, socket.create_connection(("127.0.0.1", host.port), 20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        answer = client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_prompts_that_are_too_long():
    with served(Settings(max_prompt_tokens=20), model=fake_model(max_length=100)) as server:

        def refused(path, **fields):
            answer = server.post(path, {"model": "fake", **fields})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            return error["message"]

        assert "at most 20" in refused("/v1/completions", prompt=list(range(5, 30)))
        assert "at most 20" in refused("/v1/chat/completions", messages=[{"role": "user", "content": "x y z " * 10}])
        # What cannot fit whatever its tokens are is not even encoded.
        assert "at least" in refused("/v1/completions", prompt="x" * 100_000)
        assert "at least" in refused("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 100_000}])
    with served(model=fake_model(max_length=10)) as server:
        assert "leaves no room" in refused("/v1/completions", prompt=list(range(5, 30)))


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_is_encoded_only_as_far_as_it_may_fit(path, monkeypatch):
    """Where the vocabulary has a long run of spaces, the first look tells little."""
    lengths, words = [], copy.deepcopy(tokenizer())
    encode = words.encode

    def counted(text, **options):
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(words, "encode", counted)
    with served(model=fake_model(tokenizer=words, max_length=500)) as server:
        monkeypatch.setattr(server.service, "_longest_token", 128)
        long = server.post(path, {"model": "fake", "prompt": "So be it. " * 5_000})
        assert 0 < sum(lengths) < 25_000
        fits = server.post(path, {"model": "fake", "prompt": " " * 400})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert long.json()["error"]["param"] == "prompt" and fits.status_code == 200


LONG = "x" * 100_000
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 50_000}}}]},
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALLED]}]},
        {"messages": [*ASKED, {"role": "assistant", "content": "", "reasoning_content": LONG}]},
        {"messages": [{"role": "user", "content": "", "name": LONG}]},
        {"messages": [{"role": "user", "content": ""}] * 101},
    ],
    ids=["a description", "numbers", "arguments", "thinking", "a name", "messages"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_nothing_that_cannot_fit_is_encoded(path, fields, monkeypatch):
    with served(model=fake_model(max_length=100)) as server:
        monkeypatch.setattr(server.service.conversations, "prompt", lambda *_: pytest.fail("it was encoded"))
        answer = server.post(path, {"model": "fake", "messages": ASKED, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    assert "at least" in answer.json()["error"]["message"]


def test_thinking_that_a_template_leaves_out_counts_for_nothing():
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": LONG}
    conversation = [*ASKED, said, *ASKED]
    assert LONG not in written(conversation, None, thinking=False)
    assert LONG in written(conversation, None, thinking=True)
    assert LONG in written(conversation[:-1], None, thinking=False)


def test_a_request_may_not_take_for_ever():
    with hosted(Settings(timeout=0.05)) as host:
        host.runner.gate = threading.Semaphore(0)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(host, {**CHAT, "ignore_eos": True})))
        asking.start()
        assert host.runner.began.acquire(timeout=20)
        threading.Event().wait(0.1)  # past its time; the step that is under way ends, and it with it
        host.runner.gate.release(100)
        asking.join(20)
    assert answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "timeout"


WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x", "x" * 4097]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_cost": True}}, "stream_options.include_cost"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"temprature": 1}, "temprature"),
    ({"temprature": None}, "temprature"),
]


def test_whatever_is_wrong_is_named():
    with served() as server:
        for change, param in WRONG:
            answer = server.post("/v1/chat/completions", {**CHAT, **change})
            assert answer.status_code == 400, (change, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, (change, error)
            assert param.split(".")[-1].split("[")[0] in error["message"] and error["type"] == "invalid_request_error"
        for change, param in [
            ({"prompt": []}, "prompt"),
            ({"prompt": [1, "x"]}, "prompt[0]"),
            ({"prompt": [[]]}, "prompt[0]"),
            ({"prompt": "x", "best_of": 3}, "best_of"),
            ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
            ({"prompt": "x", "suffix": "y"}, "suffix"),
            ({"prompt": ["x"] * 600, "n": 2}, "n"),
        ]:
            answer = server.post("/v1/completions", {"model": "fake", **change})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (change, answer.text)


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
    with served() as server:
        answer = server.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_is_nested_too_deeply_is_named(path):
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


def test_a_large_body_is_read_beside_the_others():
    words = [{"role": "user", "content": "x"}] * 10_000
    with served() as server:
        wrong = server.post("/v1/chat/completions", {**CHAT, "messages": [*words, {"role": "user"}]})
        long = server.post("/v1/chat/completions", {**CHAT, "messages": words})
    assert wrong.json()["error"]["param"] == "messages[10000].content"
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_what_only_the_engine_or_the_template_can_tell():
    with served() as server:
        for path, body, param in [
            ("/v1/completions", {"prompt": [5000]}, "prompt"),
            ("/v1/completions", {"prompt": ["x", ""]}, "prompt"),
            ("/v1/completions", {"prompt": [5] * 2000}, "prompt"),
            ("/v1/completions", {"prompt": "x", "stop_token_ids": [5000]}, "stop_token_ids"),
            ("/v1/completions", {"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias"),
            ("/v1/completions", {"prompt": "x", "min_tokens": 17}, "min_tokens"),
            ("/v1/completions", {"prompt": "x", "n": 100}, "n"),
            ("/v1/chat/completions", {"messages": ASKED, "stop_token_ids": [5000]}, "stop_token_ids"),
            ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
            ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
            ("/tokenize", {"messages": ASKED * 3000}, "messages"),
        ]:
            answer = server.post(path, {"model": "fake", **body})
            assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
            assert answer.json()["error"]["param"] == param, answer.text
            assert answer.json()["error"]["code"] in ("invalid_value", "context_length_exceeded"), answer.text


def test_what_frameworks_send_along_is_taken():
    """Fields that ask for nothing, as clients and frameworks write them."""
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [{"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": ""}}],
    }
    parts = {"role": "user", "name": "ada", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    body = {
        **CHAT,
        "messages": [{"role": "developer", "content": "Be brief."}, parts, said, result, *ASKED],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": None}}],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_completion_tokens": 2,
        "seed": None,
        "stop": None,
    }
    with served() as server:
        assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-sequences", "0"),
        ("--max-waiting", "-1"),
        ("--max-per-key", "0"),
        ("--max-body", "0"),
        ("--max-body", "lots"),
        ("--max-prompt-tokens", "0"),
        ("--max-batch-tokens", "0"),
        ("--prefill-chunk", "0"),
        ("--history-memory", "-1"),
        ("--timeout", "0"),
        ("--drain", "nan"),
        ("--port", "70000"),
        ("--attention", "none"),
        ("--record", "/no/such/folder/trace"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(option, value, capsys):
    assert main(["serve", "tiny", *(["--port", "0"] if option != "--port" else []), f"{option}={value}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"radixkv: {option}") and value in last


def test_unsafe_settings_are_refused_by_the_command(capsys):
    assert main(["serve", "tiny", "--host", "0.0.0.0"]) == 2
    assert "--api-key" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "tiny", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err
