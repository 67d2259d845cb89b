"""The HTTP parser of the server: httptools, which halves the cost of an event, or h11 where httptools is missing.

Invariant: with both, an unfinished head of a request takes a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

MAX_HEAD = 1 << 16  # bytes, as uvicorn's default for h11


def http_protocol() -> type[asyncio.Protocol] | str:
    """Return the value of uvicorn's setting `http`."""
    return _limited_httptools() if find_spec("httptools") is not None else "h11"


def _limited_httptools() -> type[asyncio.Protocol]:
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
