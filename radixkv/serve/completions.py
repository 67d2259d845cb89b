"""POST /v1/completions and /tokenize: texts and token ids, without a template.

Knows: what a text completion looks like, whole and as events, of one prompt or many.
"""

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
from radixkv.serve.errors import about
from radixkv.serve.fields import JsonObject
from radixkv.serve.responses import DONE, EventStream, answer, data, streams, usage, whole
from radixkv.serve.schemas import CompletionRequest, TextOrIds, TokenizeRequest, read_completion, read_tokenize
from radixkv.serve.service import Caller, Service


async def create(service: Service, request: Request) -> Response:
    """Answer the completions of one body; raises ApiError, RadixKVError."""
    with ExitStack() as inside:
        place = service.enter(request, inside)
        wanted = await service.read(request, read_completion)
        asked = wanted.asked
        caller = service.caller(request, asked.cache_key)
        service.check_model(asked.model)
        place.widen(asked.params.n * len(wanted.prompts))
        prompts = [await service.awaited(request, _encoded(service, prompt)) for prompt in wanted.prompts]
        with about("prompt"):
            handles = [
                await submit.begin(service, caller, asked, ids, inside, timeout=service.time_left(request))
                for ids in prompts
            ]
        made = CompletionAnswer(service, wanted, prompts, request.state.facts)
        if asked.stream:
            return EventStream(made.events(handles), service.settings.send_timeout, inside.pop_all())
        return Response(await whole(request, made.whole(handles)), media_type="application/json")


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a text, or of messages as a chat completion would encode them; raises ApiError, RadixKVError."""
    with ExitStack() as inside:
        service.enter(request, inside)
        wanted = await service.read(request, read_tokenize)
        caller = service.caller(request, wanted.cache_key)
        if wanted.model is not None:
            service.check_model(wanted.model)
        ids = await service.awaited(request, _tokens(service, caller, wanted))
    return JSONResponse({"count": len(ids), "max_model_len": service.engine.context_limit, "tokens": ids})


class CompletionAnswer:
    """The completions of one body while they are made; choice `prompt * n + stream` is one of them."""

    def __init__(
        self, service: Service, wanted: CompletionRequest, prompts: Sequence[TokenIds], facts: dict[str, Any]
    ) -> None:
        """`facts` gets numbers for the log."""
        self._service, self._wanted, self._facts = service, wanted, facts
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._echoed = [self._echo(*pair) for pair in zip(wanted.prompts, prompts, strict=True)]
        self._offsets = [len(text) for text in self._echoed for _ in range(wanted.asked.params.n)]

    # ---- whole

    async def whole(self, handles: Sequence[AsyncHandle]) -> bytes:
        """The response, once all replies are complete."""
        completions = [await handle.result() for handle in handles]
        self._service.note(self._facts, completions)
        choices = list(enumerate(streams(completions)))
        return await answer(self._head(), lambda: starmap(self._whole_choice, choices), usage(completions))

    def _whole_choice(self, index: int, completion: Completion) -> JsonObject:
        logprobs = completion.logprobs
        shown = None if logprobs is None else self._service.token_texts.plain(completion.token_ids, logprobs, 0)
        text = self._echoed[index // self._wanted.asked.params.n] + completion.text
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": completion.finish_reason}

    # ---- events

    async def events(self, handles: Sequence[AsyncHandle]) -> AsyncGenerator[bytes, None]:
        """The response bit by bit; usage if it was asked for."""
        for index, offset in enumerate(self._offsets):
            if offset:
                yield self._event(index, self._echoed[index // self._wanted.asked.params.n])
        async with aclosing(submit.chunks(handles)) as chunks:
            async for prompt, chunk in chunks:
                if chunk.text or chunk.finish_reason or chunk.logprobs:
                    yield self._of_chunk(prompt * self._wanted.asked.params.n + chunk.index, chunk)
        completions = [await handle.result() for handle in handles]
        self._service.note(self._facts, completions)
        if self._wanted.asked.include_usage:
            yield data({**self._head(), "choices": [], "usage": usage(completions)})
        yield DONE

    def _of_chunk(self, index: int, chunk: Chunk) -> bytes:
        offset, logprobs = self._offsets[index], None
        if chunk.logprobs is not None:
            logprobs = self._service.token_texts.plain(chunk.token_ids, [chunk.logprobs], offset)
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return self._event(index, chunk.text, logprobs, chunk.finish_reason)

    def _event(self, index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        event = {**self._head(), "choices": [choice]}
        if self._wanted.asked.include_usage:
            event["usage"] = None
        return data(event)

    # ---- both

    def _head(self) -> JsonObject:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model_name,
        }

    def _echo(self, prompt: TextOrIds, ids: TokenIds) -> str:
        """What stands before the replies to a prompt."""
        if not self._wanted.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.engine.model.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([int(token) for token in ids]))


async def _tokens(service: Service, caller: Caller, wanted: TokenizeRequest) -> list[int]:
    if wanted.prompt is None:
        return list((await service.chat_prompt(caller, wanted.messages or [], wanted.tools)).ids)
    return [int(token) for token in await _encoded(service, wanted.prompt)] if wanted.prompt else []


async def _encoded(service: Service, prompt: TextOrIds) -> TokenIds:
    model = service.engine.model
    with about("prompt"):
        if isinstance(prompt, str):
            service.check_length([prompt])
            return await service.aside(lambda: service.encoded(prompt))
        return await service.aside(lambda: encode(prompt, model.tokenizer, model.vocab_size))
