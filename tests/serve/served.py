"""Test servers: the application over an engine with scripted replies and the bundled tokenizer."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient
from starlette.types import ASGIApp

import radixkv
from radixkv import AsyncEngine, Engine
from radixkv.chat.messages import Message
from radixkv.serve import Settings, create_app
from radixkv.serve.schemas import read_chat
from radixkv.serve.served_models import OneModel
from radixkv.serve.server import Server, address, bind
from radixkv.serve.service import Service
from tests.engine.fakes import FakeModel, FakeRunner, check, make_engine

LOCAL = "http://localhost"
ASKED = [{"role": "user", "content": "Hello!"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": ASKED, "temperature": 0}


def read_messages(given: Sequence[Any]) -> list[Message]:
    """Return messages of a chat completion in the form of chat templates."""
    return read_chat({"model": "fake", "messages": list(given)}).messages


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(radixkv.__file__).parent / "assets" / "tiny")


def fake_model(**changes: Any) -> FakeModel:
    facts = {"tokenizer": tokenizer(), "vocab_size": 1536, "max_length": 2000, "stop_token_ids": frozenset({2})}
    return FakeModel(**{**facts, **changes})


def says(text: str) -> Callable[[list[int]], int]:
    """Return a brain that replies with this text to every conversation, then stops."""
    opening = tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False)
    reply = [*tokenizer().encode(text, add_special_tokens=False), 2]

    def brain(tokens: list[int]) -> int:
        ends = range(len(tokens), len(opening) - 1, -1)
        last = next(
            end for end in ends if tokens[end - 1] == opening[-1] and tokens[end - len(opening) : end] == opening
        )
        return reply[min(len(tokens) - last, len(reply) - 1)]

    return brain


def says_in_turn(*texts: str) -> Callable[[list[int]], int]:
    """Return a brain whose first reply in each conversation is the first text, and so on."""
    opening = tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False)
    replies = [[*tokenizer().encode(text, add_special_tokens=False), 2] for text in texts]

    def brain(tokens: list[int]) -> int:
        begun = (at for at, token in enumerate(tokens) if token == opening[0])
        ends = [at + len(opening) for at in begun if tokens[at : at + len(opening)] == opening]
        if not ends:
            return 2  # a part of a prompt
        reply = replies[len(ends) - 1]
        return reply[min(len(tokens) - ends[-1], len(reply) - 1)]

    return brain


@dataclass
class Served:
    """A client of the application, and the objects that a test inspects."""

    client: TestClient
    engine: Engine
    runner: FakeRunner
    service: Service

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.client.post(path, json=body, **options)

    def chat(self, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", {**CHAT, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, body: Any) -> list[Any]:
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return events(answer.text)


@contextmanager
def served(settings: Settings | None = None, **options: Any) -> Iterator[Served]:
    """Run an application in this process; at the end no blocks and no streams may be held."""
    options.setdefault("num_blocks", 512)
    options.setdefault("model", fake_model())
    engine, runner = make_engine(**options)
    app = create_app(AsyncEngine(engine), settings)
    with engine, TestClient(app, LOCAL) as client:
        yield Served(client, engine, runner, app.state.models.service)
        if runner.gate is None and engine.client.thread._thread.is_alive():
            check(engine)
            assert app.state.models.service.gate.limiter.streams == 0


@dataclass
class Hosted:
    """A server on a port, and the objects that a test inspects."""

    url: str
    port: int
    engine: Engine
    runner: FakeRunner
    server: Server
    thread: threading.Thread
    service: Service

    def stop(self) -> None:
        """Do the same as Ctrl-C."""
        self.server.should_exit = True


@contextmanager
def hosted(settings: Settings | None = None, **options: Any) -> Iterator[Hosted]:
    """Run a real server on a free port, on its own thread."""
    options.setdefault("num_blocks", 512)
    options.setdefault("model", fake_model())
    engine, runner = make_engine(**options)
    with hosted_engine(engine, runner, settings) as host:
        yield host


@contextmanager
def hosted_engine(
    engine: Engine,
    runner: FakeRunner,
    settings: Settings | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Iterator[Hosted]:
    """Serve this engine, by an application that `around` may wrap, and close it."""
    ready = threading.Event()
    with engine, bind("127.0.0.1", 0) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # else the kernel buffers much for slow readers
        server = Server(AsyncEngine(engine), settings or Settings(port=0, drain_timeout=5), ready.set)
        assert isinstance(server.models, OneModel)
        server.config.app = around(server.config.app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(20)
            yield Hosted(address(sock), sock.getsockname()[1], engine, runner, server, thread, server.models.service)
        finally:
            if runner.gate is not None:
                runner.gate.release(100_000)
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread will soon make true."""
    for _ in range(20_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it never happened")


def events(text: str) -> list[Any]:
    """Return the events of a complete stream."""
    *lines, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def texts(events: Sequence[Any], field: str = "content") -> dict[int, str]:
    """Return the text of each choice."""
    said: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text = choice["delta"].get(field, "") if "delta" in choice else choice["text"]
        said[choice["index"]] = said.get(choice["index"], "") + text
    return said


def ask(host: Hosted, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{host.url}/v1/chat/completions", json=body, timeout=30, **options)
