"""POST /v1/completions and /tokenize: texts and token ids, without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from itertools import starmap
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.engine import AsyncHandle, Chunk, Completion
from radixkv.engine.input_processor import encode
from radixkv.engine.request import TokenIds
from radixkv.serve import submit
from radixkv.serve.errors import errors_about
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.responses import (
    DONE,
    EventStream,
    all_replies,
    encode_response,
    running_usage,
    sse_event,
    unless_disconnected,
    usage,
)
from radixkv.serve.schemas import CompletionRequest, TextOrIds, TokenizeRequest, read_completion, read_tokenize
from radixkv.serve.service import Caller, Service


async def create(service: Service, request: Request) -> Response:
    """Respond to one completion request, which may have several prompts; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        lease = service.admit(request, cleanup)
        body = await service.read(request, read_completion)
        options = body.options
        caller = service.caller(request)
        service.check_model(options.model)
        lease.resize(options.params.n * len(body.prompts))
        prompts = [await service.cancellable(request, _encoded(service, prompt)) for prompt in body.prompts]
        session = service.conversations.session(caller.namespace, options.session_key)
        await service.compiled(request, options.params)
        with errors_about("prompt", options.constraint_field):
            handles = [
                await submit.start(
                    service, caller, options, ids, cleanup, timeout=service.time_left(request), session=session
                )
                for ids in prompts
            ]
        completion = CompletionAnswer(service, body, prompts, request.state.log_fields)
        if options.stream:
            return EventStream(completion.events(handles), service.settings.send_timeout, cleanup.pop_all())
        return Response(await unless_disconnected(request, completion.whole(handles)), media_type="application/json")


async def tokenize(service: Service, request: Request) -> Response:
    """Return the ids of a text, or of messages as a chat completion encodes them; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.admit(request, cleanup)
        body = await service.read(request, read_tokenize)
        caller = service.caller(request)
        if body.model is not None:
            service.check_model(body.model)
        ids = await service.cancellable(request, _tokens(service, caller, body, request.state.ignored))
    return JSONResponse({"count": len(ids), "max_model_len": service.engine.context_limit, "tokens": ids})


class CompletionAnswer:
    """Build the response to one completion request. Reply `i` of prompt `p` is choice `p * n + i`."""

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[TokenIds], log_fields: dict[str, Any]
    ) -> None:
        """Fill `log_fields` with numbers for the log."""
        self._service, self._body, self._log_fields = service, body, log_fields
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._echoed = [self._echo(*pair) for pair in zip(body.prompts, prompts, strict=True)]
        self._prompt_tokens, self._sampled = sum(map(len, prompts)), 0
        self._offsets = [len(text) for text in self._echoed for _ in range(body.options.params.n)]

    # ---- whole

    async def whole(self, handles: Sequence[AsyncHandle]) -> bytes:
        """Return the whole response, once all replies are complete."""
        completions = [await handle.result() for handle in handles]
        self._service.log_usage(self._log_fields, completions)
        choices = list(enumerate(all_replies(completions)))
        return await encode_response(self._head(), lambda: starmap(self._whole_choice, choices), usage(completions))

    def _whole_choice(self, index: int, completion: Completion) -> JsonObject:
        logprobs: Any = completion.logprobs
        if logprobs is not None:
            logprobs = self._service.token_texts.completion_logprobs(completion.token_ids, logprobs, 0)
        text = self._echoed[index // self._body.options.params.n] + completion.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    # ---- events

    async def events(self, handles: Sequence[AsyncHandle]) -> AsyncGenerator[bytes, None]:
        """Yield the response's events, and usage if the client requested it."""
        for index, offset in enumerate(self._offsets):
            if offset:
                yield self._event(index, self._echoed[index // self._body.options.params.n])
        async with aclosing(submit.chunks(handles)) as chunks:
            async for prompt, chunk in chunks:
                self._sampled += len(chunk.token_ids)
                if chunk.text or chunk.finish_reason or chunk.logprobs:
                    yield self._of_chunk(prompt * self._body.options.params.n + chunk.index, chunk)
        completions = [await handle.result() for handle in handles]
        self._service.log_usage(self._log_fields, completions)
        if self._body.options.include_usage:
            yield sse_event({**self._head(), "choices": [], "usage": usage(completions)})
        yield DONE

    def _of_chunk(self, index: int, chunk: Chunk) -> bytes:
        offset, logprobs = self._offsets[index], None
        if chunk.logprobs is not None:
            logprobs = self._service.token_texts.completion_logprobs(chunk.token_ids, [chunk.logprobs], offset)
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return self._event(index, chunk.text, logprobs, chunk.finish_reason)

    def _event(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        event = {**self._head(), "choices": [choice]}
        if self._body.options.running_usage:
            event["usage"] = running_usage(self._prompt_tokens, self._sampled)
        elif self._body.options.include_usage:
            event["usage"] = None
        return sse_event(event)

    # ---- both

    def _head(self) -> JsonObject:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model_name,
        }

    def _echo(self, prompt: TextOrIds, ids: TokenIds) -> str:
        """Return the text that precedes the replies to a prompt: the prompt itself with `echo`."""
        if not self._body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.engine.model.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([int(token) for token in ids]))


async def _tokens(service: Service, caller: Caller, body: TokenizeRequest, ignored: IgnoredFields) -> list[int]:
    if body.prompt is None:
        prompt = await service.chat_prompt(
            caller,
            body.messages or [],
            body.tools,
            options=body.template_options,
            prefill=body.prefill,
            ignored=ignored,
        )
        return list(prompt.ids)
    return [int(token) for token in await _encoded(service, body.prompt)] if body.prompt else []


async def _encoded(service: Service, prompt: TextOrIds) -> TokenIds:
    model = service.engine.model
    with errors_about("prompt"):
        if isinstance(prompt, str):
            service.check_length([prompt])
            return await service.in_background(lambda: service.encoded(prompt))
        return await service.in_background(lambda: encode(prompt, model.tokenizer, model.vocab_size))
