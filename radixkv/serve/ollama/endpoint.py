"""POST /api/chat and /api/generate: continue a conversation or a text, whole or as lines of JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response

from radixkv.chat.calls.formats import HERMES
from radixkv.serve.ollama.lines import MEDIA_TYPE, Lines, Shape, as_message, as_response, head
from radixkv.serve.ollama.raw_reply import RawReply, open_raw
from radixkv.serve.ollama.schemas import Reader, read_chat, read_generate
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
        reply: Turn | RawReply | None = None
        service.check_model(model)
        if body.chat is not None:
            reply = await open_turn(service, request, body.chat, cleanup)
        elif body.text or body.suffix:
            reply = await open_raw(service, request, body, cleanup)
        if reply is None:
            reason = "unload" if body.keep_alive == 0 else "load"
            answer = {**head(model), **shape("", "", ()), "done": True, "done_reason": reason}
            return Response(json.dumps(answer), media_type="application/json")
        lines = Lines(reply, model, shape, started, request.state.load_seconds)
        return await send(service, request, lines, cleanup, stream=body.options.stream, media_type=MEDIA_TYPE)
