"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the one model.

Clients send names of Anthropic's models, so every name is served, unless the server is strict.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.serve.anthropic.events import MessageEncoder
from radixkv.serve.anthropic.schemas import Dialect, read_count, read_message
from radixkv.serve.service import Service
from radixkv.serve.turn import respond


async def create(service: Service, request: Request) -> Response:
    """Respond to one request for a message."""
    encoder = partial(MessageEncoder, request_id=request.state.request_id)
    read = partial(read_message, dialect=_dialect(service))
    return await respond(service, request, read, encoder, any_model=not service.settings.strict_fields)


async def count_tokens(service: Service, request: Request) -> Response:
    """Respond with the length of a prompt."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body = await service.gate.read(request, partial(read_count, dialect=_dialect(service)))
        if service.settings.strict_fields:
            service.check_model(body.model)
        return JSONResponse({"input_tokens": await service.prompt_length(request, body)})


def _dialect(service: Service) -> Dialect:
    return Dialect(service.settings.keep_billing_header, service.role_order)
