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
from radixkv.serve.message_schemas import template_texts
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
        options = body.model_dump(include={"keep", "method"}, exclude_none=True)
        options |= {"namespace": caller.namespace, "timeout": service.gate.time_left(request)}
        with errors_about("prompt" if body.messages is None else "messages"):
            if body.prompt is None:
                service.check_length(template_texts(chat.messages, chat.tools, thinking=False), len(chat.messages))
                begin = partial(service.engine.chat, namespace=caller.namespace)
                text: Any = begin(messages=chat.messages, tools=chat.tools)
            else:
                text = await service.gate.cancellable(request, encoded(service, body.prompt))
            made = await service.gate.cancellable(request, service.engine.compress(text, **options))
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
