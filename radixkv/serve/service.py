"""What all endpoints share: the engine, who may ask, how much, and how a prompt becomes token ids. Knows no route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from radixkv.chat import AsyncEngine
from radixkv.serve.auth import Auth, namespace
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.limits import Gate, read_body
from radixkv.serve.settings import Settings

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request; `namespace` is what the cache keeps apart."""

    tenant: str | None
    namespace: Hashable
    request_id: str


class Service:
    """One engine behind one set of endpoints. The engine is whoever's made it: this never closes it."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        """Serve `engine`."""
        self.engine = engine
        self.settings = settings
        self.auth = Auth(settings.api_keys)
        self.gate = Gate(settings)
        self.model_name = settings.model_name or engine.model.name
        self.created = int(time.time())
        # One thread, since a tokenizer is not for two at once; it goes with the last reference to this.
        self._thinking = ThreadPoolExecutor(1, "radixkv-serve")

    async def body(self, request: Request) -> JsonObject:
        """What was sent, once it is known who sent it. Raises ApiError."""
        self.auth.tenant(request.headers)
        return await read_body(request, self.settings)

    def caller(self, request: Request, cache_key: str | None = None) -> Caller:
        """Who sent this; raises ApiError 401."""
        tenant = self.auth.tenant(request.headers)
        return Caller(tenant, namespace(tenant, request.headers, cache_key), request.state.request_id)

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless this is the model that is served."""
        if name != self.model_name:
            message = f"there is no model {name[:100]!r} here: this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def aside(self, call: Callable[[], Result]) -> Result:
        """What `call` returns, on the thread for templates and tokenizers: the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thinking, call)

    def close(self) -> None:
        """Let the thread go."""
        self._thinking.shutdown(wait=False)
