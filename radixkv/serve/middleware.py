"""Middleware around every endpoint: request ids, warnings, one log line per request, and a response to every failure.

The log has a path, a status, numbers, the tenant, the id and the label that the client chose, and the names of ignored
fields; never texts, values or other headers of a request.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.serve.access import check_local
from radixkv.serve.error_forms import error_response
from radixkv.serve.errors import ApiError, as_api_error
from radixkv.serve.fields import IgnoredFields
from radixkv.server_settings import Settings

REQUEST_ID = "x-request-id"
MOST_HEADERS = 200
ANTHROPIC_REQUEST_ID = "request-id"  # where Anthropic's clients look for it
LABEL = "x-radixkv-label"
MISS = "miss"
"""The field of the log with the part of a prompt that changed; its header is X-RadixKV-Miss."""
_MISS_HEADER = "x-radixkv-miss"
_GOOD_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_log = logging.getLogger("radixkv.serve")


def label_of(headers: Headers) -> str | None:
    """Return the label that the client gave a request; None without one, and for one with other characters."""
    label = headers.get(LABEL, "")
    return label if _GOOD_ID.fullmatch(label.encode()) else None


def middleware(settings: Settings) -> list[Middleware]:
    """Return the middleware of a server, outermost first: allowed pages can read all responses, errors included."""
    check = (lambda _: None) if settings.api_keys else partial(check_local, settings)
    methods = ("DELETE", "GET", "HEAD", "POST")
    exposed = (REQUEST_ID, ANTHROPIC_REQUEST_ID, "warning", "retry-after", _MISS_HEADER)
    options: dict[str, Any] = {"allow_headers": ["*"], "expose_headers": exposed, "allow_private_network": True}
    cors = Middleware(CORSMiddleware, settings.allowed_origins, methods, **options)
    return [*([cors] if settings.allowed_origins else []), Middleware(RequestMiddleware, check)]


class RequestMiddleware:
    """Wrap the application.

    Endpoints put numbers for the log into the dict `scope["state"]["log_fields"]`. They add the fields of the body that
    they ignored to `scope["state"]["ignored"]`, before the response starts. `keep_alive` there is the number of seconds
    for which a request asks its model to stay, and `load_seconds` the time that the request waited for a load.
    """

    def __init__(self, app: ASGIApp, check: Callable[[Headers], None]) -> None:
        """Wrap `app`; `check` raises ApiError for the headers of a request that `app` must not answer."""
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; pass other scopes (lifespan) on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            if len(scope["headers"]) > MOST_HEADERS:
                raise ApiError(431, f"the request has more than {MOST_HEADERS} headers", code="too_many_headers")
            self._check(Headers(scope=scope))
            await self._app(scope, receive, exchange.send)
        except Exception as error:
            if exchange.status is None:
                failed = error_response(scope["path"], as_api_error(error), scope["state"]["request_id"])
                await failed(scope, receive, exchange.send)
            else:
                _log.error("a response could not be finished", exc_info=error)
        finally:
            exchange.log()


class _Exchange:
    """One request and the state of its response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._began = time.perf_counter()
        self.status: int | None = None
        sent = next((value for name, value in scope["headers"] if name == REQUEST_ID.encode()), b"")
        self._id = sent.decode() if _GOOD_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
        self._log_fields: dict[str, Any] = {}
        self._ignored = IgnoredFields()
        scope.setdefault("state", {}).update(request_id=self._id, log_fields=self._log_fields, ignored=self._ignored)
        scope["state"].update(keep_alive=None, load_seconds=0.0)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [(name.encode(), self._id.encode()) for name in (REQUEST_ID, ANTHROPIC_REQUEST_ID)]
            headers = [*message["headers"], *ids]
            if MISS in self._log_fields:
                headers.append((_MISS_HEADER.encode(), self._log_fields[MISS].encode()))
            if self._ignored:
                headers.append((b"warning", f'299 radixkv "ignored: {self._ignored.text()}"'.encode()))
            message = {**message, "headers": headers}
        await self._send(message)

    def log(self) -> None:
        route = getattr(self._scope.get("route"), "path", "-")  # the route's pattern, never the requested path
        named = {"ignored": self._ignored.text(",")} if self._ignored else {}
        log_fields = "".join(f" {name}={value}" for name, value in {**self._log_fields, **named}.items())
        seconds = time.perf_counter() - self._began
        _log.info("%s %s %s %s %.3fs%s", self._id, self._scope["method"], route, self.status, seconds, log_fields)
