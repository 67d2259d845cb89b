"""What all endpoints share: the engine, who may ask and how much, and what is known of the model's texts.

Knows: no route, no field of a body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request

from radixkv.chat import AsyncEngine
from radixkv.chat.messages import Message
from radixkv.chat.rendering import at_least
from radixkv.chat.thinking import CHANNEL, THINK_START
from radixkv.chat.tool_call_formats import format_of
from radixkv.engine import Completion
from radixkv.engine.input_processor import encode, template_text
from radixkv.engine.request import TokenIds
from radixkv.errors import EngineClosed, PromptTooLong, RequestTimedOut
from radixkv.serve.access import Auth, StreamLease, StreamLimiter, namespace, read_body
from radixkv.serve.conversations import ChatPrompt, Conversations
from radixkv.serve.errors import ApiError, about
from radixkv.serve.fields import JsonObject, parse_object
from radixkv.serve.metrics import ServerMetrics
from radixkv.serve.reply import tags
from radixkv.serve.responses import TokenTexts, first_of, usage, wait_for_disconnect
from radixkv.serve.schemas import written
from radixkv.serve.settings import Settings

Result = TypeVar("Result")
_LARGE = 1 << 17  # bytes of JSON that take some milliseconds
_LONG = 8  # characters for each token of the context: what is longer is likely to be too long, and is counted first
_TAIL = 16  # tokens that a tag and the white space behind it take at most, spelt letter by letter


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request; `namespace` is what the cache keeps apart."""

    tenant: str | None
    namespace: Hashable


class Service:
    """One engine behind one set of endpoints. The engine is its maker's to close.

    `call_format` is how the model writes tool calls, None if that is not known here. `hidden_tags` are the tags of
    thinking, of channels and of tool calls that are control tokens, which texts leave out, by id. `has_channels`: the
    model may write what it thinks and what it says as messages of their own.
    """

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        """Serve `engine`."""
        self.engine = engine
        self.settings = settings
        self.auth = Auth(settings.api_keys)
        self.limiter = StreamLimiter(settings)
        self.model_name = settings.model_name or engine.model.name
        self.created = int(time.time())
        tokenizer = engine.model.tokenizer
        self.conversations = Conversations(
            tokenizer,
            engine.model.stop_token_ids,
            settings.history_bytes,
            settings.history,
            new_session=engine.client.new_session,
            limit=min(engine.context_limit - 1, settings.max_prompt_tokens or engine.context_limit),
        )
        self.metrics = ServerMetrics(
            engine,
            self.model_name,
            history=lambda: self.conversations.stats,
            refused=lambda: self.limiter.refused,
            vllm=settings.vllm_metrics,
        )
        self.token_texts = TokenTexts(tokenizer)
        self.call_format = format_of(tokenizer)
        self.thinking_tags = self.conversations.thinking_tags
        shown = tags(self.call_format, self.thinking_tags)
        self.hidden_tags = _hidden_tags(tokenizer, shown, engine.model.stop_token_ids)
        self.has_channels = CHANNEL in template_text(tokenizer)
        self._longest_token = _longest_token(tokenizer)
        # One thread, since a tokenizer is not for two at once; it goes with the last reference to this.
        self.executor = ThreadPoolExecutor(1, "radixkv-serve")
        self._ending = asyncio.Event()

    def admit(self, request: Request, cleanup: ExitStack) -> StreamLease:
        """Let a request in until `cleanup` is left, before any of its body is read; raises ApiError 401, 403, 429."""
        return cleanup.enter_context(self.limiter.admit(self.auth.tenant(request.headers)))

    async def read(self, request: Request, check: Callable[[JsonObject], Result]) -> Result:
        """What was sent, checked; raises ApiError.

        A large body has the time of the thread for templates, rather than everybody's. The request's own time begins
        when the body is there.
        """
        body = await read_body(request, self.settings)
        timeout = self.settings.timeout
        request.state.deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        if len(body) > _LARGE:
            return await self.cancellable(request, self.in_background(lambda: check(parse_object(body))))
        return check(parse_object(body))

    async def cancellable(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` returns, before the engine knows of the request: whoever waits for the thread need not stay.

        `work` is cancelled if the client leaves first (ApiError 499), or the request's time is over (RequestTimedOut),
        or the server ends (EngineClosed). What the thread is at comes to its end, and nobody is told of it.
        """
        try:
            async with asyncio.timeout_at(request.state.deadline):
                return await first_of(work, wait_for_disconnect(request.receive), self._shutting_down())
        except TimeoutError as error:
            raise self._timed_out() from error

    def time_left(self, request: Request) -> float | None:
        """Seconds that a request still has, None for any number; raises RequestTimedOut."""
        deadline: float | None = request.state.deadline
        left = None if deadline is None else deadline - asyncio.get_running_loop().time()
        if left is not None and left <= 0:
            raise self._timed_out()
        return left

    def begin_shutdown(self) -> None:
        """The engine takes nothing new: tell those who wait for the thread. On the event loop."""
        self._ending.set()

    def caller(self, request: Request, cache_key: str | None = None) -> Caller:
        """Who sent this; raises ApiError 401."""
        tenant = self.auth.tenant(request.headers)
        return Caller(tenant, namespace(tenant, request.headers, cache_key))

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless this is the model that is served."""
        if name != self.model_name:
            message = f"there is no model {name[:100]!r} here: this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # ---- prompts and texts

    async def chat_prompt(
        self, caller: Caller, messages: Sequence[Message], tools: Sequence[JsonObject] | None
    ) -> ChatPrompt:
        """A conversation as the caller's prompt; raises ApiError 400."""

        def encoded() -> ChatPrompt:
            with about("messages"):
                texts = written(messages, tools, thinking=self.conversations.keeps_thinking)
                self.check_length(texts, len(messages))
                return self.conversations.prompt(caller.namespace, messages, tools)

        return await self.in_background(encoded)

    def check_length(self, texts: Iterable[str], more: int = 0) -> None:
        """Raise PromptTooLong for what cannot fit whatever its tokens are, without encoding it.

        `more` tokens stand around the texts: a template marks each message with at least one.
        """
        self._check_tokens(more - (-sum(map(len, texts)) // self._longest_token))

    def encoded(self, text: str) -> TokenIds:
        """Ids of a text; raises PromptTooLong, mostly before more of it is encoded than the context takes.

        For the thread for tokenizers. Raises InvalidInput as `prompts.encode`.
        """
        model = self.engine.model
        if model.tokenizer is not None and len(text) > _LONG * self.engine.context_limit:
            pieces = partial(model.tokenizer.encode, add_special_tokens=False)
            self._check_tokens(at_least(text, self.engine.context_limit, model.tokenizer, pieces))
        return encode(text, model.tokenizer, model.vocab_size)

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self.engine.context_limit:
            raise PromptTooLong(
                f"the prompt has at least {tokens} tokens, and the context {self.engine.context_limit}: shorten it"
            )

    def opens_thinking(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with an open tag, so that its reply begins with thinking."""
        return "".join(self.token_texts[token] for token in ids[-_TAIL:]).rstrip().endswith(THINK_START)

    def log_usage(self, log_fields: dict[str, Any], completions: Sequence[Completion]) -> None:
        """Numbers of a request that is complete, for the log."""
        spent = usage(completions)
        log_fields["prompt"], log_fields["output"] = spent["prompt_tokens"], spent["completion_tokens"]
        log_fields["cached"] = spent["prompt_tokens_details"]["cached_tokens"]

    async def in_background(self, call: Callable[[], Result]) -> Result:
        """What `call` returns, on the thread for templates and tokenizers: the event loop goes on meanwhile.

        Cancelled before its turn has come, it is never called.
        """
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    async def _shutting_down(self) -> NoReturn:
        await self._ending.wait()
        raise EngineClosed("the server is ending")

    def _timed_out(self) -> RequestTimedOut:
        return RequestTimedOut(f"the request did not finish in time: {self.settings.timeout:g} s have passed")


def _hidden_tags(tokenizer: Any | None, tags: Collection[str], stops: Collection[int]) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    hidden = {number: text for number, text in special.items() if any(text in tag for tag in tags)}
    return {number: tag for number, tag in hidden.items() if number not in stops}  # a reply's end says nothing


def _longest_token(tokenizer: Any | None) -> int:
    """Characters of the longest token; none stands for more."""
    return max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
