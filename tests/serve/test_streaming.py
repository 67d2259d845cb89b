"""Streams equal whole responses; clients that disconnect or read slowly do not slow others down."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import threading
from contextlib import ExitStack
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.serve import Settings, responses
from radixkv.serve.responses import EventStream
from tests.engine.fakes import check
from tests.serve.served import CHAT, Hosted, ask, hosted, served, texts, until

ENDLESS = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 600}


def send(
    host: Hosted, body: dict, receive_buffer: int | None = None, path: str = "/v1/chat/completions"
) -> socket.socket:
    """A client that has sent a request, and has read nothing yet."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", host.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def leave(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RDWR)
    client.close()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([0.0, 0.9]),
    st.lists(st.sampled_from("aei ,.")),
    st.booleans(),
)
def test_a_stream_says_what_the_whole_says(n, max_tokens, chat, temperature, stop, beams):
    more = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "seed": 3, "stop": stop[:4], "logprobs": None}
    more["use_beam_search"] = beams
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {**(CHAT if chat else {"model": "fake", "prompt": ["One", "Two"]}), **more}
    whole = SERVER.post(path, body).json()
    streamed = SERVER.events(path, {**body, "stream_options": {"include_usage": True}})
    said = [choice["message"]["content"] if chat else choice["text"] for choice in whole["choices"]]
    assert texts(streamed) == dict(enumerate(said))
    ends = {c["index"]: c["finish_reason"] for e in streamed for c in e["choices"] if c["finish_reason"]}
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    assert streamed[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_may_have_the_usage_so_far_in_each_event(path):
    asked = {**CHAT} if "chat" in path else {"model": "fake", "prompt": ["One", "Two"]}
    body = {**asked, "max_tokens": 6, "n": 2, "ignore_eos": True, "temperature": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    plain = SERVER.events(path, {**body, "stream_options": {"include_usage": True}})
    *running, last = SERVER.events(path, {**body, "stream_options": options})
    assert all(event["usage"] is None for event in plain[:-1])
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert counts == sorted(counts) and len(set(counts)) > 3
    assert counts[-1] == last["usage"]["completion_tokens"] == plain[-1]["usage"]["completion_tokens"]
    for event in running:
        assert event["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + event["usage"]["completion_tokens"]
    assert texts(running) == texts(plain[:-1])


def setup_module() -> None:
    global SERVER, LEAVE
    LEAVE = served()
    SERVER = LEAVE.__enter__()


def teardown_module() -> None:
    LEAVE.__exit__(None, None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_comes_to_its_end_while_others_prompts_are_encoded(stream):
    others = threading.Event()
    with hosted() as host:
        try:
            host.runner.gate = threading.Semaphore(3)
            answers = []
            body = {**ENDLESS, "stream": stream, "max_tokens": 6}
            client = threading.Thread(target=lambda: answers.append(ask(host, body)))
            client.start()
            for _ in range(4):
                assert host.runner.began.acquire(timeout=20)
            host.service.gate.executor.submit(others.wait, 120)
            host.runner.gate.release(100)
            client.join(20)
            assert answers and not others.is_set()
            assert host.service.conversations.stats.remembered == 1
        finally:
            others.set()


def test_leaving_frees_a_request_within_a_step():
    """Whole responses and streams, before the first token and in the middle."""
    beams = {"use_beam_search": True, "n": 3}
    for stream, steps, more in ((True, 0, {}), (True, 5, {}), (False, 0, {}), (False, 5, {}), (True, 5, beams)):
        with hosted() as host:
            host.runner.gate = threading.Semaphore(steps)
            client = send(host, {**ENDLESS, **more, "stream": stream})
            for _ in range(steps + 1):
                assert host.runner.began.acquire(timeout=20)
            leave(client)
            until(lambda host=host: host.service.gate.limiter.streams == 0)  # the server has cancelled the request
            host.runner.gate.release()  # the running step
            until(lambda host=host: not host.engine.core.scheduler.running)
            assert len(host.runner.steps) == steps + 1
            host.runner.gate.release(100)
            check(host.engine)
            assert host.engine.stats().cancelled == 1
            assert ask(host, {**CHAT, "max_tokens": 2}).status_code == 200


def test_leaving_frees_the_requests_of_all_prompts():
    body = {"model": "fake", "prompt": [[5, 6], [7, 8], [9]], "max_tokens": 500, "ignore_eos": True}
    for stream in (True, False):
        with hosted() as host:
            host.runner.gate = threading.Semaphore(3)
            client = send(host, {**body, "stream": stream}, path="/v1/completions")
            for _ in range(4):
                assert host.runner.began.acquire(timeout=20)
            leave(client)
            until(lambda host=host: host.service.gate.limiter.streams == 0)
            host.runner.gate.release(100)
            until(lambda host=host: host.engine.stats().cancelled == 3)
            check(host.engine)


def test_if_one_of_several_prompts_cannot_begin_none_goes_on():
    with hosted(Settings(max_prompt_tokens=5)) as host:
        host.runner.gate = threading.Semaphore(0)
        body = {"model": "fake", "prompt": [[5, 6], [7] * 9], "max_tokens": 500, "ignore_eos": True}
        answer = httpx.post(f"{host.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        host.runner.gate.release(100)
        until(lambda: host.engine.stats().cancelled == 1)
        check(host.engine)


def test_a_slow_reader_slows_no_other():
    """A stream without a reader is paused once the socket buffers are full; others finish meanwhile."""
    wordy = {**ENDLESS, "logprobs": True, "top_logprobs": 20}
    with hosted() as host:
        dawdlers = [send(host, {**wordy, "seed": at}, receive_buffer=4096) for at in range(3)]
        until(lambda: len(host.engine.core.scheduler.running) == 3)
        quick = ask(host, {**CHAT, "max_tokens": 200, "ignore_eos": True})
        assert quick.json()["usage"]["completion_tokens"] == 200
        until(lambda: all(r.channel.paused for r in list(host.engine.core.scheduler.running)))
        assert host.engine.stats().running == 3
        body = b""
        while b"[DONE]" not in body:
            body += dawdlers[0].recv(1 << 16)
        assert host.engine.stats().finished == 2  # the slow reader missed nothing, and the others are still paused
        for each in dawdlers:
            leave(each)
        until(lambda: host.service.gate.limiter.streams == 0)
        check(host.engine)


def test_who_never_reads_is_left(caplog):
    caplog.set_level("INFO", "radixkv.serve")
    wordy = {**ENDLESS, "logprobs": True, "top_logprobs": 20}
    with hosted(Settings(send_timeout=0.2)) as host:
        dawdler = send(host, wordy, receive_buffer=4096)
        until(lambda: host.engine.stats().cancelled == 1)
        until(lambda: host.service.gate.limiter.streams == 0)
        leave(dawdler)
        check(host.engine)
    assert "client=stopped reading" in caplog.text


class Clock(selectors.DefaultSelector):
    """The time of an event loop that passes at once."""

    now = 0.0

    def select(self, timeout=None):
        self.now += (timeout or 0) + 1e-9  # time never stands still
        return super().select(0)

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        loop.time = lambda: self.now
        return loop


SECONDS = st.sampled_from([0.0, 0.1, 1.0, 14.9, 15.0, 40.0])


@settings(deadline=None)
@given(st.lists(SECONDS, max_size=40), st.lists(SECONDS, max_size=3))
def test_no_stream_is_silent_for_longer_than_15_seconds(waits, sends):
    """Each event comes after a wait, and the first ones take a while to send."""
    clock, begun, ended = Clock(), [], []

    async def events():
        for wait in waits:
            await asyncio.sleep(wait)
            yield b"event"

    async def send(message):
        begun.append((clock.now, message.get("body")))
        await asyncio.sleep(sends[len(begun) - 1] if len(begun) <= len(sends) else 0)
        ended.append(clock.now)

    async def main():
        stream = EventStream(events(), 30.0, ExitStack(), keep_alive=b"ping")
        await stream({"state": {"log_fields": {}}}, asyncio.Event().wait, send)

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=clock.loop) as runner:
        patch.setattr(responses, "monotonic", lambda: clock.now)
        runner.run(main())
    assert all(after - before <= 15 + 1e-6 for before, (after, _) in zip(ended, begun[1:], strict=False)), begun
    assert all(after - before >= 15 - 1e-6 for (before, _), (after, body) in pairwise(begun) if body == b"ping"), begun
    if 40.0 not in sends:  # else the client stopped reading
        assert [body for _, body in begun if body != b"ping"] == [None, *[b"event"] * len(waits), b""]
        assert begun[-1][1] == b""


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_stream_is_kept_alive_before_and_between_tokens(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(responses, "KEEP_ALIVE", 0.01)
    field = {"completions": "prompt", "responses": "input"}.get(path, "messages")
    body = {"model": "fake", "stream": True, field: CHAT["messages"] if field == "messages" else "Hello!"}
    body |= {"max_output_tokens" if field == "input" else "max_tokens": 6, "ignore_eos": True}
    ping = "event: ping" if path == "messages" else ": keep-alive"
    with hosted(brain=lambda _: 300) as host:
        host.runner.gate, parts, pings, released = threading.Semaphore(0), [], [], -1
        with httpx.stream("POST", f"{host.url}/v1/{path}", json=body, timeout=20) as answer:
            for part in answer.iter_text():
                parts += part.strip().split("\n\n")
                pings = [each.startswith(ping) for each in parts]
                if all(pings[-2:]) and pings.count(False) > released:  # not again for pings sent before the last tokens
                    released = pings.count(False)
                    host.runner.gate.release(3)
    shape = [kind for at, kind in enumerate(pings) if at == 0 or kind != pings[at - 1]]
    assert sum(shape) >= 2 and not pings[-1], parts


def test_an_error_in_the_middle_is_an_event():
    with hosted(fault=lambda chunks: 1 / 0 if chunks[0].start > 20 else None) as host:
        answer = ask(host, {**ENDLESS, "max_tokens": 100})
    *_, last = [line for line in answer.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in answer.text
