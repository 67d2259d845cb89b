"""POST and DELETE /v1/prefixes: compressed prefixes, which later requests name in their field `prefix`.

A name is looked up in the namespace of the caller only, so a foreign name gets the same 404 as an unknown one.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.serve.completions import encoded
from radixkv.serve.errors import ApiError, errors_about, no_prefix
from radixkv.serve.schemas import read_prefix
from radixkv.serve.served_models import Models
from radixkv.serve.service import Service


async def create(service: Service, request: Request) -> Response:
    """Compress a prompt or the beginning of a conversation, and return its name; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body, chat = await service.gate.read(request, read_prefix)
        caller = service.gate.caller(request)
        service.check_model(body.model)
        if body.prompt is None:
            work: Any = service.chat_prompt(caller, chat, ignored=request.state.ignored)
        else:
            work = encoded(service, body.prompt)
        text = await service.gate.cancellable(request, work)
        chosen = {name: value for name in ("keep", "method") if (value := getattr(body, name)) is not None}
        compress = partial(service.engine.compress, namespace=caller.namespace, timeout=service.gate.time_left(request))
        with errors_about("prompt" if body.messages is None else "messages"):
            made = await service.gate.cancellable(request, compress(text, **chosen))
    shown: dict[str, Any] = {"id": made.name, "object": "prefix", "tokens": made.tokens, "slots": made.slots}
    return JSONResponse({**shown, "bytes": made.bytes, "method": made.method, "keep": made.keep})


async def delete(models: Models, request: Request) -> Response:
    """Release a compressed prefix; raise ApiError 404 if the caller has none of this name."""
    caller, name = models.gate.caller(request), request.path_params["name"]
    for service in filter(None, (status.service for status in models.statuses())):
        with suppress(ApiError):
            await service.engine.release_prefix(service.prefix(caller, name))
            return JSONResponse({"id": name, "object": "prefix", "deleted": True})
    raise no_prefix()
