"""Requests that arrive before the model is loaded: 503, never a wait for torch or the weights."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from typing import Any, NoReturn

import httpx
import pytest

from radixkv import Engine
from radixkv.cli import main
from radixkv.errors import InvalidInput
from radixkv.serve.loading import LoadingServer, address, bind


def test_each_request_gets_503_with_the_phase() -> None:
    with bind("127.0.0.1", 0) as sock, LoadingServer(sock, 2) as waiting:
        url = address(sock)
        for phase in ("starting", "loading the model"):
            waiting.phase = phase
            answer = httpx.get(f"{url}/health")
            assert (answer.status_code, answer.json()["phase"], answer.headers["retry-after"]) == (503, phase, "2")
        assert httpx.head(f"{url}/health").content == b""
        assert httpx.post(f"{url}/api/chat").json()["error"].startswith("the server is loading its model")
        refused = httpx.post(f"{url}/v1/messages", content=bytes(1 << 22))  # read, so that the response arrives
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        waiting.stop()
        with socket.create_connection(sock.getsockname()) as late, sock.accept()[0] as accepted:  # by the next server
            accepted.sendall(b"hello")
            assert late.recv(10) == b"hello"


def test_connections_and_heads_are_limited() -> None:
    with (
        bind("127.0.0.1", 0) as sock,
        LoadingServer(sock, 1),
        socket.create_connection(sock.getsockname()) as first,
    ):
        with pytest.raises(httpx.TransportError):
            httpx.get(address(sock))
        first.sendall(bytes(1 << 18))  # a head without an end
        with suppress(ConnectionError):
            assert first.recv(1) == b""


def test_an_error_of_the_load_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, str]] = []

    def load(*_: Any, **__: Any) -> NoReturn:
        port = int(re.search(r"port (\d+) answers with status 503", capsys.readouterr().err)[1])  # type: ignore[index]
        health = httpx.get(f"http://127.0.0.1:{port}/health")
        seen.append((port, health.json()["phase"]))
        assert main(["serve", "tiny", "--port", str(port)]) == 1  # in use, which is found before the load
        raise InvalidInput("the weights are not there")

    monkeypatch.setattr(Engine, "load", load)
    assert main(["serve", "tiny", "--port", "0"]) == 2
    [(port, phase)] = seen
    assert phase == "loading the model"
    said = capsys.readouterr().err
    assert "ddress already in use" in said and "the weights are not there" in said
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
