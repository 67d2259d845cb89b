"""Record the requests that a server receives, with the server's own token counts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.serve.served import until


@dataclass
class Exchange:
    """One request and the result. `usage` has the counts that the server logs; empty if the request failed."""

    method: str
    path: str
    body: bytes = b""
    status: int | None = None
    usage: dict[str, int] = field(default_factory=dict)
    ignored: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Turn:
    """The tokens of one request that the model replied to; `cached` of `prompt` were found in the cache."""

    prompt: int
    cached: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


def turn_of(exchange: Exchange) -> Turn:
    """Return the counts of a request that succeeded."""
    usage = exchange.usage
    return Turn(usage["prompt"], usage["cached"], usage["output"])


class Recorder:
    """Wrap an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["method"], scope["path"])
        self.exchanges.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            state: dict[str, Any] = scope.get("state", {})
            exchange.usage = dict(state.get("log_fields", {}))
            exchange.ignored = state["ignored"].text(",") if state.get("ignored") else ""
            exchange.ended = True


class Traffic:
    """The requests since this object was created."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._start = recorder, len(recorder.exchanges)

    def exchanges(self) -> list[Exchange]:
        """Return the requests in their order, once all are complete."""
        until(lambda: all(each.ended for each in self._recorder.exchanges))
        return self._recorder.exchanges[self._start :]

    def turns(self) -> list[Turn]:
        """Return the turns of the conversations, in their order. Every request must have succeeded."""
        found = self.exchanges()
        failed = [(each.method, each.path, each.status) for each in found if each.status != 200]
        assert not failed, failed
        return [turn_of(each) for each in found if each.usage]

    def save(self, folder: Path) -> None:
        """Write each body to a file, for a person to read after a failure."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for number, each in enumerate(self.exchanges()):
            try:
                text = json.dumps(json.loads(each.body), indent=1, ensure_ascii=False)
            except ValueError:
                text = each.body.decode(errors="replace")
            name = f"{number:02}-{each.method}{each.path.replace('/', '_')}-{each.status}.json"
            (folder / name).write_text(text)

    def ignored(self) -> str:
        """Return the names of the fields that the server ignored, without the numbers of items."""
        names = {re.sub(r"\d+", "", name) for each in self.exchanges() for name in each.ignored.split(",") if name}
        return ", ".join(sorted(names)) or "none"
