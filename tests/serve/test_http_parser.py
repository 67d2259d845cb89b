"""Both HTTP parsers of the server: endless headers end the connection, and every request gets its response."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from radixkv.serve import http_parser
from radixkv.serve.http_parser import MAX_HEAD
from tests.serve.served import CHAT, Hosted, ask, hosted


@pytest.fixture(scope="module", params=["httptools", "h11"])
def host(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    if request.param == "httptools":
        pytest.importorskip("httptools")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11":
            patch.setattr(http_parser, "find_spec", lambda name: None)
        with hosted() as server:
            yield server


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /health HTTP/1.1\r\nX: ",
        b"GET /health?",
        b"POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
    ids=["header", "target", "trailer"],
)
def test_an_endless_head_is_refused(host: Hosted, endless: bytes) -> None:
    with socket.create_connection(("127.0.0.1", host.port), timeout=20) as client:
        # The socket buffers of both ends take megabytes, so an accepted byte is not yet a read byte:
        # the server must end the connection by itself while the client waits for more.
        try:
            client.sendall(endless)
            client.sendall(b"x" * (40 * MAX_HEAD))
            while client.recv(1 << 16):
                pass
        except TimeoutError:
            pytest.fail("the server accepts any number of bytes")
        except OSError:
            pass  # reset by the server
    assert httpx.get(f"{host.url}/health", timeout=20).status_code == 200


def test_small_responses_do_not_wait_for_an_acknowledgement(host: Hosted) -> None:
    with httpx.Client() as client:
        assert client.get(f"{host.url}/ping").status_code == 200
        (connection,) = host.server.server_state.connections
        open_socket = connection.transport.get_extra_info("socket")
        assert open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_long_heads_bodies_and_connections_that_stay_open_work(host: Hosted) -> None:
    with httpx.Client(base_url=host.url, timeout=20) as client:
        for length in (10, 50_000):
            assert client.get("/health", headers={"X-Long": "x" * length}).status_code == 200
        padded = {**CHAT, "max_tokens": 2, "metadata": {"x": "y" * 300_000}}
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=padded).status_code == 200

        def small_chunks() -> Iterator[bytes]:
            yield b'{"model": "fake", "prompt": [1, 2], "max_tokens": 2'
            yield from (b" " for _ in range(20_000))
            yield b"}"

        assert client.post("/v1/completions", content=small_chunks()).status_code == 200
    assert ask(host, {**CHAT, "max_tokens": 2}).status_code == 200
