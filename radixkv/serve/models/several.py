"""The models of a server that has several: each request is answered by the one that its body names."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from radixkv.chat import Engine
from radixkv.errors import EngineClosed, InvalidInput
from radixkv.serve.access import read_body
from radixkv.serve.bodies import read
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.gate import Gate
from radixkv.serve.metrics import exposition
from radixkv.serve.models.loading import LoadedService, load, serve
from radixkv.serve.models.manager import Manager, NotLoaded, Slot
from radixkv.serve.models.specs import ModelSpec
from radixkv.serve.ollama.endpoint import unload
from radixkv.serve.schemas import ModelBody
from radixkv.serve.served_models import Endpoint, Handler, ModelStatus, StoredEndpoint
from radixkv.serve.service import Kept, Service
from radixkv.server_settings import Settings

AnySlot = Slot[LoadedService]


@dataclass(frozen=True)
class _Entry:
    """One model: its declaration, its slot, and the conversations that outlive a load."""

    spec: ModelSpec
    slot: AnySlot
    kept: Kept


class SeveralModels:
    """The models of a server, of which each is loaded at its first request. Implements `served_models.Models`."""

    def __init__(self, specs: Sequence[ModelSpec], settings: Settings, first: Engine | None = None) -> None:
        """Serve `specs`; `first` is the engine of the first one if that is loaded already."""
        self.gate = Gate(settings)
        self._entries = [
            _Entry(spec, Slot(spec.name, spec.estimate(), settings.keep_alive), Kept.empty(settings, count(1).__next__))
            for spec in specs
        ]
        self._by_name = {name: entry for entry in self._entries for name in entry.spec.names}
        self._first, self._created = first, int(time.time())
        self._manager = Manager(
            [entry.slot for entry in self._entries],
            self._load,
            load_timeout=settings.load_timeout,
            max_loaded=settings.max_loaded,
            memory=settings.model_memory,
        )

    def endpoint(self, answer: Endpoint) -> Handler:
        """Return an application that calls `answer` with the model that the body names."""
        return _OfBody(self, answer)

    def stored(self, answer: StoredEndpoint) -> Handler:
        """Return a handler that calls `answer` with the model that has the response."""

        async def handle(request: Request) -> Response:
            for entry in self._entries:
                try:
                    return await answer(self.gate, entry.kept.responses, request)
                except ApiError as error:
                    if error.status != 404 or entry is self._entries[-1]:
                        raise
            raise AssertionError("a server has a model")

        return handle

    def statuses(self) -> list[ModelStatus]:
        """Return all models, in the order in which they were named."""
        return [self._status(entry) for entry in self._entries]

    def find(self, name: str) -> ModelStatus:
        """Return the model of this name; raise ApiError 404, with all names."""
        return self._status(self._named(name))

    async def begin(self) -> None:
        """Take the first model, if the command loaded it."""
        if self._first is not None:
            entry, engine, self._first = self._entries[0], self._first, None
            self._manager.adopt(entry.slot, await serve(engine, entry.spec, self.gate, entry.kept))

    async def prepare(self) -> None:
        """Do nothing: a load prepares its model."""

    async def check(self) -> None:
        """Do nothing: the server takes requests, whichever models are loaded."""

    async def metrics(self) -> bytes:
        """Return the metrics of the loaded models, each sample with the label `model`."""
        found = {}
        for entry in self._entries:
            if entry.slot.loaded is not None:
                with suppress(EngineClosed):
                    found[entry.spec.name] = await entry.slot.loaded.service.metrics.families()
        return exposition([*self._own_metrics(), *_labelled(found, self.gate.limiter.refused)])

    async def close(self) -> None:
        """Drain and close all engines at once."""
        await self._manager.close()

    def routes(self) -> list[Route]:
        """Return the routes by which an operator loads and unloads a model; they are those of llama.cpp's router."""
        return [
            Route("/models/load", self._load_named, methods=["POST"]),
            Route("/models/unload", self._unload_named, methods=["POST"]),
        ]

    # ---- inside

    @asynccontextmanager
    async def used(self, request: Request, entry: _Entry) -> AsyncIterator[Service]:
        """Hold a model in memory; raise ApiError 500 or 503.

        Afterwards a `keep_alive` of the request says how long the model stays when it is idle, until it is unloaded or
        another request says so. With keys, it may only shorten the server's.
        """
        began = time.perf_counter()
        with _as_api_errors(self.gate.settings):
            async with self._manager.use(entry.slot) as loaded:
                request.state.load_seconds = time.perf_counter() - began
                try:
                    yield loaded.service
                finally:
                    if (asked := request.state.keep_alive) is not None:
                        most = self.gate.settings.keep_alive if self.gate.settings.api_keys else math.inf
                        entry.slot.keep_alive = min(asked, most)

    def asked(self, request: Request, body: JsonObject) -> _Entry:
        """Return the model that a body names. Without a name it is the first one, and for Anthropic's clients, too."""
        name = body.get("model")
        if not isinstance(name, str) or not name:
            return self._entries[0]
        messages = request.url.path.removeprefix("/v1").startswith("/messages")
        if messages and not self.gate.settings.strict_fields and name not in self._by_name:
            return self._entries[0]
        return self._named(name)

    def _named(self, name: str) -> _Entry:
        entry = self._by_name.get(name)
        if entry is None:
            there = ", ".join(repr(each.spec.name) for each in self._entries)
            message = f"model {name[:100]!r} not found: this server has {there}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return entry

    async def _load(self, slot: AnySlot) -> LoadedService:
        entry, slot.keep_alive = self._by_name[slot.name], self.gate.settings.keep_alive
        return await load(entry.spec.for_load(slot.loads + 1), self.gate, entry.kept, again=slot.loads > 0)

    async def _load_named(self, request: Request) -> Response:
        """Load a model, and respond once it is there."""
        entry = await self._entry_in(request)
        async with AsyncExitStack() as held:
            await self.gate.cancellable(request, held.enter_async_context(self.used(request, entry)))
        return JSONResponse({"success": True})

    async def _unload_named(self, request: Request) -> Response:
        """Unload a model, and respond once it is gone."""
        entry = await self._entry_in(request)
        try:
            await self.gate.cancellable(request, self._manager.unload(entry.slot))
        except InvalidInput as error:
            raise ApiError(409, str(error), param="model", code="model_in_use") from error
        return JSONResponse({"success": True})

    async def _entry_in(self, request: Request) -> _Entry:
        with ExitStack() as cleanup:
            self.gate.admit(request, cleanup)
            entry = self._named((await self.gate.read(request, partial(read, ModelBody))).model)
            request.state.deadline = None  # a load has a limit of its own
            return entry

    def _status(self, entry: _Entry) -> ModelStatus:
        slot, spec = entry.slot, entry.spec
        service, context, memory = None, None, None
        if slot.loaded is not None:
            service, context, memory = slot.loaded.service, slot.loaded.service.engine.context_limit, slot.needs
        named = spec.name, spec.source, slot.state, self._created, spec.aliases
        error = None if self.gate.settings.api_keys else slot.error
        return ModelStatus(*named, service, context, memory, slot.idle_left, error)

    def _own_metrics(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("radixkv:model_loaded", "Whether the model is in memory", labels=["model"])
        loads = CounterMetricFamily("radixkv:model_loads", "Loads of the model", labels=["model"])
        for entry in self._entries:
            loaded.add_metric([entry.spec.name], float(entry.slot.loaded is not None))
            loads.add_metric([entry.spec.name], entry.slot.loads)
        yield from (loaded, loads)


class _OfBody:
    """An ASGI application: an endpoint of the model that the body of a request names.

    The model stays in memory until the response has been sent. The request's timeout begins after a load, which has a
    limit of its own.
    """

    def __init__(self, models: SeveralModels, answer: Endpoint) -> None:
        self._models, self._answer = models, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, gate = Request(scope, receive, send), self._models.gate
        request.state.deadline = None
        async with AsyncExitStack() as held:
            with ExitStack() as admitted:  # the endpoint admits it again, before any other request can come between
                gate.admit(request, admitted)
                body = await read_body(request, gate.settings)
                given = await gate.parsed(body)
                entry = self._models.asked(request, given)
                absent = entry.slot.state not in ("loading", "loaded")
                if absent and (response := unload(request.url.path, given)) is not None:
                    await response(scope, receive, send)
                    return
                service = await gate.cancellable(request, held.enter_async_context(self._models.used(request, entry)))
            again = _replayed(body, receive)
            response = await self._answer(service, Request(scope, again, send))
            await response(scope, again, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a channel that yields a body that was received, then the messages after it."""
    waiting = [body]

    async def received() -> Message:
        return {"type": "http.request", "body": waiting.pop()} if waiting else await receive()

    return received


@contextmanager
def _as_api_errors(settings: Settings) -> Iterator[None]:
    """Convert NotLoaded to ApiError: 503 for a model that is not there yet, 500 for one that cannot be loaded.

    The reason may name files, so tenants are referred to the log.
    """
    try:
        yield
    except NotLoaded as error:
        if error.wait:
            text = f"{error}: try again in {settings.retry_after} s"
            headers = {"Retry-After": str(settings.retry_after)}
            raise ApiError(503, text, code="model_not_loaded", kind="server_error", headers=headers) from error
        text = "the model could not be loaded; the server's log says why" if settings.api_keys else str(error)
        headers = {"x-should-retry": "false"}
        raise ApiError(500, text, code="model_failed", kind="server_error", headers=headers) from error


def _labelled(found: Mapping[str, Sequence[Metric]], refused: int) -> list[Metric]:
    """Return the families of several models, each sample with its model. Refused requests are the server's."""
    merged: dict[str, Metric] = {}
    for model, families in found.items():
        for family in families:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [each._replace(labels={"model": model, **each.labels}) for each in family.samples]
    if (ends := merged.get("radixkv:requests_ended")) is not None:
        ends.samples = [each for each in ends.samples if each.labels["outcome"] != "refused"]
        ends.add_sample(f"{ends.name}_total", {"model": "", "outcome": "refused"}, refused)
    return list(merged.values())
