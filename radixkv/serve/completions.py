"""POST /v1/completions and /tokenize: texts and token ids, without a chat template."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.engine import AsyncHandle, Chunk, Completion
from radixkv.engine.input_processor import EncodedPrompt, checked_ids, encode
from radixkv.engine.request import TokenIds
from radixkv.errors import InvalidInput
from radixkv.models.adapter import LoadedModel
from radixkv.sampling.params import TokenLogprobs
from radixkv.serve import infill, submit
from radixkv.serve.bodies import read
from radixkv.serve.errors import bad_request, errors_about
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.gate import Caller
from radixkv.serve.responses import (
    DONE,
    EventStream,
    encode_response,
    large_sse_event,
    running_usage,
    sse_event,
    unless_disconnected,
    usage,
)
from radixkv.serve.schemas import (
    MOST_SCORES,
    CompletionRequest,
    DetokenizeBody,
    TextOrIds,
    TokenizeRequest,
    read_completion,
    read_tokenize,
)
from radixkv.serve.service import Service


async def create(service: Service, request: Request) -> Response:
    """Respond to one completion request, which may have several prompts; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        lease = service.gate.admit(request, cleanup)
        body = await service.gate.read(request, read_completion)
        options = body.options
        caller = service.gate.caller(request)
        service.check_model(options.model)
        lease.resize(options.params.width * len(body.prompts))
        prefix = None if options.prefix is None else service.prefix(caller, options.prefix)
        encodings = (encoded(service, prompt, body.suffix, special=prefix is None) for prompt in body.prompts)
        prompts = [await service.gate.cancellable(request, encoding) for encoding in encodings]
        if body.suffix:
            options = replace(options, params=service.fim.with_stops(options.params))
        _check_scores(body, sum(map(len, prompts)))
        session = service.conversations.session(caller.namespace, options.session_key)
        with errors_about("prompt", options.constraint_field):
            handles = [
                await submit.start(service, request, caller, options, EncodedPrompt(ids, 0, prefix), cleanup, session)
                for ids in prompts
            ]
        completion = CompletionAnswer(service, body, prompts, request.state.log_fields)
        if body.echoes_logprobs:
            await service.gate.cancellable(request, completion.find_offsets())
        if options.stream:
            return EventStream(completion.events(handles), service.settings.send_timeout, cleanup.pop_all())
        return Response(await unless_disconnected(request, completion.whole(handles)), media_type="application/json")


def _check_scores(body: CompletionRequest, tokens: int) -> None:
    """Raise ApiError if a response would have too many log probabilities of prompts with `tokens` tokens."""
    options = body.options
    echoed = (options.params.logprobs or 0) + 1 if body.echoes_logprobs else 0
    scored = 0 if options.prompt_logprobs is None else options.prompt_logprobs + 1
    count = tokens * options.replies * (echoed + scored)
    if count > MOST_SCORES:
        message = f"the response would have {count} log probabilities of prompts, and at most {MOST_SCORES} are "
        message += "returned: send fewer prompts, or lower logprobs, prompt_logprobs or n"
        raise bad_request(message, "logprobs" if body.echoes_logprobs else "prompt_logprobs", "invalid_value")


async def tokenize(service: Service, request: Request) -> Response:
    """Return the ids of a text, or of messages as a chat completion encodes them; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body = await service.gate.read(request, read_tokenize)
        caller = service.gate.caller(request)
        service.check_model(body.model or "")
        ids = await service.gate.cancellable(request, _tokens(service, caller, body, request.state.ignored))
    return JSONResponse({"count": len(ids), "max_model_len": service.engine.context_limit, "tokens": ids})


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        service.gate.admit(request, cleanup)
        body = await service.gate.read(request, partial(read, DetokenizeBody))
        service.check_model(body.model or "")
        with errors_about("tokens"):
            decoding = service.gate.in_background(partial(_decoded, service.engine.model, body.tokens))
            return JSONResponse({"prompt": await service.gate.cancellable(request, decoding)})


class CompletionAnswer:
    """Build the response to one completion request. Reply `i` of `n` to prompt `p` is choice `p * n + i`."""

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[TokenIds], log_fields: dict[str, Any]
    ) -> None:
        """Fill `log_fields` with numbers for the log."""
        self._service, self._body, self._prompts, self._log_fields = service, body, prompts, log_fields
        self._options, self._replies = body.options, body.options.replies
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._echoed = [self._echo(*pair) for pair in zip(body.prompts, prompts, strict=True)]
        self._prompt_tokens, self._sampled = sum(map(len, prompts)), 0
        self._offsets = [len(text) for text in self._echoed for _ in range(self._replies)]
        self._prompt_offsets: list[list[int]] = []

    async def find_offsets(self) -> None:
        """Find the places of the prompts' tokens in the echoed texts, for their log probabilities."""
        for prompt, ids, echoed in zip(self._body.prompts, self._prompts, self._echoed, strict=True):
            text = prompt if isinstance(prompt, str) else None
            find = partial(self._service.token_texts.prompt_offsets, text, ids, len(echoed))
            self._prompt_offsets.append(await self._service.gate.in_background(find))

    # ---- whole

    async def whole(self, handles: Sequence[AsyncHandle]) -> bytes:
        """Return the whole response, once all replies are complete."""
        completions = [await handle.result() for handle in handles]
        self._service.log_usage(self._log_fields, completions)

        def choices() -> Iterator[JsonObject]:
            return chain.from_iterable(starmap(self._choices, enumerate(completions)))

        return await encode_response(self._head(), choices, usage(completions))

    def _choices(self, prompt: int, completion: Completion) -> Iterator[JsonObject]:
        """Yield the replies to one prompt. Alternatives that the client did not ask for are left out."""
        texts, options = self._service.token_texts, self._options
        asked, more = completion.prompt_logprobs, {}
        if options.prompt_logprobs is not None and asked is not None:
            more["prompt_logprobs"] = texts.prompt_logprobs(self._prompts[prompt], asked, options.prompt_logprobs)
        before = self._echoed_logprobs(prompt, asked)
        for reply, each in enumerate([completion, *completion.alternatives][: self._replies]):
            index = prompt * self._replies + reply
            logprobs = before if options.params.logprobs is None else _joined(before, self._logprobs(index, each))
            score = {} if each.score is None else {"score": each.score}
            text = self._echoed[prompt] + each.text
            yield {**self._choice(index, text, logprobs, each.finish_reason), **score, **more}

    def _echoed_logprobs(self, prompt: int, logprobs: Iterable[TokenLogprobs | None] | None) -> JsonObject | None:
        """Return the log probabilities of a prompt that is echoed with them."""
        if not self._body.echoes_logprobs or logprobs is None:
            return None
        ids, offsets, top = self._prompts[prompt].tolist(), self._prompt_offsets[prompt], self._options.params.logprobs
        return self._service.token_texts.completion_logprobs(ids, logprobs, offsets, top or 0)

    def _logprobs(self, index: int, reply: Chunk | Completion) -> JsonObject:
        """Return the log probabilities of the next tokens of a choice."""
        texts, ids = self._service.token_texts, reply.token_ids
        logprobs = reply.logprobs if isinstance(reply, Completion) else [reply.logprobs]
        offsets = texts.reply_offsets(ids, self._offsets[index])
        return texts.completion_logprobs(ids, logprobs or (), offsets, self._options.params.logprobs or 0)

    # ---- events

    async def events(self, handles: Sequence[AsyncHandle]) -> AsyncGenerator[bytes, None]:
        """Yield the response's events, and usage if the client requested it.

        A prompt is echoed at once, or with log probabilities once they are computed.
        """
        late = set(range(len(handles))) if self._body.echoes_logprobs else set()
        if self._body.echo and not late:
            yield b"".join(self._echo_events(prompt, None) for prompt in range(len(handles)))
        async with aclosing(submit.chunks(handles)) as chunks:
            async for prompt, chunk in chunks:
                if chunk.prompt_logprobs is not None and prompt in late:
                    late.remove(prompt)
                    yield await asyncio.to_thread(self._echo_events, prompt, chunk.prompt_logprobs)
                self._sampled += len(chunk.token_ids)
                if (chunk.text or chunk.finish_reason or chunk.logprobs) and chunk.index < self._replies:
                    yield self._of_chunk(prompt * self._replies + chunk.index, chunk)
        completions = [await handle.result() for handle in handles]
        for prompt in late:  # nothing was sampled
            yield await asyncio.to_thread(self._echo_events, prompt, completions[prompt].prompt_logprobs)
        if not self._options.samples:
            for prompt, completion in enumerate(completions):
                yield self._event(prompt, reason=completion.finish_reason)
        self._service.log_usage(self._log_fields, completions)
        if self._options.include_usage:
            yield sse_event({**self._head(), "choices": [], "usage": usage(completions)})
        yield DONE

    def _echo_events(self, prompt: int, scores: Iterable[TokenLogprobs | None] | None) -> bytes:
        """Return the events that repeat a prompt, one for each reply; none for an empty text without tokens."""
        text, logprobs = self._echoed[prompt], self._echoed_logprobs(prompt, scores)
        if not text and logprobs is None:
            return b""
        indices = range(prompt * self._replies, (prompt + 1) * self._replies)
        return b"".join(large_sse_event(self._event_body(index, text, logprobs)) for index in indices)

    def _of_chunk(self, index: int, chunk: Chunk) -> bytes:
        logprobs = None
        if chunk.logprobs is not None:
            logprobs = self._logprobs(index, chunk)
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return self._event(index, chunk.text, logprobs, chunk.finish_reason)

    def _event(self, index: int, text: str = "", logprobs: Any = None, reason: str | None = None) -> bytes:
        return sse_event(self._event_body(index, text, logprobs, reason))

    def _event_body(self, index: int, text: str, logprobs: Any, reason: str | None = None) -> JsonObject:
        event = {**self._head(), "choices": [self._choice(index, text, logprobs, reason)]}
        if self._options.running_usage:
            event["usage"] = running_usage(self._prompt_tokens, self._sampled)
        elif self._options.include_usage:
            event["usage"] = None
        return event

    # ---- both

    def _choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _head(self) -> JsonObject:
        named = {"created": self._created, "model": self._service.model_name}
        return {"id": self._id, "object": "text_completion", **named}

    def _echo(self, prompt: TextOrIds, ids: TokenIds) -> str:
        """Return the text that precedes the replies to a prompt: the prompt itself with `echo`."""
        if not self._body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.engine.model.codec
        return "" if tokenizer is None else str(tokenizer.decode([int(token) for token in ids]))


def _joined(before: JsonObject | None, after: JsonObject) -> JsonObject:
    """Return the log probabilities of a prompt and its reply as one text."""
    return after if before is None else {name: before[name] + values for name, values in after.items()}


async def _tokens(service: Service, caller: Caller, body: TokenizeRequest, ignored: IgnoredFields) -> list[int]:
    if body.prompt is None:
        return list((await service.chat_prompt(caller, body, ignored=ignored)).ids)
    return [int(token) for token in await encoded(service, body.prompt)] if body.prompt else []


async def encoded(service: Service, prompt: TextOrIds, suffix: str = "", *, special: bool = True) -> TokenIds:
    """Return the ids of a prompt, or of a text around the reply; raise ApiError 400."""
    model = service.engine.model
    with errors_about("suffix" if suffix else "prompt"):
        if suffix:
            return await infill.encoded(service, str(prompt), suffix)
        if isinstance(prompt, str):
            service.check_length([prompt])
            return await service.gate.in_background(lambda: service.encoded(prompt, special=special))
        return await service.gate.in_background(lambda: encode(prompt, model.codec, model.vocab_size))


def _decoded(model: LoadedModel, ids: list[int]) -> str:
    if model.codec is None:
        raise InvalidInput("this model has no tokenizer, so its tokens have no text")
    return str(model.codec.decode(checked_ids(ids, model.vocab_size))) if ids else ""
