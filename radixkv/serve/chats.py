"""POST /v1/chat/completions: chat completions, whole or as server-sent events.

Thinking is returned as `reasoning_content`, apart from `content`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.tool_call_formats import tool_names
from radixkv.engine import AsyncHandle, Chunk, Completion
from radixkv.serve import submit
from radixkv.serve.conversations import ChatPrompt
from radixkv.serve.errors import errors_about
from radixkv.serve.fields import JsonObject
from radixkv.serve.reply import Piece, ReplyReader, TaggedText
from radixkv.serve.responses import (
    DONE,
    EventStream,
    all_replies,
    encode_response,
    sse_event,
    unless_disconnected,
    usage,
)
from radixkv.serve.schemas import ChatRequest, read_chat
from radixkv.serve.service import Service

_NO_CONTENT = b'"content":""'


async def create(service: Service, request: Request) -> Response:
    """Respond to one chat completion request; raise ApiError or RadixKVError."""
    with ExitStack() as cleanup:
        lease = service.admit(request, cleanup)
        body = await service.read(request, read_chat)
        options = body.options
        caller = service.caller(request, options.cache_key)
        service.check_model(options.model)
        lease.resize(options.params.n)
        prompt = await service.cancellable(request, service.chat_prompt(caller, body.messages, body.tools))
        with errors_about("messages"):
            timeout = service.time_left(request)
            handle = await submit.start(
                service, caller, options, prompt.ids, cleanup, timeout=timeout, session=prompt.session
            )
        chat = ChatAnswer(service, body, prompt, request.state.log_fields)
        if options.stream:
            return EventStream(chat.events(handle), service.settings.send_timeout, cleanup.pop_all())
        return Response(await unless_disconnected(request, chat.whole(handle)), media_type="application/json")


class ChatAnswer:
    """Build the response to one chat completion request, while its replies are generated."""

    def __init__(self, service: Service, body: ChatRequest, prompt: ChatPrompt, log_fields: dict[str, Any]) -> None:
        """Fill `log_fields` with numbers for the log."""
        self._service, self._body, self._prompt, self._log_fields = service, body, prompt, log_fields
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._parts: dict[int, tuple[bytes, bytes]] = {}
        thinking = service.opens_thinking(prompt.ids)
        self._readers = [self._reader(index, thinking) for index in range(body.options.params.n)]
        self._texts = [TaggedText(service.hidden_tags) for _ in self._readers]

    def _reader(self, index: int, thinking: bool) -> ReplyReader:
        """Create the reader of one reply. Equal requests get equal ids of tool calls, whole and as events."""
        prompt_hash = blake2b(self._prompt.ids.tobytes(), digest_size=8).hexdigest()
        return ReplyReader(
            reads_calls=self._body.reads_calls,
            thinking=thinking,
            thinking_tags=self._service.thinking_tags,
            channels=self._service.has_channels,
            form=self._service.call_format,
            names=tool_names(self._body.tools),
            seed=f"{prompt_hash}_{index}",
        )

    # ---- whole

    async def whole(self, handle: AsyncHandle) -> bytes:
        """Return the whole response, once all replies are complete."""
        completion = await self._read(handle)
        await self._remember(completion)
        choices = all_replies([completion])
        return await encode_response(
            self._head("chat.completion"), lambda: map(self._choice, choices), usage([completion])
        )

    async def _read(self, handle: AsyncHandle) -> Completion:
        """Wait for all replies and read them; token by token if decoding leaves out some tags."""
        if self._service.hidden_tags:
            async for chunk in handle:
                self._readers[chunk.index].push(self._texts[chunk.index].push(chunk))
        completion = await handle.result()
        for each in all_replies([completion]):
            if not self._service.hidden_tags:
                self._readers[each.index].push(each.text)
            self._readers[each.index].finish()
        return completion

    def _choice(self, completion: Completion) -> JsonObject:
        reader = self._readers[completion.index]
        message: JsonObject = {"role": "assistant", "content": reader.content or (None if reader.calls else "")}
        message["refusal"] = None
        if reader.thinking:
            message["reasoning_content"] = reader.thinking
        if reader.calls:
            message["tool_calls"] = [_call(call) for call in reader.calls]
        logprobs = completion.logprobs
        return {
            "index": completion.index,
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(completion.token_ids, logprobs),
            "finish_reason": self._reason(completion.index, completion.finish_reason),
        }

    # ---- events

    async def events(self, handle: AsyncHandle) -> AsyncGenerator[bytes, None]:
        """Yield the response's events: roles, deltas, finish reasons, and usage if the client requested it."""
        for index in range(len(self._readers)):
            yield self._event(index, {"role": "assistant", "content": ""})
        async for chunk in handle:
            if event := self._of_chunk(chunk):
                yield event
        completion = await handle.result()
        await self._remember(completion)
        if self._body.options.include_usage:
            head = self._head("chat.completion.chunk")
            yield sse_event({**head, "choices": [], "usage": usage([completion])})
        yield DONE

    def _of_chunk(self, chunk: Chunk) -> bytes:
        """Return the events for one chunk: empty while its text is held back."""
        reader = self._readers[chunk.index]
        pieces = reader.push(self._texts[chunk.index].push(chunk))
        if chunk.finish_reason is not None:
            pieces += reader.finish()
        if len(pieces) == 1 and pieces[0].content and chunk.logprobs is None and chunk.finish_reason is None:
            return self._content_event(chunk.index, pieces[0].content)
        deltas = [_delta(piece) for piece in pieces]
        logprobs = None if chunk.logprobs is None else self._logprobs(chunk.token_ids, [chunk.logprobs])
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        events = [self._event(chunk.index, delta, logprobs if at == 0 else None) for at, delta in enumerate(deltas)]
        if chunk.finish_reason is not None:
            events.append(self._event(chunk.index, {}, reason=self._reason(chunk.index, chunk.finish_reason)))
        return b"".join(events)

    def _content_event(self, index: int, text: str) -> bytes:
        """Return the most frequent event, a delta of content, from prepared parts; equal to `_event`, but faster."""
        if index not in self._parts:
            front, _, back = self._event(index, {"content": ""}).partition(_NO_CONTENT)
            self._parts[index] = front + _NO_CONTENT[:-2], back
        front, back = self._parts[index]
        return front + json.dumps(text).encode() + back

    def _event(self, index: int, delta: JsonObject, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        event = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._body.options.include_usage:
            event["usage"] = None
        return sse_event(event)

    # ---- both

    def _head(self, kind: str) -> JsonObject:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._service.model_name}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Any]) -> JsonObject:
        return {"content": self._service.token_texts.chat_logprobs(ids, logprobs), "refusal": None}

    def _reason(self, index: int, reason: str) -> str:
        return "tool_calls" if self._readers[index].calls and reason == "stop" else reason

    async def _remember(self, completion: Completion) -> None:
        """Add the replies to the history, before the client sees the end: its next request builds on them."""
        self._service.log_usage(self._log_fields, [completion])
        replies = all_replies([completion])

        def remember() -> None:
            for each in replies:
                reader = self._readers[each.index]
                cut = None if self._is_whole(each) else reader.text
                self._service.conversations.remember(self._prompt, _message(reader), each.token_ids, cut=cut)

        if self._service.settings.history_bytes:
            # Only cut replies need the tokenizer's thread, where long prompts may be waiting.
            whole = all(map(self._is_whole, replies))
            await (asyncio.to_thread(remember) if whole else self._service.in_background(remember))

    def _is_whole(self, reply: Completion) -> bool:
        """Whether the text has all sampled tokens: no stop string or token of the client's ended it."""
        return reply.finish_reason != "stop" or reply.token_ids[-1] in self._service.engine.model.stop_token_ids


def _delta(piece: Piece) -> JsonObject:
    if piece.call is not None:
        return {"tool_calls": [{"index": piece.number, **_call(piece.call)}]}
    return {"reasoning_content": piece.thinking} if piece.thinking else {"content": piece.content}


def _call(call: ToolCall) -> JsonObject:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _message(reader: ReplyReader) -> Message:
    """Return the reply as a client sends it back, in the form of `schemas.read_messages`."""
    message: Message = {"role": "assistant", "content": reader.content}
    if reader.calls:
        message["tool_calls"] = [call.as_message() for call in reader.calls]
    if reader.thinking:
        message["reasoning_content"] = reader.thinking
    return message
