"""Too many, too long and too slow requests are refused with a helpful sentence, and so are wrong settings."""

from __future__ import annotations

import copy
import json
import socket
import threading
from contextlib import contextmanager, suppress

import httpx
import pytest
from pydantic import BaseModel

from radixkv.cli.main import main
from radixkv.serve import Settings, access
from radixkv.serve.access import StreamLimiter
from radixkv.serve.errors import ApiError
from tests.serve.served import ASKED, CHAT, ask, fake_model, hosted, says, served, tokenizer, until

SMALL = Settings(max_running=2, max_waiting=1)


def test_the_limiter_counts_streams():
    limiter = StreamLimiter(Settings(max_running=3, max_waiting=1, max_per_key=2, retry_after=7))
    with limiter.admit("a") as place:
        place.resize(2)
        with pytest.raises(ApiError) as refused, limiter.admit("a"):
            pass
        assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "7"}
        with limiter.admit("b"), limiter.admit("b") as another:
            assert limiter.streams == 4
            with pytest.raises(ApiError, match="busy"), limiter.admit("c"):
                pass
            with pytest.raises(ApiError) as too_wide:
                another.resize(2)
            assert too_wide.value.status == 429 and limiter.streams == 4
        with pytest.raises(ApiError, match="more than this server takes"), limiter.admit("b") as wide:
            wide.resize(3)
    assert limiter.streams == 0 and limiter.refused == 3
    with suppress(KeyError), limiter.admit("a") as place:
        place.resize(2)
        raise KeyError
    assert limiter.streams == 0


def test_a_request_beyond_the_limit_gets_a_time_to_retry():
    with hosted(SMALL) as host:
        host.runner.gate = threading.Semaphore(0)
        body = {**CHAT, "max_tokens": 3, "ignore_eos": True}
        answers = []
        inside = [threading.Thread(target=lambda: answers.append(ask(host, body))) for _ in range(3)]
        for each in inside:
            each.start()
        assert host.runner.began.acquire(timeout=20)
        until(lambda: host.service.gate.limiter.streams == 3)
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


def test_a_body_counts_before_it_is_there():
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
    with hosted(Settings(max_running=1, max_waiting=0, body_timeout=20)) as host:
        with socket.create_connection(("127.0.0.1", host.port), 20) as slow:
            slow.sendall(head + b"{")
            until(lambda: host.service.gate.limiter.streams == 1)
            with socket.create_connection(("127.0.0.1", host.port), 20) as another:
                another.sendall(head)  # the server does not wait for the missing rest
                assert another.recv(10_000).startswith(b"HTTP/1.1 429 ")
        until(lambda: host.service.gate.limiter.streams == 0)  # its client disconnected


@contextmanager
def busy(host):
    """Occupy the background thread with the prompt of another request."""
    others = threading.Event()
    try:
        host.service.gate.executor.submit(others.wait, 120)  # longer than `until` waits
        yield
        assert not others.is_set() and host.service.gate.limiter.streams == 0
    finally:
        others.set()


WAITING = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": " " * 150_000}]}),  # read in the background, too
    ("/v1/completions", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "asked"), WAITING)
def test_leaving_before_a_prompt_is_encoded_frees_its_place(path, asked):
    body = json.dumps({"model": "fake", **asked}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with hosted() as host, busy(host):
        with socket.create_connection(("127.0.0.1", host.port), 20) as client:
            client.sendall(head + body)
            until(lambda: host.service.gate.executor._work_queue.qsize() == 1)
            assert host.service.gate.limiter.streams == 1
        until(lambda: host.service.gate.limiter.streams == 0)


@pytest.mark.parametrize(("path", "asked"), WAITING)
def test_time_passes_before_a_prompt_is_encoded_too(path, asked):
    with hosted(Settings(timeout=0.05)) as host, busy(host):
        answer = httpx.post(host.url + path, json={"model": "fake", **asked}, timeout=30)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


def test_bodies_that_are_too_large():
    with served(Settings(max_body=200)) as server:
        post = server.client.post
        declared = post("/v1/chat/completions", content=b"{" + b" " * 300)
        chunked = post("/v1/chat/completions", content=iter([b"{", b" " * 150, b" " * 150]))
        fits = post("/v1/chat/completions", content=json.dumps(CHAT).ljust(200).encode())
    assert (declared.status_code, chunked.status_code) == (413, 413)
    assert "200 B" in chunked.json()["error"]["message"]
    assert fits.status_code == 200


@pytest.mark.parametrize("length", ["Content-Length: 20000000", "Transfer-Encoding: chunked"])
def test_a_client_that_still_sends_a_large_body_gets_the_reason(length, monkeypatch):
    monkeypatch.setattr(access, "_LINGER", 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    body = b" " * 20_000_000  # more than the socket buffers hold
    sent = body if "Length" in length else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with hosted(Settings(max_body=200)) as host, socket.create_connection(("127.0.0.1", host.port), 20) as client:
        client.sendall(head + sent)
        assert client.recv(10_000).startswith(b"HTTP/1.1 413 ")


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
        # A text that cannot fit even as the longest tokens is not encoded.
        assert "at least" in refused("/v1/completions", prompt="x" * 100_000)
        assert "at least" in refused("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 100_000}])
    with served(model=fake_model(max_length=10)) as server:
        assert "leaves no room" in refused("/v1/completions", prompt=list(range(5, 30)))


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_is_encoded_only_as_far_as_it_may_fit(path, monkeypatch):
    """If the vocabulary has a long run of spaces, the first bound is weak."""
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
def test_nothing_that_cannot_fit_is_encoded(fields, monkeypatch):
    with served(model=fake_model(max_length=100)) as server:
        monkeypatch.setattr(server.service.conversations, "prompt", lambda *_: pytest.fail("it was encoded"))
        answer = server.post("/tokenize", {"model": "fake", "messages": ASKED, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    assert "at least" in answer.json()["error"]["message"]


def test_a_request_may_not_take_for_ever():
    with hosted(Settings(timeout=0.5)) as host:
        host.runner.gate = threading.Semaphore(0)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(host, {**CHAT, "ignore_eos": True})))
        asking.start()
        assert host.runner.began.acquire(timeout=20)
        threading.Event().wait(0.6)  # past its deadline; it ends with the running step
        host.runner.gate.release(100)
        asking.join(20)
    assert answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-sequences", "0"),
        ("--max-body", "lots"),
        ("--order", "shortest"),
        ("--drain", "nan"),
        ("--port", "70000"),
        ("--record", "/no/such/folder/trace"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(option, value, capsys):
    assert main(["serve", "tiny", *(["--port", "0"] if option != "--port" else []), f"{option}={value}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"radixkv: {option}") and value in last


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"logit_bias": {str(token): 1 for token in range(10_001)}}, "at most 10000 token ids"),
        ("completions", {"bad_words": ["x" * 255] * 300}, "at most 65536 characters in all, not 76500"),
        ("chat/completions", {"metadata": {f"k\\{number}": 1 for number in range(100_001)}}, "more than 100000 fields"),
        ("responses", {"input": [{"role": "user", "content": ":"}] * 50_001}, "more than 100000 fields"),
    ],
)
def test_the_size_of_a_list_is_checked_first(path, fields, message, monkeypatch):
    with served() as server:
        if "more than 100000 fields" in message:
            monkeypatch.setattr(BaseModel, "model_validate", None)
        for separators in ((",", ":"), (" ,", " : ")):
            body = json.dumps({"model": "fake", "prompt": "Hi", **fields}, separators=separators)
            answer = server.client.post(f"/v1/{path}", content=body)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_reply_without_a_limit_leaves_the_hit_of_a_pool_that_is_smaller_than_the_context() -> None:
    """The longest reply takes all blocks, and the first prompt leaves a part-filled one on the path to the hit."""
    with served(model=fake_model(max_length=20_000), brain=says("Hello there.")) as server:
        for text in ("Tell me a story. " * 40 + "Now!", "Tell me a story. " * 40 + "Later, and of a dog."):
            asked = [{"role": "user", "content": text}]
            computed = server.chat(messages=asked)["usage"]["prompt_tokens"]
            again = server.chat(messages=asked)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert again == computed - 1
