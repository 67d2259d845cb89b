"""Submit requests to the engine, and merge the chunks of several requests as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from starlette.requests import Request

from radixkv.engine import AsyncHandle, Chunk, Origin
from radixkv.engine.input_processor import EncodedPrompt, unbounded
from radixkv.errors import PromptTooLong
from radixkv.prompt_breaks import Break
from radixkv.serve.gate import Caller
from radixkv.serve.middleware import MISS, label_of
from radixkv.serve.schemas import RequestOptions
from radixkv.serve.service import Service

_AHEAD = 64  # chunks that may wait to be sent


async def start(
    service: Service,
    request: Request,
    caller: Caller,
    options: RequestOptions,
    prompt: EncodedPrompt,
    cleanup: ExitStack,
    session: int | None,
    broken: Break | None = None,
) -> AsyncHandle:
    """Submit a request once its constraint is compiled.

    The request is cancelled when `cleanup` closes, and fails at its deadline. `broken` is its changed part.
    `AsyncEngine.submit` describes `session`. `max_tokens` is limited to the room after the prompt. The replies share
    this room if the pool cannot hold `max_tokens` for each of them. Raises PromptTooLong, RequestTimedOut, and as
    `AsyncEngine.submit`.
    """
    ids, most = prompt.ids, service.settings.max_prompt_tokens
    if most is not None and len(ids) > most:
        message = f"the prompt has {len(ids)} tokens, and this server takes at most {most}"
        raise PromptTooLong(message, tokens=len(ids), limit=most)
    params, engine = options.params_after(len(ids)), service.engine
    grammar = await service.compiled(request, caller, params)
    submit = partial(engine.submit, prompt, timeout=service.gate.time_left(request), sample=options.samples)
    origin = origin_of(request, caller.tenant, broken)
    submit = partial(submit, namespace=caller.namespace, session=session, origin=origin)
    shared = unbounded(params, engine.client.inputs.room_for_reply(len(ids), prompt.prefix))
    try:
        handle = await submit(params if options.bounded else shared)
    except PromptTooLong:
        if not options.bounded or params.max_tokens <= shared.max_tokens:
            raise
        handle = await submit(shared)
    del grammar  # until here it was held
    cleanup.callback(handle.cancel)
    return handle


def origin_of(request: Request, tenant: str | None, broken: Break | None) -> Origin:
    """Return the names of a request for the monitor, and add those that the log lacks to its line."""
    changed = (None, None) if broken is None else (broken.part, broken.rule)
    names = {"tenant": tenant, "label": label_of(request.headers), MISS: changed[0]}
    request.state.log_fields.update({name: value for name, value in names.items() if value is not None})
    return Origin(request.state.request_id, names["tenant"], names["label"], None, *changed)


async def chunks(handles: Sequence[AsyncHandle]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield (request, chunk) of all handles as they arrive. Raises the error of any of them."""
    if len(handles) == 1:
        async for chunk in handles[0]:
            yield 0, chunk
        return
    async with aclosing(_merged(handles)) as merged:
        async for pair in merged:
            yield pair


async def _merged(handles: Sequence[AsyncHandle]) -> AsyncGenerator[tuple[int, Chunk], None]:
    queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue(_AHEAD)

    async def read(at: int, handle: AsyncHandle) -> None:
        end: Exception | None = None
        try:
            async for chunk in handle:
                await queue.put((at, chunk))
        except Exception as error:  # raised by the consumer of the queue
            end = error
        await queue.put(end)

    readers: list[asyncio.Task[Any]] = [asyncio.create_task(read(*pair)) for pair in enumerate(handles)]
    try:
        for _ in handles:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
