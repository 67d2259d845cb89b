"""POST /v1/responses, and GET, DELETE and cancellation of stored responses.

A response is stored before its client receives the end of it, so that the next request can continue it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from typing import NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.chat.calls.block import CallDelta
from radixkv.errors import EngineClosed, RequestCancelled
from radixkv.serve.access import SALT, namespace
from radixkv.serve.errors import TOO_LONG, ApiError
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.gate import Caller, Gate
from radixkv.serve.openai_responses.events import ResponseEvents, Status
from radixkv.serve.openai_responses.schemas import ResponseRequest, ended, read_response
from radixkv.serve.openai_responses.store import Items, ResponseStore, Running, StoredResponse
from radixkv.serve.reply import Piece
from radixkv.serve.responses import COMMENT
from radixkv.serve.served_models import Models
from radixkv.serve.service import Service
from radixkv.serve.turn import End, Step, Turn, respond


async def create(service: Service, request: Request) -> Response:
    """Respond to one request of the Responses API; raise ApiError or RadixKVError."""
    reading = _Reading(service, request)
    try:
        return await respond(service, request, reading, lambda turn: ResponseAnswer(turn, reading.caller))
    except ApiError as error:
        renamed = _about_input(error)
        body = reading.request
        if renamed.code == TOO_LONG and body is not None and body.options.stream:
            # OpenAI's own clients look for this error in the stream.
            return Response(_failure(service, body, renamed), media_type="text/event-stream")
        raise renamed from error


async def input_tokens(service: Service, request: Request) -> Response:
    """Return the length of a prompt; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body = await service.gate.read(request, _Reading(service, request))
        service.check_model(body.options.model)
        try:
            tokens = await service.prompt_length(request, body)
        except ApiError as error:
            raise _about_input(error) from error
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def retrieve(gate: Gate, stored: ResponseStore, request: Request) -> Response:
    """Return a stored response, or one that is being streamed; raise ApiError 404 if there is none."""
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise ApiError(400, "a stored response cannot be streamed: leave out stream", param="stream")
    running = _running(gate, stored, request)
    return JSONResponse(_stored(gate, stored, request).response if running is None else running.response())


async def delete(models: Models, gate: Gate, stored: ResponseStore, request: Request) -> Response:
    """Delete a stored response, whose cached text is then evicted first; raise ApiError 404 if there is none."""
    caller, number = gate.caller(request), request.path_params["response_id"]
    found = stored.delete(caller.tenant, caller.namespace, number) or _not_found(number)
    kept = stored.longest_continued(caller.tenant, caller.namespace, found)
    with suppress(ApiError, EngineClosed):  # the model, the text, or the engine is not there any more
        if (service := models.find(found.response["model"]).service) is not None:
            chat = await service.gate.in_background(partial(ended, found, service.role_order))
            prompt = await service.chat_prompt(caller, chat, ignored=IgnoredFields())
            keep = 0 if kept is None else (kept.response["usage"] or {}).get("total_tokens", 0)
            await service.engine.demote(prompt.ids, keep=keep, namespace=caller.namespace)
    return JSONResponse({"id": number, "object": "response", "deleted": True})


async def cancel(gate: Gate, stored: ResponseStore, request: Request) -> Response:
    """Stop a response that is being streamed, and return it; a stored response is returned as it is."""
    running = _running(gate, stored, request)
    if running is not None:
        running.cancel()
        return JSONResponse({**running.response(), "status": "cancelled"})
    return JSONResponse(_stored(gate, stored, request).response)


async def input_items(gate: Gate, stored: ResponseStore, request: Request) -> Response:
    """Return the items of the conversation before a stored response, the newest first."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, 'order can be "asc" or "desc"', param="order", code="invalid_value")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise ApiError(400, "limit must be from 1 to 100", param="limit", code="invalid_value")
    items = [_listed(item) for item in _stored(gate, stored, request).input_items]
    if order == "desc":
        items.reverse()
    after = query.get("after")
    places = {item.get("id"): at + 1 for at, item in enumerate(items)}
    if after is not None and after not in places:
        raise ApiError(400, "after must be the id of an item of this list", param="after", code="invalid_value")
    start = 0 if after is None else places[after]
    page = items[start : start + int(limit)]
    ids = [item.get("id") for item in page] or [None]
    more = start + len(page) < len(items)
    return JSONResponse({"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": more})


class ResponseAnswer:
    """Build the response to one turn, whole or as events; an `Encoder` of turn.py."""

    keep_alive = COMMENT

    def __init__(self, turn: Turn, caller: Caller) -> None:
        """The turn's request is a ResponseRequest."""
        assert isinstance(turn.request, ResponseRequest)
        self._turn, self._caller, self._request = turn, caller, turn.request
        self._service = turn.service
        self._parts = ResponseEvents(turn.service.model_name, turn.request)
        self._cancelled = False

    def cancel(self) -> None:
        """Stop the reply; its events end with the text so far."""
        self._cancelled = True
        self._turn.cancel()

    def response(self) -> JsonObject:
        """Return the response as it is now."""
        return self._parts.whole()

    async def whole(self) -> bytes:
        """Return the JSON of the whole response."""
        if self._turn.request.options.params.logprobs is not None:
            async with aclosing(self._turn.steps()) as steps:
                async for step in steps:
                    self._push(step)
        (reply,) = await self._turn.replies()
        if not self._parts.output:
            self._parts.push(Piece(thinking=reply.thinking))
            self._parts.push(Piece(content=reply.content))
            for at, call in enumerate(reply.calls):
                self._parts.push(Piece(call=CallDelta(at, call.id, call.name, call.text, call, opens=True)))
        await self._finish(reply.end)
        return json.dumps(self._parts.whole(), ensure_ascii=False, separators=(",", ":")).encode()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response, while it can be cancelled by its id."""
        running, key = self._service.responses.running, (self._caller.namespace, self._parts.id)
        running[key] = self
        try:
            yield self._parts.start()
            async with aclosing(self._turn.steps()) as steps:
                async for step in steps:
                    events = self._push(step)
                    if step.end is not None:
                        events += await self._finish(step.end)
                    if events:
                        yield events
        except RequestCancelled:
            if not self._cancelled:
                raise
            yield self._end("cancelled", None)
        finally:
            del running[key]

    def error_event(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return self._parts.fail(error)

    def _push(self, step: Step) -> bytes:
        """Return the events of one step. Its token belongs to the first content of it, or of a later step."""
        chunk, logprobs = step.chunk, []
        if chunk.logprobs is not None:
            logprobs = self._service.token_texts.chat_logprobs(chunk.token_ids, [chunk.logprobs])
        if not step.pieces:
            self._parts.logprobs += logprobs
        events = b""
        for piece in step.pieces:
            events += self._parts.push(piece, logprobs)
            logprobs = [] if piece.content else logprobs
        return events

    async def _finish(self, end: End) -> bytes:
        """End the response and store it; return its last events."""
        usage = await self._usage()
        if end.finish_reason == "length":
            return self._end("incomplete", usage, "max_output_tokens")
        return self._end("completed", usage)

    def _end(self, status: Status, usage: JsonObject | None, reason: str | None = None) -> bytes:
        event = self._parts.finish(status, usage, reason)
        if self._request.store:
            conversation = (*self._request.previous, self._request.input, Items(self._parts.output))
            stored = StoredResponse(self._parts.whole(), conversation)
            self._service.responses.add(self._caller.tenant, self._caller.namespace, stored)
        return event

    async def _usage(self) -> JsonObject:
        """Return the token counts. The tokens of thinking are counted from its text."""
        used = self._turn.usage
        (reply,) = await self._turn.replies()
        thought = 0
        if reply.thinking:
            thought = len(await self._service.gate.in_background(lambda: self._service.encoded(reply.thinking)))
        computed = used.prompt_tokens - used.cached_tokens
        return {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {**used.details, "cache_write_tokens": computed},
            "output_tokens": used.output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, used.output_tokens)},
            "total_tokens": used.prompt_tokens + used.output_tokens,
        }


class _Reading:
    """Read the body of one request, and keep it for the case that the prompt is too long."""

    def __init__(self, service: Service, request: Request) -> None:
        self.request: ResponseRequest | None = None
        self.caller = service.gate.caller(request)
        self._service, self._http = service, request

    def __call__(self, body: JsonObject, ignored: IgnoredFields | None) -> ResponseRequest:
        """Check the body; raise ApiError. The stored responses of the caller's namespace are available to it."""
        if isinstance(salt := body.get(SALT), str):
            tenant = self.caller.tenant
            self.caller = Caller(tenant, namespace(tenant, self._http.headers, salt))
        self.request = read_response(body, ignored, self._find, self._service.role_order)
        return self.request

    def _find(self, number: str) -> StoredResponse | None:
        return self._service.responses.get(self.caller.tenant, self.caller.namespace, number)


def _failure(service: Service, request: ResponseRequest, error: ApiError) -> bytes:
    """Return the whole stream of a response that failed before it began."""
    parts = ResponseEvents(service.model_name, request)
    return parts.start() + parts.fail(error)


def _about_input(error: ApiError) -> ApiError:
    """Name the field `input` instead of `messages`; describe a prompt that is too long in OpenAI's words."""
    if error.code == TOO_LONG:
        message = f"Your input exceeds the context window of this model: {error.message}"
        return ApiError(error.status, message, param="input", code=TOO_LONG)
    if error.param == "messages":
        error.param = "input"
    return error


def _stored(gate: Gate, stored: ResponseStore, request: Request) -> StoredResponse:
    caller, number = gate.caller(request), request.path_params["response_id"]
    found = stored.get(caller.tenant, caller.namespace, number)
    return _not_found(number) if found is None else found


def _running(gate: Gate, stored: ResponseStore, request: Request) -> Running | None:
    return stored.running.get((gate.caller(request).namespace, request.path_params["response_id"]))


def _not_found(number: str) -> NoReturn:
    raise ApiError(404, f"Response with id '{number[:100]}' not found.", param="response_id", code="not_found")


def _listed(item: JsonObject) -> JsonObject:
    """Return an input item as a list shows it: messages have parts."""
    if item.get("type", "message") != "message" or not isinstance(item.get("content"), str):
        return {"type": "message", **item}
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    part: JsonObject = {"type": kind, "text": item["content"]}
    if kind == "output_text":
        part["annotations"] = []
    return {"status": "completed", **item, "type": "message", "content": [part]}
