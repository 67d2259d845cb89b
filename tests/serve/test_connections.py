"""One tenant cannot lock out another: halves of streams and of connections, and a timeout for headers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from radixkv.serve import Settings, http_parser
from tests.selection import mostly_long
from tests.serve.served import CHAT, Hosted, hosted, until

KEYS = {"ann": "key-of-ann", "ben": "key-of-ben"}
SHORT = {**CHAT, "max_tokens": 2}


@pytest.fixture(params=mostly_long(["httptools", "h11"], "httptools"))
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "httptools":
        pytest.importorskip("httptools")
    else:
        monkeypatch.setattr(http_parser, "find_spec", lambda name: None)


def head(tenant: str | None = "ann", length: int = 50) -> bytes:
    key = f"Authorization: Bearer {KEYS[tenant]}\r\n" if tenant else ""
    return f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {length}\r\n\r\n".encode()


def connected(host: Hosted, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", host.port), 20)
    client.sendall(data)
    return client


def whole(tenant: str | None = "ann") -> bytes:
    body = b'{"prompt": "x"}'
    return head(tenant, len(body)) + body


def answered(client: socket.socket) -> bytes:
    """Return the status line of a response whose body is there as well."""
    response = client.recv(10_000)
    while response and not response.endswith(b"}"):
        response += client.recv(10_000)
    return response.partition(b"\r\n")[0]


def is_closed(client: socket.socket) -> bool:
    """Whether the server closes the connection, within the client's timeout."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def send(host: Hosted, tenant: str) -> httpx.Response:
    return httpx.post(f"{host.url}/v1/chat/completions", json=SHORT, headers={"x-api-key": KEYS[tenant]}, timeout=30)


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_half_bodies_of_one_key_leave_room_for_another(sockets: ExitStack) -> None:
    with hosted(Settings(api_keys=KEYS, max_running=4, max_waiting=4)) as host:
        held = [sockets.enter_context(connected(host, head() + b"{")) for _ in range(4)]
        until(lambda: host.service.gate.limiter.streams == 4)
        for _ in range(20):
            with connected(host, head() + b"{") as another:
                assert another.recv(20) == b"HTTP/1.1 429 Too Man"
        assert send(host, "ann").status_code == 429
        assert send(host, "ben").status_code == 200
        for each in held:
            each.close()
        until(lambda: host.service.gate.limiter.streams == 0)
        assert send(host, "ann").status_code == 200


@pytest.mark.parametrize(
    ("given", "streams", "connections"),
    [
        ({}, None, None),
        ({"api_keys": {"ann": "key-of-ann"}}, None, None),
        ({"api_keys": KEYS}, 160, 400),
        ({"api_keys": KEYS, "max_per_key": 300}, 300, 400),
        ({"api_keys": KEYS, "max_running": 1, "max_waiting": 0}, 1, 400),
        ({"api_keys": KEYS, "max_waiting": 936}, 500, 1000),
        ({"api_keys": KEYS, "max_connections": 7}, 160, 3),
    ],
)
def test_with_two_keys_each_has_half(given: dict[str, object], streams: int | None, connections: int | None) -> None:
    settings = Settings(**given)  # type: ignore[arg-type]
    assert (settings.streams_per_key, settings.connections_per_key) == (streams, connections)


def test_an_idle_connection_of_the_key_goes_first(parser: None, sockets: ExitStack) -> None:
    with hosted(Settings(api_keys=KEYS, max_connections=4)) as host:
        held = []
        for _ in range(2):
            held.append(sockets.enter_context(connected(host, whole())))
            assert answered(held[-1]) == b"HTTP/1.1 200 OK"
        third = sockets.enter_context(connected(host, whole()))
        assert answered(third) == b"HTTP/1.1 200 OK"
        assert is_closed(held[0])
        held[1].sendall(whole())  # it stays, and its next request counts once
        assert answered(held[1]) == b"HTTP/1.1 200 OK"
        held[1].sendall(whole("ben"))
        assert answered(held[1]) == b"HTTP/1.1 200 OK"
        assert dict(host.service.gate.connections._counts) == {"ann": 1, "ben": 1}


@pytest.mark.long
def test_at_the_limit_idle_connections_go_first_and_busy_ones_stay(parser: None, sockets: ExitStack) -> None:
    with hosted(Settings(max_connections=3, drain_timeout=0.2)) as host:
        busy = [sockets.enter_context(connected(host, head(None) + b"{"))]
        until(lambda: host.service.gate.limiter.streams == 1)
        idle = [sockets.enter_context(connected(host)) for _ in range(2)]
        until(lambda: len(host.service.gate.connections) == 3)
        busy.append(sockets.enter_context(connected(host, head(None) + b"{")))
        assert is_closed(idle[0])
        until(lambda: host.service.gate.limiter.streams == 2)
        busy.append(sockets.enter_context(connected(host, head(None) + b"{")))
        assert is_closed(idle[1])
        until(lambda: host.service.gate.limiter.streams == 3)
        with connected(host, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as refused:
            assert is_closed(refused)
        assert len(host.service.gate.connections) == 3
        busy.pop().close()
        until(lambda: len(host.service.gate.connections) == 2)
        assert httpx.get(f"{host.url}/health", timeout=20).status_code == 200


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "], ids=len
)
def test_headers_that_do_not_arrive_end_the_connection(parser: None, begun: bytes, sockets: ExitStack) -> None:
    with hosted(Settings(head_timeout=0.2)) as host:
        assert is_closed(sockets.enter_context(connected(host, begun)))
        later = sockets.enter_context(connected(host, whole(None)))  # and so does a second request of a connection
        assert answered(later) == b"HTTP/1.1 200 OK"
        if begun:
            later.sendall(begun)
            assert is_closed(later)
        until(lambda: len(host.service.gate.connections) == 0 or not begun)


def test_a_request_with_headers_has_its_own_times(parser: None, sockets: ExitStack) -> None:
    with hosted(Settings(head_timeout=0.2)) as host:
        slow = sockets.enter_context(connected(host, head(None, 15)))
        idle = sockets.enter_context(connected(host, whole(None)))
        assert answered(idle) == b"HTTP/1.1 200 OK"
        assert is_closed(sockets.enter_context(connected(host)))  # 0.2 s later than the other two
        slow.sendall(b'{"prompt": "x"}')
        idle.sendall(whole(None))
        assert answered(slow) == answered(idle) == b"HTTP/1.1 200 OK"
