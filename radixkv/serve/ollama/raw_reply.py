"""Continue a text that no chat template wrote: all of the reply is content."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from radixkv.engine import AsyncHandle, Completion
from radixkv.engine.input_processor import EncodedPrompt
from radixkv.serve import submit
from radixkv.serve.completions import encoded
from radixkv.serve.errors import errors_about
from radixkv.serve.ollama.schemas import OllamaRequest
from radixkv.serve.reply import Piece
from radixkv.serve.service import Service
from radixkv.serve.turn import End, Reply, Step


async def open_raw(service: Service, request: Request, body: OllamaRequest, cleanup: ExitStack) -> RawReply:
    """Encode a text and submit it; arguments and errors as of `open_turn`."""
    caller, options = service.gate.caller(request), body.options
    ids = await service.gate.cancellable(request, encoded(service, body.text, body.suffix))
    if body.suffix:
        options = replace(options, params=service.fim.with_stops(options.params))
    session = service.conversations.session(caller.namespace, options.session_key)
    with errors_about("prompt", options.constraint_field):
        grammar = await service.compiled(request, caller, options.params)
        handle = await submit.start(service, request, caller, options, EncodedPrompt(ids), cleanup, session)
        del grammar  # until here it was held
    return RawReply(service, handle, request.state.log_fields)


class RawReply:
    """The reply to a text, read as the replies of a `Turn`; `completion` is available once it is complete."""

    completion: Completion

    def __init__(self, service: Service, handle: AsyncHandle, log_fields: dict[str, Any]) -> None:
        """Read the reply from `handle`, and add its token counts to `log_fields` at the end."""
        self._service, self._handle, self._log_fields = service, handle, log_fields

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the reply as it is generated. Raises the request's error."""
        async for chunk in self._handle:
            end = None
            if chunk.finish_reason is not None:
                [last] = await self.replies()
                end = last.end
            yield Step(0, [Piece(content=chunk.text)] if chunk.text else [], end, chunk)

    async def replies(self) -> list[Reply]:
        """Return the reply once it is complete. Raises the request's error."""
        self.completion = found = await self._handle.result()
        self._service.log_usage(self._log_fields, [found])
        return [Reply(0, found.text, "", (), End(found.finish_reason), found)]
