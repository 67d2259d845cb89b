"""The engine for requests: prompts in, completions out, from any thread.

Knows: how a model, a pool and a cache are put together, and how callers reach the thread that owns them. Knows no
conversation: `radixkv.chat.Engine` adds those.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch

from radixkv.cache import Explanation, PrefixCache
from radixkv.config import EngineConfig, EngineConfigFields
from radixkv.engine.core import Core, Forward
from radixkv.engine.engine_thread import EngineThread
from radixkv.engine.input_processor import (
    InputProcessor,
    Params,
    Prompt,
    check_namespace,
    check_seconds,
)
from radixkv.engine.kv_scrub import check_blocks, piece_tokens
from radixkv.engine.observers import monitoring
from radixkv.engine.observers.recorder import RequestRecorder
from radixkv.engine.observers.trace_writer import TraceWriter, check_path
from radixkv.engine.output import Completion, Handle, Usage
from radixkv.engine.prefill_result import Warmed
from radixkv.engine.request import Request
from radixkv.engine.sizing import blocks_for, check_free
from radixkv.engine.stats import AuditReport, EngineStats
from radixkv.errors import EngineClosed, InvalidInput
from radixkv.sampling.params import SamplingParams, is_int
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.tree_view import ALL, TreeView, tree_view

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel


class RequestEngine:
    """Runs many requests at once over one shared pool of KV; every method may be called from any thread.

    A context manager: `close` ends what still runs and frees the pool.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Forward,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        bytes_per_block: int = 0,
    ) -> None:
        """Put ready parts together; `load` makes them. The engine owns runner and cache from now on."""
        file = check_path(config.record)
        self.config = config
        self._model = model
        self._core = core = Core(cache, runner, config)
        core.recording = recording = None if file is None else TraceWriter(file, cache.block_size)
        self._engine_thread = EngineThread(
            core.step,
            core.idle_for,
            lambda: core.busy,
            core.close,
        )
        self._bytes_per_block = bytes_per_block
        self._input_processor = InputProcessor(model, cache.num_blocks * cache.block_size, config.seed)
        self._loaded_at = time.perf_counter()
        self._session_numbers = itertools.count(1)
        self._decode = _decoder(model) if config.expose_text else None
        self._monitoring: monitoring.Monitoring | None = None
        self._told: list[TraceWriter | monitoring.Monitoring] = [] if recording is None else [recording]
        # Also at interpreter exit, so that the thread does not outlive what it uses.
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _shut, self._engine_thread, self._told)
        if monitor := monitoring.wanted(config.monitor):
            self._watch(monitor, core)

    @classmethod
    def load(
        cls, model: Any = "tiny", config: EngineConfig | None = None, **fields: Unpack[EngineConfigFields]
    ) -> Self:
        """Load a model ("tiny", a local folder, a hub name, or a transformers model) and allocate its KV pool.

        The settings are those of `config` (default: `EngineConfig()`), replaced by `fields`; docs/engine.md lists them.
        Raises UnsupportedModel or InvalidInput, OSError where `record` cannot be written.
        """
        from radixkv.models.adapter import load
        from radixkv.models.cuda_graphs import record_decodes
        from radixkv.models.fusion import fuse, wanted
        from radixkv.models.runner import Runner

        config = replace(config or EngineConfig(), **fields)
        check_path(config.record)  # before the model is loaded, which takes longer
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        fused = wanted(config.compile, str(device), deterministic=config.deterministic)
        loaded = load(
            model,
            device=device,
            dtype=config.dtype,
            attention=config.attention,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        block_size, num_blocks = config.block_size, config.num_blocks
        bytes_per_block = _bytes_per_block(loaded, block_size)
        if num_blocks is None:
            num_blocks = blocks_for(config.kv_memory, bytes_per_block, device)
        check_free(num_blocks * bytes_per_block, loaded.device.type)
        cache = PrefixCache(num_blocks, block_size, config.eviction)
        again = config.prefill_chunk if config.deterministic else piece_tokens(block_size)
        runner = Runner(loaded, num_blocks, block_size, deterministic=config.deterministic, recheck_tokens=again)
        if fused:
            fuse(runner)
        record_decodes(runner, config.max_sequences)
        return cls(loaded, runner, cache, config, bytes_per_block=bytes_per_block)

    # ---- requests

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts, batched, and wait; one Completion a prompt, in their order.

        With `params.n > 1` a completion's `alternatives` are the other streams'.
        A prompt is a text, a sequence of token ids, or a list of chat messages; `params` is one for all or one for
        each. `progress` shows a bar. Ctrl-C cancels what still runs and passes on. Raises InvalidInput and its kinds
        before anything runs, RequestTimedOut after `timeout` seconds, RequestFailed or EngineClosed.
        """
        requests = self._batch(prompts, params, namespace, timeout)
        handles = [self._handle(request) for request in requests]  # before any begins, so that none can be lost
        try:
            for request in requests:
                self._begin(request)
            return [handle.result() for handle in _shown(handles, progress)]
        finally:
            for handle in handles:
                handle.cancel()  # nothing to do unless one of them raised, or Ctrl-C did

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        session: int | None = None,
    ) -> Handle:
        """Start one request and return at once; iterate the handle for chunks, or wait for its result.

        Only requests with equal `namespace` share cached prefixes. A higher `priority` goes before lower ones, and
        what it leaves in the cache is evicted later. After `timeout` seconds, spent waiting or running, the request
        ends with RequestTimedOut. `session` is a number that the requests of one conversation share, for the monitor.
        Raises InvalidInput and its kinds, or EngineClosed.
        """
        options = {"namespace": namespace, "priority": priority, "timeout": timeout, "session": session}
        return self._start(self._request(prompt, params, **options))

    def warm(
        self,
        prompt: Prompt,
        *,
        pin: bool = False,
        ttl: float | None = None,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> Warmed:
        """Compute a prompt into the cache ahead of its use, wait for it, and pin it there if `pin`.

        `ttl` ends the pin after that many seconds. Chat messages are rendered as the beginning of a conversation.
        Raises PinBudgetExceeded, or what `generate` raises.
        """
        request = self._warming(prompt, pin, ttl, namespace, timeout)
        handle = self._handle(request)
        try:
            self._begin(request)
            usage = handle.result().usage
        finally:
            handle.cancel()
        if not pin:
            return Warmed(usage, None, self._engine_thread)
        return self._engine_thread.ask(lambda: self._pinned(request, usage, ttl))

    def probe(self, prompt: Prompt, *, namespace: Hashable = None) -> Explanation:
        """How much of a prompt is cached now, and why not more; changes nothing, not even recency."""
        return self._engine_thread.ask(self._probing(prompt, namespace))

    def demote(self, prompt: Prompt, *, keep: int = 0, namespace: Hashable = None) -> None:
        """Say that a cached prompt will not be asked for again behind its first `keep` tokens.

        What is cached there and shared with nothing else is the first to be evicted; asking for it again undoes that.
        """
        ids = self._input_processor.encode(prompt)
        check_namespace(namespace)
        if not is_int(keep) or keep < 0:
            raise InvalidInput(f"keep is how many tokens to leave alone, an int >= 0; got {keep!r}")
        self._engine_thread.post(lambda: self._core.demote(ids, keep, namespace))

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment, between two steps."""
        return self._engine_thread.ask(self._stats)

    def tree(self, namespace: Hashable = ALL) -> TreeView:
        """What is cached, as a frozen tree of this moment; of one namespace, if that is given. O(nodes), between steps.

        A node says how it begins if the engine was loaded with `expose_text`.
        """
        return self._engine_thread.ask(self._viewing(namespace))

    def flight_recording(self, path: str | os.PathLike[str]) -> None:
        """Write what the engine did in the last ten minutes to a file, for `radixkv-monitor --replay`.

        Raises InvalidInput for an engine without a monitor, OSError.
        """
        if self._monitoring is None:
            raise InvalidInput("this engine records nothing: it was loaded with monitor=False, or could not be watched")
        self._monitoring.flight(path)

    def audit(self, blocks: int = 64) -> AuditReport:
        """Compute at least `blocks` cached blocks again, chosen at random, and compare; drop what differs.

        Waits for that, and requests go on meanwhile, more slowly: between two steps some 128 tokens are computed again
        (with `deterministic` a whole chunk). Requests that read what differs, or may have, fail with RequestFailed. The
        cache's recency and counters stay as they are. Raises InvalidInput
        where there is nothing to audit, EngineError if the model raises, EngineClosed.
        """
        report = self._auditing(blocks)
        try:
            return report.result()
        except BaseException:
            report.cancel()  # nothing to do, unless Ctrl-C came first
            raise

    def clear_cache(self) -> None:
        """Drop every cached prefix that nobody holds."""
        self._engine_thread.ask(lambda: self._core.cache.clear())

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """End what still runs with EngineClosed, stop, and free the pool; the model stays. May be called twice.

        With `drain` nothing new is taken, and what waits and runs finishes first, for at most `timeout` seconds and
        however slowly it is read; an audit ends. Ctrl-C ends the draining at once, and passes on. Either way the step
        that is under way is waited for.
        """
        check_seconds("timeout", timeout)
        if timeout is not None and not drain:
            raise InvalidInput("timeout is how long draining may take: pass drain=True with it")
        try:
            self._engine_thread.close(drain, timeout, self._core.disable_backpressure)
        finally:
            self._finalizer.detach()
            for each in self._told:
                each.close()

    def __enter__(self) -> Self:
        """Use the engine in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine at once."""
        self.close()

    # ---- facts

    @property
    def model(self) -> LoadedModel:
        """The model, its tokenizer and its limits; not to be changed."""
        return self._model

    @property
    def default_params(self) -> SamplingParams:
        """What a request without params uses: the defaults, with what the model's generation_config.json suggests."""
        return self._input_processor.default_params

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and reply may have together: what the model allows, or what the pool holds."""
        return self._input_processor.context_limit

    # ---- inside; what waits for nobody is shared with AsyncRequestEngine

    def _request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        request = self._input_processor.request(prompt, params, **options)
        self._core.scheduler.check_fits(request)
        return request

    def _batch(
        self, prompts: str | Sequence[Prompt], params: Params, namespace: Hashable, timeout: float | None
    ) -> list[Request]:
        requests = self._input_processor.batch(prompts, params, namespace, timeout)
        for request in requests:
            self._core.scheduler.check_fits(request)
        return requests

    def _warming(
        self, prompt: Prompt, pin: bool, ttl: float | None, namespace: Hashable, timeout: float | None
    ) -> Request:
        if ttl is not None and not pin:
            raise InvalidInput("ttl is how long a pin lasts: pass pin=True with it")
        return self._request(self._input_processor.encode(prompt), namespace=namespace, timeout=timeout, sample=False)

    def _pinned(self, request: Request, usage: Usage, ttl: float | None) -> Warmed:
        """Pin a prompt that was computed; on the engine's thread."""
        return Warmed(usage, self._core.scheduler.pin(request.prompt, request.namespace, ttl), self._engine_thread)

    def _probing(self, prompt: Prompt, namespace: Hashable) -> Callable[[], Explanation]:
        """What is to be asked of the engine's thread to probe a prompt."""
        ids = self._input_processor.encode(prompt)
        check_namespace(namespace)
        return lambda: self._core.cache.explain(ids, namespace)

    def _viewing(self, namespace: Hashable) -> Callable[[], TreeView]:
        """What is to be asked of the engine's thread for a view of the tree."""
        check_namespace(namespace)
        return lambda: tree_view(self._core.cache, namespace, decode=self._decode)

    def _new_session(self) -> int:
        """A number for a conversation."""
        return next(self._session_numbers)

    def _session_closed(self, number: int) -> None:
        """A conversation is over; the monitor is to know."""
        telemetry = self._core.telemetry
        if telemetry is None:
            return
        try:
            self._engine_thread.post(lambda: telemetry.session_closed(number))
        except EngineClosed:
            return  # nobody watches any more

    def _handle(self, request: Request) -> Handle:
        return Handle(request.channel, lambda: self._cancel(request))

    def _begin(self, request: Request) -> None:
        request.channel.on_drained = self._engine_thread.wake
        self._engine_thread.post(lambda: self._core.add(request), begins=True)

    def _start(self, request: Request) -> Handle:
        self._begin(request)
        return self._handle(request)

    def _cancel(self, request: Request) -> None:
        try:
            self._engine_thread.post(lambda: self._core.cancel(request))
        except EngineClosed:
            return  # closing ended it

    def _auditing(self, blocks: int) -> Future[AuditReport]:
        """An audit that has begun."""
        check_blocks(blocks)
        report: Future[AuditReport] = Future()
        self._engine_thread.post(lambda: self._core.auditor.begin(blocks, report), begins=True)
        return report

    def _stats(self) -> EngineStats:
        core, model = self._core, self._model
        return EngineStats(
            model=model.name,
            device=str(model.device),
            dtype=_dtype(model),
            attention=model.attention,
            max_length=model.max_length,
            kv_bytes=self._bytes_per_block * core.cache.num_blocks,
            uptime_s=time.perf_counter() - self._loaded_at,
            waiting=len(core.scheduler.waiting),
            running=len(core.scheduler.running),
            cache=core.cache.stats(),
            **asdict(core.counters),
        )

    def _watch(self, monitor: bool | str, core: Core) -> None:
        """Have everything recorded from now on, and published."""
        model, cache, config = self._model, core.cache, self.config
        facts = monitoring.engine_facts(
            model=model.name,
            device=str(model.device),
            dtype=_dtype(model),
            attention=model.attention,
            eviction=cache.eviction,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            bytes_per_block=self._bytes_per_block,
            max_length=model.max_length,
            max_sequences=config.max_sequences,
            max_batch_tokens=config.max_batch_tokens,
            prefill_chunk=config.prefill_chunk,
            exposes_text=self._decode is not None,
        )
        recorder = Recorder(decode=self._decode)
        recorder.attach(cache)
        constants = {"max_length": model.max_length, "kv_bytes": self._bytes_per_block * cache.num_blocks}
        telemetry = RequestRecorder(core, recorder, constants)
        try:
            self._monitoring = monitoring.begin(monitor, facts, self._engine_thread, telemetry)
        except BaseException:
            self.close()
            raise
        if self._monitoring is not None:
            self._told.append(self._monitoring)


def _shut(engine_thread: EngineThread, told: list[TraceWriter | monitoring.Monitoring]) -> None:
    engine_thread.close()
    for each in told:
        each.close()


def _decoder(model: LoadedModel) -> Callable[[list[int]], str] | None:
    """How to tell what token ids say; None for a model without a tokenizer."""
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))


def _dtype(model: LoadedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _shown(handles: list[Handle], progress: bool) -> Sequence[Handle] | Any:
    if not progress:
        return handles
    from rich.progress import track

    return track(handles, description="generate")


def _bytes_per_block(model: LoadedModel, block_size: int) -> int:
    per_token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in model.layers)
    return per_token * block_size * model.dtype.itemsize
