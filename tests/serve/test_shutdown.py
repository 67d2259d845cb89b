"""Shutdown: running requests finish, new ones are refused, and none is left waiting."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from radixkv.engine.observers.engine_control import EngineControl
from radixkv.errors import EngineClosed
from radixkv.serve import Settings
from radixkv.telemetry.protocol import Command
from tests.serve.served import CHAT, Hosted, ask, events, hosted, texts, until

LONG = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 40}


def asking(host, body, answers):
    thread = threading.Thread(target=lambda: answers.append(ask(host, body)))
    thread.start()
    return thread


def given(host: Hosted) -> list[Any]:
    """Record each request that the engine gets: it accepts none after the shutdown has begun."""
    start, requests = host.engine.client.start, []

    def noted(request: Any) -> Any:
        handle = start(request)
        requests.append(request)
        return handle

    host.engine.client.start = noted
    return requests


def stopped_while_two_clients_wait(host):
    """Stop the server in its sixth step; return the threads of the clients, and the list of their answers."""
    host.runner.gate = threading.Semaphore(5)
    answers: list[httpx.Response] = []
    requests = given(host)
    clients = [asking(host, LONG, answers), asking(host, {**LONG, "stream": False}, answers)]
    until(lambda: len(requests) == 2)
    for _ in range(6):
        assert host.runner.began.acquire(timeout=20)
    host.stop()
    return clients, answers


def test_streams_finish_and_nothing_new_begins():
    with hosted() as host:
        clients, answers = stopped_while_two_clients_wait(host)
        until(lambda: host.engine.client.thread._draining)
        with pytest.raises(httpx.TransportError):
            ask(host, CHAT)
        host.runner.gate.release(1000)
        for client in clients:
            client.join(20)
        host.thread.join(20)
        assert not host.thread.is_alive()
        with pytest.raises(EngineClosed):
            host.engine.stats()
    streamed = next(answer for answer in answers if "event-stream" in answer.headers["content-type"])
    whole = next(answer for answer in answers if answer is not streamed)
    assert texts(events(streamed.text)) == {0: whole.json()["choices"][0]["message"]["content"]}
    assert whole.json()["usage"]["completion_tokens"] == 40


def test_health_is_503_from_the_beginning_of_a_shutdown():
    with hosted() as host, httpx.Client(base_url=host.url) as client:
        assert client.get("/health").status_code == 200
        host.service.gate.ending = True
        assert client.get("/health").status_code == 503
        host.service.gate.ending = False
        host.runner.gate = threading.Semaphore(2)
        asked = asking(host, LONG, [])
        assert host.runner.began.acquire(timeout=20)
        closing = threading.Thread(target=host.engine.close, args=(True,))
        closing.start()
        until(lambda: host.engine.client.thread._draining)
        gone = client.get("/health")
        assert gone.status_code == 503 and gone.headers["retry-after"]
        host.runner.gate.release(1000)
        closing.join(20)
        asked.join(20)


def test_a_signal_changes_the_health_at_once():
    with hosted() as host:
        host.server.handle_exit(signal.SIGTERM, None)
        assert host.service.gate.ending


def test_what_does_not_finish_in_time_is_told_so():
    with hosted(Settings(drain_timeout=0.2)) as host:
        clients, answers = stopped_while_two_clients_wait(host)
        until(lambda: host.engine.client.thread.closed)
        host.runner.gate.release()  # the running step
        for client in clients:
            client.join(20)
        host.thread.join(20)
    streamed, whole = sorted(answers, key=lambda answer: answer.status_code)
    *_, last = [line for line in streamed.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_request_that_waits_for_the_encoder_ends_at_once(path):
    """Requests that wait for the background thread end at once; the engine would refuse them."""
    others = threading.Event()
    with hosted(Settings(drain_timeout=60)) as host:
        try:
            host.service.gate.executor.submit(others.wait, 120)
            answers: list[httpx.Response] = []
            body = {"model": "fake", "messages": CHAT["messages"]}
            client = threading.Thread(
                target=lambda: answers.append(httpx.post(host.url + path, json=body, timeout=30)),
            )
            client.start()
            until(lambda: host.service.gate.executor._work_queue.qsize() == 1)
            host.stop()
            client.join(20)
            host.thread.join(20)
            assert not host.thread.is_alive() and not others.is_set()
        finally:
            others.set()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    assert answers[0].headers["retry-after"]


def test_an_impatient_end_does_not_wait(caplog):
    with hosted(Settings(drain_timeout=60)) as host:
        host.runner.gate = threading.Semaphore(5)
        lost: list[httpx.TransportError] = []

        def lose() -> None:
            try:
                ask(host, LONG)
            except httpx.TransportError as error:
                lost.append(error)

        client = threading.Thread(target=lose)
        client.start()
        for _ in range(6):
            assert host.runner.began.acquire(timeout=20)
        host.server.handle_exit(signal.SIGINT, None)
        until(lambda: host.engine.client.thread._draining)
        host.server.handle_exit(signal.SIGINT, None)
        until(lambda: host.engine.client.thread.closed)
        host.runner.gate.release()
        host.thread.join(20)
        assert not host.thread.is_alive()
        client.join(20)
        assert host.server.cut_by == signal.SIGINT
    assert len(lost) == 1
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@contextmanager
def command() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the real command with the real model; return its process and address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RADIXKV_MONITOR": "0"}
    arguments = [sys.executable, "-m", "radixkv", "serve", "tiny", "--port", "0", "--kv-memory", "32MB", "--quiet"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = next(line.split()[-1] for line in process.stderr if "/v1" in line)
            yield process, url
        finally:
            process.kill()


@contextmanager
def streaming(url: str, tokens: int) -> Iterator[Iterator[str]]:
    """Return the lines of a reply that has begun."""
    body = {**CHAT, "model": "tiny", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@pytest.mark.long
def test_the_command_serves_until_it_is_told_to_stop():
    """After a real signal, the running stream ends complete, and the process exits with 0 and without a message."""
    with command() as (process, url):
        with streaming(url, 60) as lines:
            process.send_signal(signal.SIGTERM)
            text = "\n".join(lines)
        assert text.rstrip().endswith("[DONE]")
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_an_operator_cancels_is_not_sent_again(stream):
    with hosted() as host:
        host.runner.gate = threading.Semaphore(3)
        answers: list[httpx.Response] = []
        client = asking(host, {**LONG, "stream": stream}, answers)
        for _ in range(4):
            assert host.runner.began.acquire(timeout=20)
        control = EngineControl(host.engine.core)
        outcome = host.engine.client.thread.call(lambda: control.execute(Command(1, "cancel", 1), 4711))
        host.runner.gate.release(1000)
        assert outcome.result(20).done
        client.join(20)
    (answer,) = answers
    if stream:
        *_, last = [line for line in answer.text.splitlines() if line]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
        assert "retry-after" not in answer.headers
        error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("cancelled", "an operator of the server cancelled the request")


def test_a_client_that_does_not_read_to_the_end_is_cut_off(monkeypatch, caplog):
    monkeypatch.setattr("radixkv.serve.server._GRACE", 0.05)
    body = json.dumps({**LONG, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with hosted(Settings(drain_timeout=0.1)) as host, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", host.port))
        client.sendall(head + body)
        until(lambda: host.service.gate.limiter.streams == 1)
        assert client.recv(10)
        host.stop()
        host.thread.join(20)
        assert not host.thread.is_alive()
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.long
def test_a_second_signal_ends_the_command_at_once_and_quietly():
    with command() as (process, url), streaming(url, 1900) as lines:
        process.send_signal(signal.SIGINT)
        next(lines)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(lines)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert process.stderr.read() == ""
