"""The socket of a server, and its answers before the model is loaded. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn, Self

from radixkv.errors import InvalidInput
from radixkv.server_settings import Settings

_RETRY_AFTER = 2  # seconds
_PATIENCE = 5.0  # seconds for a whole request
_MOST = 1 << 16  # bytes of a head, and of a read
_ENDS = (asyncio.LimitOverrunError, asyncio.CancelledError)  # by a head that is too long, by `stop`


class LoadingServer:
    """A context manager that answers each request on a bound socket with 503 and `phase`, in a thread of its own.

    It ends with the block, or by `stop`. Connections that come later wait until another server accepts on the socket.
    """

    def __init__(self, sock: socket.socket, connections: int, tls: ssl.SSLContext | None = None) -> None:
        """Close connections beyond this number at once. `tls` is the result of `tls_context`."""
        self.phase = "starting"
        self._sock, self._connections, self._tls = sock, connections, tls
        self._open = 0
        self._stopped: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="radixkv-loading", daemon=True)

    def __enter__(self) -> Self:
        """Listen. Raises OSError if another process listens on the address."""
        self._sock.listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def stop(self) -> None:
        """Accept no more connections, drop the open ones, and wait for that. May be called twice."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        self._thread.join()

    async def _serve(self) -> None:
        # A duplicate, because asyncio closes it.
        server = await asyncio.start_server(self._answer, sock=self._sock.dup(), limit=_MOST, ssl=self._tls)
        await asyncio.wrap_future(self._stopped)
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        with closing(writer), suppress(OSError, EOFError, *_ENDS):
            try:
                if self._open <= self._connections:
                    async with asyncio.timeout(_PATIENCE):
                        await self._exchange(reader, writer)
            finally:
                self._open -= 1

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(_response(self.phase, head))
        if writer.can_write_eof():  # not with TLS
            writer.write_eof()
        while await reader.read(_MOST):  # to close with unread bytes would reset the connection
            pass


def _response(phase: str, request: bytes) -> bytes:
    """Return a response that the clients of all vendors understand, and send again after some seconds."""
    message = f"the server is loading its model ({phase}): try again in {_RETRY_AFTER} s"
    openais = {"message": message, "type": "server_error", "param": None, "code": "loading"}
    error = message if b" /api/" in request.partition(b"\r\n")[0] else openais
    body = json.dumps({"type": "error", "error": error, "status": "loading", "phase": phase}).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"retry-after: {_RETRY_AFTER}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if request.startswith(b"HEAD ") else body)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet; raise OSError for an address in use, before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def address(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Load the certificate and its key, None without them; raise InvalidInput, also for an encrypted key."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None or key is None:
        return None

    def refuse() -> NoReturn:  # OpenSSL would ask for the password on the terminal
        raise InvalidInput(f"tls_key {key} is encrypted: write it without a password (openssl pkey)")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for name, path, kind in (("tls_cert", cert, "CERTIFICATE"), ("tls_key", key, "PRIVATE KEY")):
            if f"{kind}-----".encode() not in Path(path).read_bytes():
                raise InvalidInput(f"{name} {path} is no PEM file with a {kind}")
        context.load_cert_chain(cert, key, refuse)
    except OSError as error:
        raise InvalidInput(f"tls_key {key} cannot be read or does not match --tls-cert {cert}: {error}") from error
    return context
