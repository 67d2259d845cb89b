"""POST /api/chat and /api/generate: continue a conversation or a text, whole or as lines of JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response

from radixkv.chat.calls.formats import HERMES
from radixkv.durations import parse_duration
from radixkv.engine.input_processor import EncodedPrompt
from radixkv.errors import InvalidInput
from radixkv.serve import submit
from radixkv.serve.completions import encoded
from radixkv.serve.errors import errors_about
from radixkv.serve.fields import JsonObject
from radixkv.serve.ollama.lines import MEDIA_TYPE, Lines, RawReply, Shape, as_message, as_response, head
from radixkv.serve.ollama.schemas import OllamaRequest, Reader, read_chat, read_generate
from radixkv.serve.service import Service
from radixkv.serve.turn import Turn, open_turn, send


async def chat(service: Service, request: Request) -> Response:
    """Continue a conversation; raise ApiError or RadixKVError."""
    return await _respond(service, request, partial(read_chat, form=service.call_format or HERMES), as_message)


async def generate(service: Service, request: Request) -> Response:
    """Answer a prompt, or continue a raw text; raise ApiError or RadixKVError."""
    return await _respond(service, request, read_generate, as_response)


async def _respond(service: Service, request: Request, read: Reader, shape: Shape) -> Response:
    started = perf_counter()
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body = await service.gate.read(request, read)
        request.state.keep_alive = body.keep_alive
        service.gate.caller(request)  # refuses a wrong namespace, also where nothing is computed
        model = body.options.model
        service.check_model(model)
        reply: Turn | RawReply
        if body.chat is not None:
            reply = await open_turn(service, request, body.chat, cleanup)
        elif body.text or body.suffix:
            reply = await _open_raw(service, request, body, cleanup)
        else:
            return _without_reply(model, shape, "unload" if body.keep_alive == 0 else "load")
        lines = Lines(reply, model, shape, started, request.state.load_seconds)
        return await send(service, request, lines, cleanup, stream=body.options.stream, media_type=MEDIA_TYPE)


async def _open_raw(service: Service, request: Request, body: OllamaRequest, cleanup: ExitStack) -> RawReply:
    """Encode a text and submit it; arguments and errors as of `open_turn`."""
    caller, options = service.gate.caller(request), body.options
    ids = await service.gate.cancellable(request, encoded(service, body.text, body.suffix))
    if body.suffix:
        options = replace(options, params=service.fim.with_stops(options.params))
    session = service.conversations.session(caller.namespace, options.session_key)
    with errors_about("prompt", options.constraint_field):
        handle = await submit.start(service, request, caller, options, EncodedPrompt(ids), cleanup, session)
    return RawReply(service, handle, request.state.log_fields)


def unload(path: str, body: JsonObject) -> Response | None:
    """Return the response to a request that only unloads a model; None for others."""
    shape, model = {"/api/chat": as_message, "/api/generate": as_response}.get(path), body.get("model")
    if shape is None or not isinstance(model, str) or any(map(body.get, ("messages", "prompt", "suffix"))):
        return None
    with suppress(InvalidInput):
        if parse_duration(body.get("keep_alive", "")) == 0:
            return _without_reply(model, shape, "unload")
    return None


def _without_reply(model: str, shape: Shape, reason: str) -> Response:
    answer = {**head(model), **shape("", "", ()), "done": True, "done_reason": reason}
    return Response(json.dumps(answer), media_type="application/json")
