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
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from radixkv.cache import Explanation, PrefixCache
from radixkv.engine.core import Core, Forward
from radixkv.engine.engine_thread import EngineThread
from radixkv.engine.input_processor import (
    InputProcessor,
    Params,
    Prompt,
    check_flag,
    check_namespace,
    check_seconds,
    check_sizes,
)
from radixkv.engine.kv_scrub import check_blocks, piece_tokens, scrub_rate
from radixkv.engine.limits import Limits
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
        limits: Limits | None = None,
        *,
        bytes_per_block: int = 0,
        prefix_cache: bool = True,
        scrub: float | None = None,
        seed: int = 0,
        monitor: bool | str = False,
        expose_text: bool = False,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        """Put ready parts together; `load` makes them. The engine owns runner and cache from now on."""
        file = check_path(record)
        self._model = model
        self._core = core = Core(cache, runner, limits or Limits(), reuse=prefix_cache, scrub=scrub)
        core.recording = recording = None if file is None else TraceWriter(file, cache.block_size)
        self._engine_thread = EngineThread(
            core.step,
            core.idle_for,
            lambda: core.busy,
            core.close,
        )
        self._bytes_per_block = bytes_per_block
        self._input_processor = InputProcessor(model, cache.num_blocks * cache.block_size, seed)
        self._loaded_at = time.perf_counter()
        self._session_numbers = itertools.count(1)
        self._decode = _decoder(model) if expose_text else None
        self._monitoring: monitoring.Monitoring | None = None
        self._told: list[TraceWriter | monitoring.Monitoring] = [] if recording is None else [recording]
        # Also at interpreter exit, so that the thread does not outlive what it uses.
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _shut, self._engine_thread, self._told)
        if monitor:
            self._watch(monitor, core)

    @classmethod
    def load(
        cls,
        model: Any = "tiny",
        *,
        kv_memory: str | int = "auto",
        num_blocks: int | None = None,
        block_size: int = 16,
        eviction: str = "lru",
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        attention: str = "auto",
        compile: bool | str = "auto",
        max_sequences: int = 64,
        max_batch_tokens: int = 2048,
        prefill_chunk: int = 512,
        order: str = "fcfs",
        max_overtakes: int = 32,
        victim: str = "cheapest",
        prefix_cache: bool = True,
        deterministic: bool = False,
        scrub: bool | float = False,
        monitor: bool | str = True,
        expose_text: bool = False,
        record: str | os.PathLike[str] | None = None,
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a model ("tiny", a local folder, a hub name, or a transformers model) and give it a KV pool.

        `kv_memory` is "auto" (on a CPU a quarter of the free memory, at most 4 GiB; on a GPU what is left at 90% of the
        card), bytes, or a size such as "512MB"; `num_blocks` overrides it. `eviction` is one of lru, fifo, lfu, slru
        and predictive, which learns what is wanted again. A step runs at most `max_batch_tokens` tokens of at most
        `max_sequences` sequences, and at most `prefill_chunk` of one prompt. `order` says who comes in first: "fcfs",
        or "longest-prefix", whose cached prefix is longest, until `max_overtakes` have passed somebody. `victim` says
        who gives way when blocks run out, to come back later: who is "cheapest" to bring back, or who came in "last".
        `attention` is "torch", "triton", or "auto": Triton on CUDA where it serves the model, torch elsewhere, and the
        model's own, sequence by sequence, where it is right over neither (the "fallback", see docs/architectures.md).
        `compile` fuses the model around its attention while it is loaded, which takes a minute: True, False, or "auto",
        on CUDA unless `deterministic`.
        `prefix_cache=False` computes every prompt in full and shares nothing, for comparisons.
        `deterministic` answers requests that run one at a time with the same bits whether they hit or not; hits then
        end on multiples of `prefill_chunk`, which must be whole blocks (see docs/determinism.md). `scrub` computes
        cached blocks again while the engine is idle, and drops what differs: True, or how many a second.
        `monitor` lets radixkv-monitor of the same user see what the engine does, never what is said; an address
        ("tcp://127.0.0.1:7777") also lets in who has the token, `expose_text` shows how nodes begin, False or
        RADIXKV_MONITOR=0 in the environment switches it off (see docs/telemetry.md). `record` names a new file for a
        trace of all requests, without their text, to be replayed (see docs/engine.md).
        `seed` is the root of the seeds of requests that bring none.
        Raises UnsupportedModel or InvalidInput, OSError where `record` cannot be written.
        """
        from radixkv.models.adapter import load
        from radixkv.models.cuda_graphs import record_decodes
        from radixkv.models.fusion import fuse, wanted
        from radixkv.models.runner import Runner

        limits = Limits(
            max_sequences,
            max_batch_tokens,
            prefill_chunk,
            order,
            max_overtakes,
            victim,
            check_flag("deterministic", deterministic),
        )
        rate = scrub_rate(scrub)
        watched = monitoring.wanted(monitor)
        check_flag("expose_text", expose_text)
        check_path(record)  # before the model is loaded, which takes longer
        check_sizes(num_blocks, block_size, seed)
        if deterministic and prefill_chunk % block_size:
            raise InvalidInput(  # branches would part inside blocks, where an audit trusts what it should compare
                f"deterministic=True needs a prefill_chunk ({prefill_chunk}) of whole blocks of {block_size} tokens"
            )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        fused = wanted(compile, str(device), deterministic=deterministic)
        loaded = load(
            model,
            device=device,
            dtype=dtype,
            attention=attention,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        bytes_per_block = _bytes_per_block(loaded, block_size)
        if num_blocks is None:
            num_blocks = blocks_for(kv_memory, bytes_per_block, device)
        check_free(num_blocks * bytes_per_block, loaded.device.type)
        cache = PrefixCache(num_blocks, block_size, eviction)
        again = prefill_chunk if deterministic else piece_tokens(block_size)
        runner = Runner(loaded, num_blocks, block_size, deterministic=deterministic, recheck_tokens=again)
        if fused:
            fuse(runner)
        record_decodes(runner, max_sequences)
        return cls(
            loaded,
            runner,
            cache,
            limits,
            bytes_per_block=bytes_per_block,
            prefix_cache=prefix_cache,
            scrub=rate,
            seed=seed,
            monitor=watched,
            expose_text=expose_text,
            record=record,
        )

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
        model, cache, limits = self._model, core.cache, core.scheduler.limits
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
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            prefill_chunk=limits.prefill_chunk,
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
