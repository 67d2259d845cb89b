"""The end: what runs finishes, what is new is turned away, and nobody is left waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from radixkv.errors import EngineClosed
from radixkv.serve import Settings
from tests.serve.served import CHAT, ask, events, hosted, texts, until

LONG = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 40}


def asking(host, body, answers):
    thread = threading.Thread(target=lambda: answers.append(ask(host, body)))
    thread.start()
    return thread


def test_streams_finish_and_nothing_new_begins():
    with hosted() as host:
        host.runner.gate = threading.Semaphore(5)
        answers: list[httpx.Response] = []
        clients = [asking(host, LONG, answers), asking(host, {**LONG, "stream": False}, answers)]
        until(lambda: host.service.gate.inside == 2)
        for _ in range(6):
            assert host.runner.began.acquire(timeout=20)
        host.stop()
        until(lambda: host.engine._worker._draining)
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


def test_what_does_not_finish_in_time_is_told_so():
    with hosted(Settings(drain_timeout=0.2)) as host:
        host.runner.gate = threading.Semaphore(5)
        answers: list[httpx.Response] = []
        clients = [asking(host, LONG, answers), asking(host, {**LONG, "stream": False}, answers)]
        until(lambda: host.service.gate.inside == 2)
        for _ in range(6):
            assert host.runner.began.acquire(timeout=20)
        host.stop()
        until(lambda: host.engine._worker._closed)
        host.runner.gate.release()  # the step that is under way
        for client in clients:
            client.join(20)
        host.thread.join(20)
    streamed, whole = sorted(answers, key=lambda answer: answer.status_code)
    *_, last = [line for line in streamed.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down"


def test_an_impatient_end_waits_for_nobody():
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
        until(lambda: host.engine._worker._draining)
        host.server.handle_exit(signal.SIGINT, None)
        until(lambda: host.engine._worker._closed)
        host.runner.gate.release()
        host.thread.join(20)
        assert not host.thread.is_alive()
        client.join(20)
    assert len(lost) == 1


def test_the_command_serves_until_it_is_told_to_stop():
    """The real command, model and signal: the stream that runs comes to its end, and so does the process, with 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RADIXKV_MONITOR": "0"}
    command = [sys.executable, "-m", "radixkv", "serve", "tiny", "--port", "0", "--kv-memory", "32MB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = next(line.split()[-1] for line in process.stderr if "/v1" in line)
            body = {**CHAT, "model": "tiny", "stream": True, "max_tokens": 60, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                text = "\n".join(lines)
            assert text.rstrip().endswith("[DONE]")
            assert process.wait(60) == 0
        finally:
            process.kill()
