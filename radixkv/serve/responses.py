"""Responses: usage and log probabilities in OpenAI's shapes, whole bodies, and server-sent events.

A response ends early when its client leaves or stops reading.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.engine import Completion
from radixkv.sampling.params import TokenLogprobs
from radixkv.serve.errors import ApiError, as_api_error
from radixkv.serve.fields import JsonObject

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_event = json.JSONEncoder(separators=(",", ":")).encode


def all_replies(completions: Iterable[Completion]) -> list[Completion]:
    """All replies of some requests, those of each prompt together."""
    return [each for completion in completions for each in (completion, *completion.alternatives)]


def usage(completions: Sequence[Completion]) -> JsonObject:
    """The tokens of some requests; a prompt counts once, however many replies it has, and so do its cached tokens."""
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    cached = sum(completion.usage.cached_tokens for completion in completions)
    output = sum(completion.usage.output_tokens for completion in all_replies(completions))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class TokenTexts:
    """What single tokens say."""

    def __init__(self, tokenizer: Any | None) -> None:
        """Of a model that may have no tokenizer; then a token's text is its id."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # decoding takes microseconds, and an answer may name a token in every place

    def __getitem__(self, token: int) -> str:
        """The token's text; part of a character is U+FFFD. O(1), but for the first time."""
        text = self._known.get(token)
        if text is None:
            text = f"<{token}>" if self._tokenizer is None else str(self._tokenizer.decode([token]))
            self._known[token] = text
        return text

    def chat_logprobs(self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]) -> list[JsonObject]:
        """Entries of `logprobs.content` in a chat completion, one a token."""
        return [
            {
                **self._entry(token, each.chosen),
                "top_logprobs": [self._entry(other, value) for other, value in each.top],
            }
            for token, each in zip(ids, logprobs, strict=True)
            if each is not None
        ]

    def _entry(self, token: int, logprob: float) -> JsonObject:
        text = self[token]
        # Bytes of a part of a character are not known: the tokenizer says U+FFFD for them.
        parts = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": parts}

    def completion_logprobs(
        self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None], offset: int
    ) -> JsonObject:
        """`logprobs` of a text completion whose first token stands at `offset` in its text."""
        pairs = [(self[token], each) for token, each in zip(ids, logprobs, strict=True) if each is not None]
        offsets = []
        for text, _ in pairs:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [text for text, _ in pairs],
            "token_logprobs": [finite(each.chosen) for _, each in pairs],
            "top_logprobs": [{self[token]: finite(value) for token, value in each.top} for _, each in pairs],
            "text_offset": offsets,
        }


async def encode_response(head: JsonObject, choices: Callable[[], Iterable[JsonObject]], spent: JsonObject) -> bytes:
    """The JSON of a whole response.

    With log probabilities it takes a while, so it is made beside the event loop, and a choice at a time: encoding one
    keeps all other threads waiting.
    """

    def encoded() -> bytes:
        parts = [_encode(choice) for choice in choices()]
        front = _encode({**head, "usage": spent}).removesuffix("}")
        return f'{front},"choices":[{",".join(parts)}]}}'.encode()

    return await asyncio.to_thread(encoded)


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)


Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events, each as soon as it is there, until they end, the client leaves, or it reads nothing for too long.

    Leaving is noticed while the next event is waited for, and also while one is being sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], send_timeout: float, cleanup: ExitStack) -> None:
        """`cleanup` is left when everything is over."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._send_timeout, self._cleanup = events, send_timeout, cleanup

    def init_headers(self, headers: Any = None) -> None:
        """As Starlette's, without a length, which nobody knows yet."""
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        log_fields = scope["state"]["log_fields"]
        with self._cleanup:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if await first_of(self._sent(send), _disconnected(receive)) is None:
                    log_fields["client"] = "left"
            except TimeoutError:
                log_fields["client"] = "stopped reading"
            finally:
                await self._events.aclose()

    async def _sent(self, send: Send) -> bool:
        try:
            async for event in self._events:
                await self._send_one(send, event)
        except Exception as error:
            if isinstance(error, TimeoutError):
                raise
            await self._send_one(send, sse_event(as_api_error(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send_one(self, send: Send, event: bytes) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send({"type": "http.response.body", "body": event, "more_body": True})


async def first_of(*works: Coroutine[Any, Any, Result]) -> Result:
    """What the first of several that is done returns or raises; the others are cancelled, and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> NoReturn:
    """Raise ApiError, which nobody reads, once the client leaves."""
    await _disconnected(receive)
    raise ApiError(499, "the client left before its answer was complete", code="client_disconnected")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; raises ApiError, which nobody reads, if the client leaves first."""
    return await first_of(work, wait_for_disconnect(request.receive))


def sse_event(body: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + _encode_event(body).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
