"""The ASGI application: routes, the small endpoints, and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from radixkv import __version__
from radixkv.chat import AsyncEngine
from radixkv.errors import EngineClosed, RadixKVError
from radixkv.serve import chats, completions, infill
from radixkv.serve.anthropic import endpoint as anthropic
from radixkv.serve.anthropic.errors import error_response
from radixkv.serve.errors import ApiError, as_api_error
from radixkv.serve.fields import JsonObject
from radixkv.serve.metrics import CONTENT_TYPE
from radixkv.serve.middleware import RequestMiddleware
from radixkv.serve.openai_responses import endpoint as openai_responses
from radixkv.serve.openapi import document
from radixkv.serve.service import Service
from radixkv.server_settings import Settings

Endpoint = Callable[[Service, Request], Awaitable[Response]]


def create_app(engine: AsyncEngine, settings: Settings | None = None) -> Starlette:
    """Create an ASGI application that serves `engine`. The caller closes the engine."""
    service = Service(engine, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with suppress(EngineClosed):
            await service.metrics.watch()
        yield

    app = Starlette(
        routes=_with_aliases(_routes(service)),
        middleware=[Middleware(RequestMiddleware)],
        exception_handlers={HTTPException: _not_routed, ApiError: _failed, RadixKVError: _failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # clients do not send a body again after a redirect
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    """The routes of all dialects, with an endpoint that gets the service first."""

    def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        async def answer(request: Request) -> Response:
            return await endpoint(service, request)

        return Route(path, answer, methods=[method])  # Starlette adds HEAD to GET

    return [
        route("/", about),
        route("/api/hello", about),  # Claude Code
        route("/v1/version", about),
        route("/health", health),
        route("/ping", health),
        route("/ping", health, "POST"),  # as in vLLM
        route("/load", load),
        route("/metrics", metrics),
        route("/openapi.json", openapi),
        route("/v1/models", models),
        route("/v1/models/{model:path}", model),
        route("/v1/chat/completions", chats.create, "POST"),
        route("/v1/completions", completions.create, "POST"),
        route("/v1/messages", anthropic.create, "POST"),
        route("/v1/messages/count_tokens", anthropic.count_tokens, "POST"),
        route("/v1/responses", openai_responses.create, "POST"),
        route("/v1/responses/input_tokens", openai_responses.input_tokens, "POST"),
        route("/v1/responses/{response_id}", openai_responses.retrieve),
        route("/v1/responses/{response_id}", openai_responses.delete, "DELETE"),
        route("/v1/responses/{response_id}/cancel", openai_responses.cancel, "POST"),
        route("/v1/responses/{response_id}/input_items", openai_responses.input_items),
        route("/infill", infill.create, "POST"),
        route("/tokenize", completions.tokenize, "POST"),
        route("/detokenize", completions.detokenize, "POST"),
    ]


def _with_aliases(routes: Sequence[Route]) -> list[BaseRoute]:
    """Add each path that begins with /v1 without it too, for clients whose base URL lacks it."""
    with_version = [each for each in routes if each.path.startswith("/v1/")]
    aliases = [Route(each.path.removeprefix("/v1"), each.endpoint, methods=each.methods) for each in with_version]
    return [*routes, *aliases]


async def about(_: Service, __: Request) -> Response:
    """Return the name and the version of the server, for clients that look for one. Needs no key."""
    return JSONResponse({"name": "radixkv", "version": __version__})


async def health(service: Service, _: Request) -> Response:
    """Return 200 while the engine takes requests, 503 from the beginning of a shutdown on. Needs no key."""
    if service.ending:
        raise EngineClosed("the server is ending")
    service.engine.client.thread.post(lambda: None, begins=True)  # refused while the engine drains
    await service.engine.stats()
    return JSONResponse({"status": "ok"})


async def load(service: Service, request: Request) -> Response:
    """Return the number of replies that are requested now, in the form of vLLM. Any tenant's key is accepted."""
    service.caller(request)
    return JSONResponse({"server_load": service.limiter.streams})


async def metrics(service: Service, request: Request) -> Response:
    """Return the Prometheus metrics, which cover all tenants. Any tenant's key is accepted."""
    service.caller(request)
    return Response(await service.metrics.scrape(), media_type=CONTENT_TYPE)


async def openapi(service: Service, _: Request) -> Response:
    """Return the OpenAPI document. Needs no key."""
    return JSONResponse(document(service.model_name, service.settings))


async def models(service: Service, request: Request) -> Response:
    """Return a list of the one model."""
    service.caller(request)
    name = service.model_name
    page = {"has_more": False, "first_id": name, "last_id": name}
    return JSONResponse({"object": "list", "data": [_model_card(service)], **page})


async def model(service: Service, request: Request) -> Response:
    """Return the one model; raise ApiError 404 for another name."""
    service.caller(request)
    service.check_model(request.path_params["model"])
    return JSONResponse(_model_card(service))


def _model_card(service: Service) -> JsonObject:
    """Return the fields of OpenAI's API, then the fields of Anthropic's: clients ignore the others."""
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "radixkv",
        "max_model_len": service.engine.context_limit,
        "type": "model",
        "display_name": service.model_name,
        "created_at": f"{datetime.fromtimestamp(service.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "max_input_tokens": service.engine.context_limit,
    }


async def _not_routed(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and not request.path_params.get("response_id", "resp_").startswith("resp_"):
        error = HTTPException(404)  # another endpoint of OpenAI, such as /v1/responses/compact
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "unknown path; /openapi.json lists the paths", 405: "this path does not support this method"}
    text = message.get(error.status_code, error.detail)
    failed = ApiError(error.status_code, text, code=code, headers=error.headers)
    if request.url.path.removeprefix("/v1").startswith("/messages"):
        return error_response(failed, request.state.request_id)
    return failed.response()


async def _failed(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()
