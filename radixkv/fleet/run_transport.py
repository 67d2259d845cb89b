"""Move runs from a prefill worker to decode workers, over TCP.

First each end proves by an HMAC of random numbers that it holds the key. What follows is not encrypted: use a private
network. A request is a line of JSON of bounded length, and a run is read as from a file.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from socketserver import ThreadingTCPServer
from typing import IO, Any

from radixkv.chat import Engine
from radixkv.engine.runs import Run
from radixkv.errors import InvalidInput, PinBudgetExceeded, ProtocolError, RadixKVError

_DECODE, _PREFILL = b"radixkv runs 1, decode", b"radixkv runs 1, prefill"
_RANDOM = 32  # bytes, as many as a proof has
_LONGEST = 16 << 20  # bytes of a request: a million token ids
_BUFFER = 1 << 18
_MOST_THREADS = 256
_PROOF_SECONDS = 10.0  # for each part of a proof
_NEXT, _NO = b"\n", b"!"  # the worker has computed the text, the run may be sent; it does not compute this text

_log = logging.getLogger(__name__)


class Refused(ProtocolError):
    """The prefill worker cannot compute this text, and may compute others."""


class SocketTransport:
    """Gets runs that a prefill worker computes; tickets are connections. Its methods wait, on any thread.

    A worker has `timeout` seconds for each answer.
    """

    def __init__(self, address: tuple[str, int], key: bytes, timeout: float) -> None:
        """Store the address of a prefill worker; nothing is connected yet."""
        self._address, self._key, self._timeout = address, key, timeout

    def offer(self, tokens: Sequence[int], namespace: str | None) -> Any:
        """Raise OSError, ProtocolError for another key, and Refused."""
        with socket.create_connection(self._address, self._timeout) as sock:
            stream = _opened(sock)  # which remains open
        try:
            _prove(stream, self._key, _DECODE, _PREFILL)
            asked = {"tokens": list(tokens), "namespace": namespace, "timeout": self._timeout}
            _send(stream, json.dumps(asked).encode() + b"\n")
            if _exactly(stream, len(_NEXT)) != _NEXT:
                raise Refused("the prefill worker refuses the text: see its log")
        except BaseException:
            stream.close()
            raise
        return stream

    def fetch(self, ticket: Any) -> Run:
        """Raise OSError, and InvalidInput for a run that is damaged or not whole."""
        with ticket:
            _send(ticket, _NEXT)
            return Run.read(ticket)


class PrefillServer(ThreadingTCPServer):
    """Computes texts for decode workers, and sends their runs, each connection on a thread of its own.

    A run is leased: it is pinned, if the budget of pins allows, until it is taken, its connection ends, or `lease`
    seconds have passed.
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 128
    timeout = 0.5  # seconds of `handle_request`

    def __init__(self, engine: Engine, address: tuple[str, int], key: bytes, lease: float = 60.0) -> None:
        """Listen. Raises OSError for an address that is in use, or of another machine."""
        self._engine, self._key, self._lease = engine, key, lease
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, self._serve)

    def verify_request(self, *_: Any) -> bool:
        """Return whether a new connection may have a thread."""
        return threading.active_count() < _MOST_THREADS

    def _serve(self, sock: socket.socket, *_: Any) -> Any:
        try:
            sock.settimeout(min(self._lease, _PROOF_SECONDS))
            with _opened(sock) as stream:
                _prove(stream, self._key, _PREFILL, _DECODE)
                sock.settimeout(self._lease)
                self._answer(stream, **json.loads(stream.readline(_LONGEST)))
        except (OSError, ValueError, TypeError, RecursionError, RadixKVError) as error:
            _log.warning("a decode worker got no run: %s", error)

    def _answer(self, stream: IO[bytes], tokens: list[int], namespace: str | None, timeout: float) -> None:
        try:
            leased: Any = self._engine.warm(tokens, pin=True, ttl=self._lease, namespace=namespace, timeout=timeout)
        except PinBudgetExceeded:
            leased = nullcontext()  # its KV is cached, and may be evicted
        except InvalidInput:
            _send(stream, _NO)
            raise
        with leased:
            _send(stream, _NEXT)
            _exactly(stream, len(_NEXT))
            run = self._engine.export_run(tokens, namespace=namespace)
        run.write(stream)


def _opened(sock: socket.socket) -> Any:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each message may wait for 40 ms
    return sock.makefile("rwb", _BUFFER)


def _prove(stream: IO[bytes], key: bytes, side: bytes, other: bytes) -> None:
    """Prove to the other end that this end holds the key, and the reverse. Raises ProtocolError, OSError."""
    ours = secrets.token_bytes(_RANDOM)
    _send(stream, ours)
    theirs = _exactly(stream, _RANDOM)
    _send(stream, hmac.digest(key, side + ours + theirs, "sha256"))
    if not hmac.compare_digest(_exactly(stream, _RANDOM), hmac.digest(key, other + theirs + ours, "sha256")):
        raise ProtocolError("the other worker has another key, or another version")


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.flush()


def _exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise ConnectionResetError("the other worker closed the connection: see its log")
    return data
