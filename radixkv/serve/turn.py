"""Serve one chat request of any protocol: from its body to neutral events, without the protocol's JSON.

`respond` admits a request and reads its body. `open_turn` encodes the prompt and submits it. The resulting `Turn`
yields its replies as pieces (content, thinking, tool calls) and ends, or returns whole replies. A protocol is a reader
of bodies, which returns a `ChatRequest`, and an `Encoder`, which writes bytes from a `Turn`:

    async def create(service: Service, request: Request) -> Response:
        return await respond(service, request, read_chat, ChatAnswer)

Invariant: the history stores the replies of a turn once, before `steps` yields the end of the last reply, and before
`replies` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response

from radixkv.chat.calls.formats import HERMES, CallFormat
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.messages import Message, ToolCall
from radixkv.engine import AsyncHandle, Chunk, Completion, CompressedPrefix
from radixkv.engine.compressed import rest
from radixkv.engine.input_processor import EncodedPrompt
from radixkv.serve import submit
from radixkv.serve.bodies import without_effect
from radixkv.serve.conversations import ChatPrompt
from radixkv.serve.errors import ApiError, bad_request, errors_about
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.reply import Piece, ReplyReader, TaggedText
from radixkv.serve.responses import EventStream, TurnUsage, all_replies, unless_disconnected
from radixkv.serve.schemas import ChatRequest, RequestOptions
from radixkv.serve.service import Service

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class End:
    """The end of one reply.

    `finish_reason` is "length" for a limit, else "tool_calls" if there are calls, all complete, else "stop".
    `stop_text` is the stop string that ended the reply, None if the model ended it itself. `context_full` says that the
    reply reached the end of the context before the client's `max_tokens`.
    """

    finish_reason: FinishReason
    stop_text: str | None = None
    context_full: bool = False


@dataclass(slots=True)  # a frozen one takes a microsecond more, for each token
class Step:
    """The text that one chunk released: pieces, and the end if the reply is complete.

    `pieces` is empty while text is held back. `chunk` has the sampled token and its log probabilities.
    """

    index: int
    pieces: list[Piece]
    end: End | None
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole reply. `completion` has its token ids, its log probabilities and its cost."""

    index: int
    content: str
    thinking: str
    calls: tuple[ToolCall, ...]
    end: End
    completion: Completion


class Encoder(Protocol):
    """Write the response to one turn in the form of one protocol. A silent stream sends `keep_alive` now and then."""

    keep_alive: bytes

    async def whole(self) -> bytes:
        """Return the JSON of the whole response."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the response, each as complete bytes."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""


Reader = Callable[[JsonObject, IgnoredFields | None], ChatRequest]
"""Checks a body, perhaps on another thread, and adds the fields that it ignores, as `read_chat` does."""


async def respond(
    service: Service, request: Request, read: Reader, encoder: Callable[[Turn], Encoder], *, any_model: bool = False
) -> Response:
    """Respond to a chat request as events or as a whole, as the client requested. `any_model` serves every model name.

    Raises ApiError (401, 403, 404, 429, or 400 for a wrong body), and as `open_turn` and `send`.
    """
    with ExitStack() as cleanup:
        lease = service.gate.admit(request, cleanup)
        body = await service.gate.read(request, read)
        if not any_model:
            service.check_model(body.options.model)
        lease.resize(body.options.params.width)
        encoded = encoder(await open_turn(service, request, body, cleanup))
        return await send(service, request, encoded, cleanup, stream=body.options.stream)


async def send(
    service: Service,
    request: Request,
    encoder: Encoder,
    cleanup: ExitStack,
    *,
    stream: bool,
    media_type: str = EventStream.media_type,
) -> Response:
    """Return the response that `encoder` writes, as a stream of `media_type` or as a whole.

    `cleanup` closes at the end of the response. Raises the error of a request that is answered as a whole.
    """
    if stream:
        endings = cleanup.pop_all(), encoder.error_event
        timeout = service.settings.send_timeout
        return EventStream(encoder.events(), timeout, *endings, encoder.keep_alive, media_type)
    return Response(await unless_disconnected(request, encoder.whole()), media_type="application/json")


async def open_turn(service: Service, request: Request, body: ChatRequest, cleanup: ExitStack) -> Turn:
    """Encode the prompt of an admitted request, and submit it.

    The request is cancelled when `cleanup` closes. `max_tokens` is limited to the room after the prompt.
    Raises ApiError (400 for wrong messages or a long prompt), RequestTimedOut and EngineClosed. The `code` of a prompt
    that is too long is "context_length_exceeded".
    """
    began, body = monotonic(), _with_useful_prediction(service, request, body)
    options, caller = body.options, service.gate.caller(request)
    prefix = None if options.prefix is None else service.prefix(caller, options.prefix)
    if prefix is not None:
        body = _after_prefix(prefix, body)
    asked: dict[str, Any] = {"ignored": request.state.ignored, "compares": True, "prefix": prefix}
    encoding = service.chat_prompt(caller, body, options.session_key, **asked)
    prompt = await service.gate.cancellable(request, encoding)
    with errors_about("messages", options.constraint_field):
        if body.call_rule.constrains(options.params):
            options = await _constrained(service, body, prompt)
        encoded = EncodedPrompt(rest(prefix, prompt.ids), prompt.reply_start, prefix)
        handle = await submit.start(service, request, caller, options, encoded, cleanup, prompt.session, prompt.broken)
    turn = Turn(service, body, prompt, handle, request.state.log_fields)
    cleanup.callback(turn.record, began)
    return turn


def _after_prefix(prefix: CompressedPrefix, body: ChatRequest) -> ChatRequest:
    """Return the request with the messages of its compressed prefix first; raise ApiError 400 if it has none."""
    if prefix.source is None or prefix.source.turns:
        raise bad_request("prefix must be made of messages with POST /v1/prefixes; else use /v1/completions", "prefix")
    return replace(body, messages=[*prefix.source.opening, *body.messages])


def _with_useful_prediction(service: Service, request: Request, body: ChatRequest) -> ChatRequest:
    """Return the request, without its prediction if nothing is drafted for it; then the field is an ignored one."""
    params = body.options.params
    drafts = service.engine.config.speculate is not None and params.speculate
    if not params.prediction or (drafts and params.beam_width == 1 and params.prompt_logprobs is None):
        return body
    ignored = None if service.settings.strict_fields else request.state.ignored
    without_effect("prediction", "has a meaning only if replies are drafted, as with --speculate ngram", ignored)
    return replace(body, options=replace(body.options, params=params.but(prediction="")))


async def _constrained(service: Service, body: ChatRequest, prompt: ChatPrompt) -> RequestOptions:
    """Return the options whose parameters constrain the whole reply. Raises InvalidConstraint."""
    params, rule, calls = body.options.params, body.call_rule, body.reads_calls
    constrain = partial(service.conversations.constrained, params, prompt, rule, calls=calls)
    return replace(body.options, params=await service.gate.in_background(constrain))


class Turn:
    """The replies to one chat request, while they are generated and after that.

    Consume `steps` or `replies`. `replies` may follow `steps`, and then returns at once.
    """

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        prompt: ChatPrompt,
        handle: AsyncHandle,
        log_fields: dict[str, Any],
    ) -> None:
        """Read the replies from `handle`, and add their token counts to `log_fields` at the end."""
        self.service, self.request, self.prompt = service, request, prompt
        self._handle, self._log_fields = handle, log_fields
        self._completion: Completion | None = None
        thinking = service.opens_thinking(prompt)
        prompt_hash = blake2b(prompt.ids.tobytes(), digest_size=8).hexdigest()
        self._readers = [
            ReplyReader(
                reads_calls=request.reads_calls,
                thinking=thinking,
                thinking_tags=service.thinking_tags,
                channels=service.has_channels,
                form=_call_format(service, request),
                tools=tools_by_name(request.tools),
                streams=request.options.stream,
                # Equal requests get equal ids of tool calls, whole and as events.
                seed=request.call_seed or f"{prompt_hash}_{index}",
            )
            for index in range(request.options.replies)
        ]
        self._texts = [TaggedText(service.hidden_tags) for _ in self._readers]

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt, which is available from the start."""
        return len(self.prompt.ids)

    @property
    def usage(self) -> TurnUsage:
        """The cost of the request; available once the turn is complete."""
        return TurnUsage.of([self.completion])

    @property
    def completion(self) -> Completion:
        """The engine's result; available once the turn is complete."""
        assert self._completion is not None, "the replies are not complete yet"
        return self._completion

    @property
    def complete(self) -> bool:
        """Whether all replies are complete, from the last of `steps` on, and after `replies`."""
        return self._completion is not None

    def cancel(self) -> None:
        """Stop the replies: their readers raise RequestCancelled. Computed tokens stay cached."""
        self._handle.cancel()

    def record(self, began: float) -> None:
        """Record the texts of the request, which arrived at `began`, where the server records texts."""
        output, service = self.usage.output_tokens if self.complete else 0, self.service
        service.gate.texts.add(began, service.model_name, self.prompt, self.request.messages, output)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the replies as they are generated, a step for each sampled token. Raises the request's error.

        The turn is complete with the last step, so that an encoder can send the last text and the usage together.
        """
        tokens = [0] * len(self._readers)
        running = len(self._readers)
        async for chunk in self._handle:
            index = chunk.index
            tokens[index] += len(chunk.token_ids)
            reader = self._readers[index]
            pieces = reader.push(self._texts[index].push(chunk))
            if chunk.finish_reason is None:
                yield Step(index, pieces, None, chunk)
            else:
                pieces += reader.finish()
                running -= 1
                if not running:
                    await self._complete(await self._handle.result())
                yield Step(index, pieces, self._end(chunk, tokens[index]), chunk)
        if running:  # the request was cancelled, which raises, or its beams had too few tokens to continue with
            await self._complete(await self._handle.result())

    async def replies(self) -> list[Reply]:
        """Return all replies, in the order of their indices, once they are complete. Raises the request's error."""
        if self._completion is None:
            await self._complete(await self._read())
        return [self._reply(each) for each in all_replies([self.completion])]

    # ---- inside

    async def _read(self) -> Completion:
        """Wait for all replies and read them; token by token if decoding leaves out some tags."""
        hidden = self.service.hidden_tags
        if hidden:
            async for chunk in self._handle:
                self._readers[chunk.index].push(self._texts[chunk.index].push(chunk))
        completion = await self._handle.result()
        for each in all_replies([completion]):
            if not hidden:
                self._readers[each.index].push(each.text)
            self._readers[each.index].finish()
        return completion

    def _reply(self, completion: Completion) -> Reply:
        index = completion.index
        reader, end = self._readers[index], self._end(completion, len(completion.token_ids))
        return Reply(index, reader.content, reader.thinking, tuple(reader.calls), end, completion)

    def _end(self, last: Chunk | Completion, tokens: int) -> End:
        """Return the end of a reply of `tokens` tokens, from its last chunk or its completion."""
        if last.finish_reason == "length":
            return End("length", context_full=tokens < self.request.options.params.max_tokens)
        complete = [call.complete for call in self._readers[last.index].calls]
        return End("tool_calls" if complete and all(complete) else "stop", last.stop_text)

    async def _complete(self, completion: Completion) -> None:
        """Store the replies, before the client sees the end: its next request builds on them."""
        self._completion = completion
        service, replies = self.service, all_replies([completion])
        service.log_usage(self._log_fields, [completion])

        def remember() -> None:
            for each in replies:
                reader = self._readers[each.index]
                cut = None if self._is_whole(each) else reader.text
                service.conversations.remember(self.prompt, _message(reader), each.token_ids, cut=cut)

        if service.settings.history_bytes:
            # Only cut replies need the tokenizer's thread, where long prompts may be waiting.
            whole = all(map(self._is_whole, replies))
            await (asyncio.to_thread(remember) if whole else service.gate.in_background(remember))

    def _is_whole(self, reply: Completion) -> bool:
        """Whether the text has all sampled tokens: no stop string or token of the client's ended it."""
        return reply.finish_reason != "stop" or reply.token_ids[-1] in self.service.engine.model.stop_token_ids


def _call_format(service: Service, request: ChatRequest) -> CallFormat | None:
    """Return the format in which calls are read, None if it is unknown; with a seed, without the model's own ids."""
    form = service.call_format or (HERMES if request.call_rule.required else None)
    return form if form is None or request.call_seed is None else replace(form, own_id="")


def _message(reader: ReplyReader) -> Message:
    """Return the reply as a client sends it back, in the form of `read_messages`."""
    message: Message = {"role": "assistant", "content": reader.content}
    if reader.calls:
        message["tool_calls"] = [call.as_message() for call in reader.calls]
    if reader.thinking:
        message["reasoning_content"] = reader.thinking
    return message
