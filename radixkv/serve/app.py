"""The ASGI application: routes, the small endpoints, and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from radixkv import __version__
from radixkv.chat import AsyncEngine
from radixkv.errors import EngineClosed, RadixKVError
from radixkv.serve import chats, completions, infill, prefixes
from radixkv.serve.anthropic import endpoint as anthropic
from radixkv.serve.error_forms import error_response
from radixkv.serve.errors import ApiError, as_api_error
from radixkv.serve.fields import JsonObject
from radixkv.serve.metrics import CONTENT_TYPE
from radixkv.serve.middleware import middleware
from radixkv.serve.ollama import endpoint as ollama
from radixkv.serve.ollama import library
from radixkv.serve.openai_responses import endpoint as openai_responses
from radixkv.serve.openapi import document
from radixkv.serve.served_models import Endpoint, Models, ModelStatus, OneModel, StoredEndpoint
from radixkv.server_settings import Settings


def create_app(engine: AsyncEngine, settings: Settings | None = None) -> Starlette:
    """Create an ASGI application that serves `engine`. The caller closes the engine."""
    return application(OneModel(engine, settings))


def application(models: Models) -> Starlette:
    """Create an ASGI application that serves `models`. The caller closes them."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await models.begin()
        yield
        await asyncio.to_thread(models.gate.texts.close)

    app = Starlette(
        routes=[*models.routes(), *_with_aliases([*_own_routes(models), *_model_routes(models)])],
        middleware=middleware(models.gate.settings),
        exception_handlers={HTTPException: _not_routed, ApiError: _failed, RadixKVError: _failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # clients do not send a body again after a redirect
    app.state.models = models
    return app


def _own_routes(models: Models) -> list[Route]:
    """The routes that concern the server, with an endpoint that gets its models first."""

    def route(path: str, endpoint: Callable[[Models, Request], Awaitable[Response]], method: str = "GET") -> Route:
        async def answer(request: Request) -> Response:
            return await endpoint(models, request)

        return Route(path, answer, methods=[method])  # Starlette adds HEAD to GET

    return [
        route("/", running),
        route("/api/hello", about),  # Claude Code
        route("/v1/version", about),
        route("/health", health),
        route("/ping", health),
        route("/ping", health, "POST"),  # as in vLLM
        route("/load", load),
        route("/metrics", metrics),
        route("/openapi.json", openapi),
        route("/api/version", library.version),
        route("/api/tags", library.tags),
        route("/api/ps", library.ps),
        route("/api/show", library.show, "POST"),
        *(route(path, library.refused, method) for path, method in library.REFUSED),
        route("/v1/prefixes/{name}", prefixes.delete, "DELETE"),
        route("/v1/models", list_models),
        route("/v1/models/{model:path}", one_model),
    ]


def _model_routes(models: Models) -> list[Route]:
    """The routes of all dialects, with an endpoint that gets the model of a request first."""

    def post(path: str, endpoint: Endpoint) -> Route:
        return Route(path, models.endpoint(endpoint), methods=["POST"])

    def stored(path: str, endpoint: StoredEndpoint, method: str = "GET") -> Route:
        return Route(path, models.stored(endpoint), methods=[method])

    return [
        post("/v1/chat/completions", chats.create),
        post("/v1/completions", completions.create),
        post("/v1/prefixes", prefixes.create),
        post("/v1/messages", anthropic.create),
        post("/v1/messages/count_tokens", anthropic.count_tokens),
        post("/v1/responses", openai_responses.create),
        post("/v1/responses/input_tokens", openai_responses.input_tokens),
        stored("/v1/responses/{response_id}", openai_responses.retrieve),
        stored("/v1/responses/{response_id}", partial(openai_responses.delete, models), "DELETE"),
        stored("/v1/responses/{response_id}/cancel", openai_responses.cancel, "POST"),
        stored("/v1/responses/{response_id}/input_items", openai_responses.input_items),
        post("/infill", infill.create),
        post("/api/chat", ollama.chat),
        post("/api/generate", ollama.generate),
        post("/tokenize", completions.tokenize),
        post("/detokenize", completions.detokenize),
    ]


def _with_aliases(routes: Sequence[Route]) -> list[BaseRoute]:
    """Add each path that begins with /v1 without it too, for clients whose base URL lacks it."""
    with_version = [each for each in routes if each.path.startswith("/v1/")]
    aliases = [Route(each.path.removeprefix("/v1"), each.endpoint, methods=each.methods) for each in with_version]
    return [*routes, *aliases]


async def about(_: Models, __: Request) -> Response:
    """Return the name and the version of the server, for clients that look for one. Needs no key."""
    return JSONResponse({"name": "radixkv", "version": __version__})


async def running(models: Models, request: Request) -> Response:
    """Return a line for a browser, and for others the name and the version of the server. Needs no key."""
    if "text/html" in request.headers.get("accept", ""):
        return PlainTextResponse("radixkv is running")
    return await about(models, request)


async def health(models: Models, _: Request) -> Response:
    """Return 200 while requests are taken, 503 from the beginning of a shutdown on. Needs no key."""
    if models.gate.ending:
        raise EngineClosed("the server is ending")
    await models.check()
    return JSONResponse({"status": "ok"})


async def load(models: Models, request: Request) -> Response:
    """Return the number of replies that are requested now, in the form of vLLM. Any tenant's key is accepted."""
    models.gate.caller(request)
    return JSONResponse({"server_load": models.gate.limiter.streams})


async def metrics(models: Models, request: Request) -> Response:
    """Return the Prometheus metrics, which cover all tenants. Any tenant's key is accepted."""
    models.gate.caller(request)
    return Response(await models.metrics(), media_type=CONTENT_TYPE)


async def openapi(models: Models, _: Request) -> Response:
    """Return the OpenAPI document. Needs no key."""
    names = [name for each in models.statuses() for name in (each.name, *each.aliases)]
    return JSONResponse(document(names, models.gate.settings, several=bool(models.routes())))


async def list_models(models: Models, request: Request) -> Response:
    """Return the list of the models."""
    models.gate.caller(request)
    cards = list(map(_model_card, models.statuses()))
    page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JSONResponse({"object": "list", "data": cards, **page})


async def one_model(models: Models, request: Request) -> Response:
    """Return one model; raise ApiError 404 for an unknown name."""
    models.gate.caller(request)
    return JSONResponse(_model_card(models.find(request.path_params["model"])))


def _model_card(model: ModelStatus) -> JsonObject:
    """Return the fields of OpenAI's API, then the fields of Anthropic's: clients ignore the others.

    `status` is as in llama.cpp's router.
    """
    context = {} if model.context is None else {"max_model_len": model.context, "max_input_tokens": model.context}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "radixkv",
        "type": "model",
        "display_name": model.name,
        "created_at": f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "aliases": list(model.aliases),
        "status": {"value": model.state, **({} if model.error is None else {"error": model.error})},
        **context,
    }


async def _not_routed(request: Request, error: Exception) -> Response:
    """Respond to an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and not request.path_params.get("response_id", "resp_").startswith("resp_"):
        error = HTTPException(404)  # another endpoint of OpenAI, such as /v1/responses/compact
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "unknown path; /openapi.json lists the paths", 405: "this path does not support this method"}
    text = message.get(error.status_code, error.detail)
    return await _failed(request, ApiError(error.status_code, text, code=code, headers=error.headers))


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, as_api_error(error), request.state.request_id)
