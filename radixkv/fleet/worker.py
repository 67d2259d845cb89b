"""An engine as a backend of Dynamo: its start, its requests, its health, its end.

Dynamo's worker registers the model, and handles SIGTERM: it takes no new request, waits five seconds, and calls
`cleanup`.
"""

from __future__ import annotations

import signal
import sys
from asyncio import to_thread
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import Cancelled, EngineShutdown, HttpError, InvalidArgument, Unknown

from radixkv.chat import AsyncEngine
from radixkv.engine import AsyncHandle, Origin
from radixkv.engine.input_processor import unbounded
from radixkv.errors import EngineClosed, InvalidInput, RadixKVError, RequestCancelled
from radixkv.fleet.publisher import Publisher
from radixkv.fleet.requests import Call, call_of, chunk_of, end_of
from radixkv.serve.metrics import ServerMetrics
from radixkv.server_settings import Settings

Begin = Callable[..., Awaitable[AsyncHandle]]
_SESSIONS = 65_536  # names of sessions that are kept


class Worker(LLMEngine):  # type: ignore[misc]  # its methods are Dynamo's
    """Serves one engine, which it closes at its end."""

    def __init__(
        self, engine: AsyncEngine, folder: str, name: str, limits: Settings, begin: Begin | None = None
    ) -> None:
        """`folder` has the model's files for the frontend, which clients call `name`; `begin` starts requests."""
        self._engine, self._folder, self._name, self._limits = engine, folder, name, limits
        self._begin = begin or engine.submit
        self._replies = 0
        self._sessions: OrderedDict[int, int] = OrderedDict()
        self.publisher = Publisher(engine.client, ComponentSnapshot)
        self._metrics = ServerMetrics(engine, name)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Refuse Dynamo's own way to start a backend."""
        raise InvalidInput("start a worker by the command `radixkv worker`")

    async def start(self, worker_id: int) -> EngineConfig:
        """Return the facts that the frontend and its router need; the engine is loaded."""
        await self._metrics.watch()
        print(f"radixkv: {self._name} is worker {worker_id}", file=sys.stderr, flush=True)
        cache, config = self._engine.core.cache, self._engine.config
        return EngineConfig(
            model=self._folder,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=self._engine.context_limit,
                kv_cache_block_size=cache.block_size,
                total_kv_blocks=cache.num_blocks,
                max_num_seqs=config.max_sequences,
                max_num_batched_tokens=config.max_batch_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Run a request, and yield its chunks. Raises Dynamo's errors."""
        with _dynamos_errors():
            normalize_request_token_ids(request)
            call = call_of(request, self._engine.default_params)
            with self._admitted(call.params.width):
                handle = await self._submit(call, context.id())
                left = context.async_killed_or_stopped()
                left.add_done_callback(lambda _: handle.cancel())
                try:
                    running = call.params.width
                    async for chunk in handle:
                        made = chunk_of(chunk)
                        running -= chunk.finish_reason is not None
                        if running:  # Dynamo takes no chunk after a finish_reason
                            made.pop("finish_reason", None)
                        else:
                            made |= end_of(await handle.result(), call.tokens)
                        yield made
                    if running:  # it was cancelled
                        await handle.result()
                finally:
                    left.cancel()

    async def _submit(self, call: Call, name: str) -> AsyncHandle:
        room = self._engine.client.inputs.room_for_reply(len(call.tokens))
        return await self._begin(
            list(call.tokens),
            call.params if call.bounded else unbounded(call.params, room),
            namespace=call.namespace,
            priority=call.priority,
            session=None if call.session is None else self._session((call.namespace, call.session)),
            origin=Origin(name, None, None),
        )

    @contextmanager
    def _admitted(self, replies: int) -> Iterator[None]:
        """Count the replies of a request. Raises HttpError 503 if there are too many, and InvalidInput."""
        most = self._limits.max_streams
        if self._replies + replies > most:
            if replies > most:
                raise InvalidInput(f"n={replies} replies are more than this worker takes, {most}")
            raise HttpError(503, f"{self._replies} replies run or wait, and at most {most} may: try again soon")
        self._replies += replies
        try:
            yield
        finally:
            self._replies -= replies

    def _session(self, name: Hashable) -> int:
        """Return the number of a session for the monitor."""
        key = hash(name)
        number = self._sessions.pop(key, None) or self._engine.client.new_session()
        self._sessions[key] = number
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return number

    async def cleanup(self) -> None:
        """Finish running requests within the time for that, or until a second signal, and close the engine."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._engine.client.thread.stop())
        await to_thread(self.publisher.close)
        await self._engine.close(drain=True, timeout=self._limits.drain_timeout)

    # ---- for router and operators

    async def kv_event_sources(self) -> list[PushSource]:
        """Publish the blocks of the cache."""
        return [PushSource(on_ready=self.publisher.start, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Publish the use of one pool."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publish the use of the pool to `publisher`."""
        self.publisher.publish_loads(publisher)

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the metrics of `radixkv serve` to Dynamo's."""
        metrics.register_prometheus_expfmt_callback(self._metrics.text)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a request of one token, which Dynamo sends to an idle worker."""
        payload: dict[str, Any] = build_health_check_payload(min(self._engine.model.stop_token_ids, default=0))
        return payload


@contextmanager
def _dynamos_errors() -> Iterator[None]:
    """Convert errors of the engine to Dynamo's, which give a status to a response, or move the request."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidArgument(str(error)) from error
    except EngineClosed as error:
        raise EngineShutdown(str(error)) from error
    except RequestCancelled as error:
        raise Cancelled(str(error)) from error
    except RadixKVError as error:
        wrong = isinstance(error.__cause__, InvalidInput)  # a constraint that the engine's thread has found
        raise (InvalidArgument if wrong else Unknown)(str(error.__cause__ if wrong else error)) from error
