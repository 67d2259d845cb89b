"""The models of a server: the protocol that the routes use, and its implementation for one model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from radixkv.chat import AsyncEngine
from radixkv.errors import EngineClosed, InvalidConstraint
from radixkv.grammar.constraint import installed
from radixkv.serve.gate import Gate
from radixkv.serve.models.manager import State
from radixkv.serve.openai_responses.store import ResponseStore
from radixkv.serve.service import Service
from radixkv.server_settings import Settings

Endpoint = Callable[[Service, Request], Awaitable[Response]]
"""Answers a request to one model."""
Handler = Callable[[Request], Awaitable[Response]] | ASGIApp
"""A handler of a Starlette route."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one moment.

    `source` is what the command named: a folder, a GGUF file or a name on the hub. `aliases` are its other names. A
    model that is not loaded has no `service`. `context` is in tokens, None until a first load. `memory` is the bytes
    that the load took, None if that is not known. `idle_left` is the number of seconds until an idle model is unloaded,
    None if it stays. `error` says why the latest load failed.
    """

    name: str
    source: str
    state: State
    created: int
    aliases: tuple[str, ...] = ()
    service: Service | None = None
    context: int | None = None
    memory: int | None = None
    idle_left: float | None = None
    error: str | None = None


StoredEndpoint = Callable[[Gate, ResponseStore, Request], Awaitable[Response]]
"""Answers a request about a stored response."""


class Models(Protocol):
    """The models of a server."""

    @property
    def gate(self) -> Gate:
        """The gate that the requests to all of them pass."""

    def endpoint(self, answer: Endpoint) -> Handler:
        """Return the handler of a route, which calls `answer` with the model that the request's body names."""

    def stored(self, answer: StoredEndpoint) -> Handler:
        """Return the handler of a route, which calls `answer` with the model of the response in the request's path."""

    def routes(self) -> list[Route]:
        """Return the routes that only these models have."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the models in the order in which they were named."""

    def find(self, name: str) -> ModelStatus:
        """Return the model of this name or alias; raise ApiError 404."""

    async def begin(self) -> None:
        """Count requests from now on."""

    async def prepare(self) -> None:
        """Build what the first requests would wait for."""

    async def check(self) -> None:
        """Raise EngineClosed unless requests are taken."""

    async def metrics(self) -> bytes:
        """Return the metrics of the loaded models, in Prometheus' text format; raise EngineClosed."""

    async def close(self) -> None:
        """End the running requests after the server's `drain_timeout`, and close the engines."""


class OneModel:
    """The models of a server that has one, over an engine that the caller closes or `close` does."""

    def __init__(self, engine: AsyncEngine, settings: Settings | None = None, source: str | None = None) -> None:
        """Serve `engine`, which was loaded from `source` (default: its name)."""
        self.gate = Gate(settings or Settings())
        name = self.gate.settings.model_name or engine.model.name
        self.service = Service(engine, self.gate, name, [f"{name}:latest"])  # a tag of Ollama's
        self._engine, self._created = engine, int(time.time())
        self._source = engine.model.name if source is None else source

    def endpoint(self, answer: Endpoint) -> Handler:
        """Return a handler that calls `answer` with the model."""

        async def handle(request: Request) -> Response:
            return await answer(self.service, request)

        return handle

    def stored(self, answer: StoredEndpoint) -> Handler:
        """Return a handler that calls `answer` with the responses of the model."""

        async def handle(request: Request) -> Response:
            return await answer(self.gate, self.service.responses, request)

        return handle

    def routes(self) -> list[Route]:
        """Return no route: the one model is always loaded."""
        return []

    def statuses(self) -> list[ModelStatus]:
        """Return the one model."""
        service, context = self.service, self._engine.context_limit
        return [ModelStatus(service.model_name, self._source, "loaded", self._created, (), service, context)]

    def find(self, name: str) -> ModelStatus:
        """Return the model; raise ApiError 404 for another name."""
        self.service.check_model(name)
        return self.statuses()[0]

    async def begin(self) -> None:
        """Count requests from now on."""
        with suppress(EngineClosed):
            await self.service.metrics.watch()

    async def prepare(self) -> None:
        """Build the tokenizer's table for constraints; later, the event loop would stand still meanwhile."""
        await prepare(self._engine)

    async def check(self) -> None:
        """Raise EngineClosed unless the engine takes requests."""
        self._engine.client.thread.post(lambda: None, begins=True)  # refused while the engine drains
        await self._engine.stats()

    async def metrics(self) -> bytes:
        """Return the metrics."""
        return await self.service.metrics.scrape()

    async def close(self) -> None:
        """Drain and close the engine."""
        drain = self.gate.settings.drain_timeout
        await self._engine.close(drain > 0, drain or None)


async def prepare(engine: AsyncEngine) -> None:
    """Build the tokenizer's table for constraints on another thread."""
    if installed():
        with suppress(InvalidConstraint):  # each constrained request is refused with the reason
            await asyncio.to_thread(engine.client.inputs.grammars.prepare)
