"""The connection of one client, without an HTTP library: the clients share the cores with the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Self

from .endpoints import Endpoint


class Connection:
    """One connection, which is kept for all requests of a client. An async context manager, which closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> Self:
        """Connect to the server at `url`."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def events(self, endpoint: Endpoint, body: Any, **headers: str) -> AsyncIterator[Any]:
        """Yield the JSON of each event of a stream; raise RuntimeError for an error or a missing end.

        A server may put several events into one part of the body, but never one into two.
        """
        ended = False
        async for part in self.parts("POST", endpoint.path, body, **headers):
            for line in part.decode().splitlines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                ended = data.startswith(endpoint.last)
                if data == "[DONE]":
                    continue
                event = json.loads(data)
                if event.get("error") or event.get("type") == "error":
                    raise RuntimeError(f"the stream ended with an error: {data}")
                yield event
        if not ended:
            raise RuntimeError("a stream ended without its last event")

    async def parts(self, method: str, path: str, body: Any = None, **headers: str) -> AsyncIterator[bytes]:
        """Yield the body of the response as it arrives; raise RuntimeError unless the status is 200."""
        sent = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "localhost", "Content-Length": len(sent), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        head = "\r\n".join(lines) + "\r\n\r\n"
        self._writer.write(head.encode() + sent)
        status, *received = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        pairs = (line.partition(":") for line in received if line)
        parts = self._parts({name.lower(): value.strip() for name, _, value in pairs})
        if " 200 " not in f"{status} ":
            raise RuntimeError(f"{status}: {b''.join([part async for part in parts])!r}")
        async for part in parts:
            yield part

    async def _parts(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
