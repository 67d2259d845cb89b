"""POST /infill: llama.cpp's API for editors, which send the text around the cursor as it changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.engine import AsyncHandle
from radixkv.engine.input_processor import EncodedPrompt
from radixkv.engine.request import TokenIds
from radixkv.serve import submit
from radixkv.serve.bodies import Body, Prefer, Several, Unread, optional, read, taking
from radixkv.serve.errors import errors_about
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.responses import EventStream, sse_event, unless_disconnected
from radixkv.serve.sampling_fields import sampling_params, wire, with_sampling
from radixkv.serve.schemas import NO_PREFIX, RequestOptions
from radixkv.serve.service import Service


class ExtraFile(Unread):
    """A part of another file."""

    text: str
    filename: str | None = None


@taking(n_cmpl=Prefer(1, why="there is one reply"), prefix=NO_PREFIX)
@with_sampling(without="n")
class InfillBody(Body):
    """The body of POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: Several[ExtraFile] | None = None
    prompt: str | None = optional("More of the prefix: the line to the left of the cursor.")
    n_predict: Annotated[int, wire("max_tokens", low=-2)] | None = optional("0: only the prompt.")
    stream: bool | None = None
    response_fields: Several[str] | None = optional('Paths such as "timings/prompt_n".')
    model: str | None = None


async def create(service: Service, request: Request) -> Response:
    """Respond to one request; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body, options = await service.gate.read(request, _read)
        caller = service.gate.caller(request)
        service.check_model(body.model or "")
        files = [(each.filename or "tmp", each.text) for each in body.input_extra or ()]
        with errors_about("input_prefix"):
            encoding = encoded(service, body.input_prefix + (body.prompt or ""), body.input_suffix, files)
            prompt = EncodedPrompt(await service.gate.cancellable(request, encoding))
            options = replace(options, params=service.fim.with_stops(options.params))
            handle = await submit.start(service, request, caller, options, prompt, cleanup, None)
        whole = partial(_whole, service, handle, body.response_fields, request.state.log_fields)
        if body.stream:
            return EventStream(_events(handle, whole), service.settings.send_timeout, cleanup.pop_all())
        return JSONResponse(await unless_disconnected(request, whole()))


async def encoded(service: Service, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> TokenIds:
    """Return `FillInMiddle.ids` from the background thread; raise PromptTooLong, usually before much is encoded."""
    texts = [prefix, suffix, *chain.from_iterable(files)]
    service.check_length(texts)
    await service.gate.in_background(lambda: service.check_text("".join(texts)))
    return await service.gate.in_background(lambda: service.fim.ids(prefix, suffix, files))


def _read(given: JsonObject, ignored: IgnoredFields | None) -> tuple[InfillBody, RequestOptions]:
    body = read(InfillBody, given, ignored)
    most = -1 if body.n_predict is None else body.n_predict
    params = sampling_params(body, most if most > 0 else None, ignored)
    return body, RequestOptions("", params, most >= 0, bool(body.stream), False, None, samples=most != 0)


async def _events(handle: AsyncHandle, whole: Callable[..., Awaitable[JsonObject]]) -> AsyncGenerator[bytes, None]:
    """Yield an event for each chunk with text, and the response without text as the last one."""
    async for chunk in handle:
        if chunk.text:
            yield sse_event({"index": 0, "content": chunk.text, "stop": False})
    yield sse_event(await whole(streamed=True))


async def _whole(
    service: Service, handle: AsyncHandle, fields: list[str] | None, log_fields: JsonObject, *, streamed: bool = False
) -> JsonObject:
    """Return the response, or those of its fields that the client named, once the reply is complete."""
    completion = await handle.result()
    service.log_usage(log_fields, [completion])
    spent, ended = completion.usage, "eos" if completion.finish_reason == "stop" else "limit"
    timings = {
        "cache_n": spent.cached_tokens,
        **_speed("prompt", spent.prompt_tokens - spent.cached_tokens, spent.ttft_s),
        **_speed("predicted", spent.output_tokens, spent.total_s - spent.ttft_s),
    }
    found = {"index": 0, "content": "" if streamed else completion.text, "stop": True, "model": service.model_name}
    found |= {"stop_type": "word" if completion.stop_text else ended, "stopping_word": completion.stop_text or ""}
    found |= {"tokens_predicted": spent.output_tokens, "tokens_evaluated": spent.prompt_tokens, "truncated": False}
    found |= {"tokens_cached": spent.cached_tokens, "timings": timings}
    paths = found | {f"timings/{name}": value for name, value in timings.items()}
    return {name: paths[name] for name in fields if name in paths} if fields else found


def _speed(name: str, tokens: int, seconds: float) -> JsonObject:
    per_second, ms = (tokens / seconds if seconds else 0.0), 1000 * seconds
    values = {"n": tokens, "ms": ms, "per_token_ms": ms / max(tokens, 1), "per_second": per_second}
    return {f"{name}_{each}": value for each, value in values.items()}
