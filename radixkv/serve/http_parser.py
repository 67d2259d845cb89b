"""The HTTP parser of the server: httptools, which halves the cost of an event, or h11 where httptools is missing.

Invariants, with both: an unfinished head of a request takes a bounded amount of memory and time, and all open
connections are counted.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import Any

from radixkv.serve.connections import Connections

MAX_HEAD = 1 << 16  # bytes, as uvicorn's default for h11


def http_protocol(connections: Connections, head_timeout: float) -> type[asyncio.Protocol]:
    """Return the value of uvicorn's setting `http`; a head must be complete after `head_timeout` seconds."""
    if find_spec("httptools") is not None:
        return _counted(_limited_httptools(), connections, head_timeout)
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return _counted(H11Protocol, connections, head_timeout)


def _limited_httptools() -> type[Any]:
    """Return uvicorn's protocol for httptools, with a limit on the bytes of headers and trailers."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class LimitedHttpTools(HttpToolsProtocol):
        """Close a connection whose headers or trailers are too long. httptools itself keeps any number of bytes."""

        _unfinished = 0  # bytes since the last end of a head, part of a body or end of a message
        _progressed = False

        def data_received(self, data: bytes) -> None:
            self._progressed = False
            super().data_received(data)
            self._unfinished = 0 if self._progressed else self._unfinished + len(data)
            if self._unfinished > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("The headers of the request are too long.")

        def on_headers_complete(self) -> None:
            self._progressed = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._progressed = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._progressed = True
            super().on_message_complete()

    return LimitedHttpTools


def _counted(parser: type[Any], connections: Connections, head_timeout: float) -> type[asyncio.Protocol]:
    """Add the time limit of heads to one of uvicorn's protocols, and count its connections.

    The endpoints find the connection of a request in its `scope["state"]["connection"]`.
    """

    class CountedConnection(parser):  # type: ignore[misc]
        """A connection that is closed if a head does not arrive in time: the first one, or a later one once it begins.

        Between two requests, uvicorn's timeout for idle connections applies.
        """

        app_state: dict[str, Any]
        _head_timer: asyncio.TimerHandle | None = None

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        def close(self) -> None:
            self.transport.close()

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "connection": self}
            self._await_head()
            connections.opened(self)

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_timer()
            connections.closed(self)
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._stop_timer()
            elif self.is_idle and self._head_timer is None:
                self._await_head()

        def _await_head(self) -> None:
            if not self.transport.is_closing():
                self._head_timer = self.loop.call_later(head_timeout, self._head_is_late)

        def _head_is_late(self) -> None:
            self._head_timer = None
            self.transport.close()

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return CountedConnection
