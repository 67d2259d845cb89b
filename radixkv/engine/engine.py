"""The engine for requests: prompts in, completions out, from any thread.

`RequestEngine.load` puts a model, a KV pool and a prefix cache together, and starts the thread that owns them. Its
methods check their arguments on the caller's thread, and wait for the engine's. `radixkv.chat.Engine` adds
conversations.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from radixkv.argument_names import explain, refuse_unknown
from radixkv.cache import Explanation, PrefixCache
from radixkv.config import EngineConfig, EngineConfigFields
from radixkv.device import device_of
from radixkv.engine.assembly import build, facts_of
from radixkv.engine.audit import Auditor
from radixkv.engine.compressed import CompressedPrefix, CompressedPrefixes, Conversation
from radixkv.engine.core import Core
from radixkv.engine.engine_thread import CoreClient, EngineThread
from radixkv.engine.forward import Forward
from radixkv.engine.input_processor import EncodedPrompt, InputProcessor, Params, Prompt, check_seconds
from radixkv.engine.namespaces import NamespaceTable
from radixkv.engine.observers import monitoring
from radixkv.engine.observers.trace_writer import TraceWriter, check_path
from radixkv.engine.observers.what_if import WhatIfThread
from radixkv.engine.output import Completion, Handle, Warmed
from radixkv.engine.request import Request
from radixkv.engine.request_facts import NO_ORIGIN, Origin
from radixkv.engine.runs import Run, RunExchange
from radixkv.engine.score_batch import Continuation, Score, ScoreBatch
from radixkv.engine.stats import AuditReport, EngineStats
from radixkv.errors import InvalidInput
from radixkv.models.sampling_backend import sampler_of
from radixkv.models.weights.fixed import FIXED_WEIGHTS, NO_WEIGHTS, State, Weights
from radixkv.sampling.params import SamplingParams
from radixkv.sizing.memory import trim
from radixkv.telemetry.tree_view import ALL, TreeView
from radixkv.telemetry.what_if import WhatIfReport

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel
    from radixkv.models.transport import Transport

_log = logging.getLogger(__name__)


Class = TypeVar("Class")

NOT_COPIED = (
    "an engine cannot be pickled or copied: its thread and its KV pool belong to one process; load another engine, or "
    "send requests to this one, for example by radixkv serve"
)


def explained_methods(cls: type[Class]) -> type[Class]:
    """Decorate a class: errors about wrong arguments of its methods name the right ones, or how to make an object."""
    for name, call in list(vars(cls).items()):
        if inspect.isfunction(call) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _explained(call))
    return cls


def _explained(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(self: object, *args: Any, **given: Any) -> Any:
        try:
            return call(self, *args, **given)
        except TypeError:
            explain(call, self, args, given)
            raise

    @wraps(call)
    async def awaited(self: object, *args: Any, **given: Any) -> Any:
        return await checked(self, *args, **given)

    return awaited if inspect.iscoroutinefunction(call) else checked


@explained_methods
class RequestEngine:
    """Runs many requests at once over one KV pool; every method may be called from any thread.

    A context manager: `close` ends running requests and frees the pool. `config` has its settings. `client` posts calls
    to the engine's thread without waiting, for asyncio, chats and servers.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Forward,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        bytes_per_block: int = 0,
        weights: Weights = FIXED_WEIGHTS,
    ) -> None:
        """Connect parts that exist; `load` makes them. The engine owns runner and cache from now on."""
        self.config = config
        self._model = model
        device = device_of(model.device)
        sampler = sampler_of(model, config.logits_processors)
        core = Core(cache, runner, config, sampler=sampler, depth=int(device.is_gpu))
        auditor = Auditor(core)
        self._outputs: list[TraceWriter | WhatIfThread | monitoring.Monitoring] = []
        if (file := check_path(config.record)) is not None:
            trace = TraceWriter(file, cache.block_size)
            core.observers.append(trace)
            self._outputs.append(trace)
        self._outputs.append(curve := WhatIfThread(config, cache))
        if config.what_if:
            core.end_queues.append(curve.inbox)
        thread = EngineThread(core.step, core.idle_for, lambda: core.busy, core.close, partial(_crashed, self._outputs))
        # A weak reference, as closing frees the cache.
        namespaces = NamespaceTable(partial(_cached_namespaces, weakref.ref(cache)))
        pool_tokens = cache.num_blocks * cache.block_size
        self._pool = f"{cache.num_blocks} blocks of {cache.block_size} tokens"
        decode = _decoder(model) if config.expose_text else None
        facts = facts_of(model, cache, config, bytes_per_block, exposes_text=decode is not None)
        inputs = InputProcessor(
            model, pool_tokens, config.seed, core.admission, namespaces, config.logits_processors,
            prefixes=CompressedPrefixes(core, bytes_per_block, facts.engine),
            speculates=core.speculation is not None, host_sampler=not device.is_gpu,
        )  # fmt: skip
        runs = RunExchange(core, thread.ask, weights)
        self.client = CoreClient(core, auditor, thread, inputs, runs, facts, decode, curve)
        # Runs when neither the engine nor a handle is left, and at interpreter exit.
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self.client, _shut, thread, self._outputs)
        try:
            self.monitoring = monitoring.start(config.monitor, facts, core, thread, decode, device, curve.latest)
        except BaseException:
            self.close()
            raise
        if self.monitoring is not None:
            self._outputs.append(self.monitoring)

    @classmethod
    def load(
        cls,
        model: Any = "tiny",
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        **fields: Unpack[EngineConfigFields],
    ) -> Self:
        """Load a model ("tiny", a folder, a GGUF file, a hub name, or a transformers model) and allocate its KV pool.

        `tokenizer` is for a transformers model and for files without a tokenizer, and replaces the tokenizer of the
        files: a transformers tokenizer, or a folder or hub name that has one. The settings come from `config` (default:
        `EngineConfig()`), replaced by `fields`; `help(EngineConfig)` lists them.
        Raises UnsupportedModel or InvalidInput, OSError where `record` cannot be written.
        """
        from radixkv.models.adapter import place_of
        from radixkv.models.transport import transport_of

        if not isinstance(config, EngineConfig | None):
            kind = type(config).__name__
            raise InvalidInput(f"config must be an EngineConfig, not a {kind}: a tokenizer is passed as tokenizer=")
        known = ("model", "config", "tokenizer", *EngineConfig.__dataclass_fields__)
        refuse_unknown(f"{cls.__name__}.load", known, fields)
        config = replace(config or EngineConfig(), **fields)
        check_path(config.record)  # before the model is loaded, which takes longer
        if config.disk_cache is not None:
            from radixkv.engine.disk_cache import refuse_busy

            refuse_busy(config.disk_cache)
        transport = transport_of(config.tensor_parallel, config.rank_timeout, place_of(config.device))
        try:
            return cls._load_by(transport, model, tokenizer, config)
        except BaseException:
            transport.close()
            raise

    @classmethod
    def _load_by(cls, transport: Transport, model: Any, tokenizer: Any | None, config: EngineConfig) -> Self:
        """Load a model by its transport, and put an engine together."""
        parts = build(transport, model, tokenizer, config)
        loaded, runner, config = parts.model, parts.runner, parts.config
        size = loaded.bytes_per_token * config.block_size
        engine = cls(loaded, runner, parts.cache, config, bytes_per_block=size, weights=parts.weights)
        try:
            if config.disk_cache is not None:
                from radixkv.engine.disk_cache import connect

                connect(engine.client, config, loaded, runner.host)
            engine.core.background.extend(transport.tasks())
        except BaseException:
            engine.close()
            raise
        trim()
        return engine

    # ---- requests

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
        progress: bool = False,
        prefix: CompressedPrefix | None = None,
    ) -> list[Completion]:
        """Complete all prompts, batched, and wait; returns one Completion per prompt, in order.

        With `params.n > 1` the `alternatives` of a completion come from the other streams.
        A prompt is a text, a sequence of token ids, or a list of chat messages; `params` is one for all or one for
        each. All follow a compressed `prefix`, if one is given. `progress` shows a bar. Ctrl-C cancels the requests and
        is raised again. Raises InvalidInput and its subclasses or PrefixGone before anything runs, RequestTimedOut
        after `timeout` seconds, RequestFailed or EngineClosed.
        """
        options: dict[str, Any] = {"namespace": namespace, "timeout": timeout, "prefix": prefix}
        return self._completions(self.client.inputs.batch(prompts, params, **options), progress)

    def _completions(self, requests: list[Request], progress: bool = False) -> list[Completion]:
        """Run requests together, and wait; cancel all if one of them raises."""
        handles = [self.client.handle(request) for request in requests]  # before any begins, so that all are cancelled
        try:
            for request in requests:
                self.client.begin(request)
            return [handle.channel.wait() for handle in (_shown(handles) if progress else handles)]
        except BaseException:  # also Ctrl-C
            for handle in handles:
                handle.cancel()
            raise

    def submit(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        session: int | None = None,
        sample: bool = True,
        origin: Origin = NO_ORIGIN,
        prefix: CompressedPrefix | None = None,
    ) -> Handle:
        """Start one request and return at once; iterate the handle for chunks, or wait for its result.

        Only requests with equal `namespace` share cached prefixes. It is hashed and compared once, on this thread. A
        request with a higher `priority` is admitted before lower ones, and its cached tokens are evicted later. After
        `timeout` seconds, waiting or running, the request ends with RequestTimedOut. `session` is a number that the
        requests of one conversation share, for the monitor, which also shows the names in `origin`.
        Without `sample` only the prompt is computed, and scored if `params.prompt_logprobs` is set; the reply is empty,
        and the prompt may fill the context. The prompt follows a compressed `prefix`, if one is given. Raises
        InvalidInput and its subclasses, PrefixGone or EngineClosed.
        """
        options: dict[str, Any] = {"namespace": namespace, "priority": priority, "timeout": timeout, "session": session}
        options |= {"sample": sample, "origin": origin, "prefix": prefix}
        return self.client.start(self.client.inputs.request(prompt, params, **options))

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> list[Score]:
        """Return the log probability of each continuation after the prompt, in order, and wait for that.

        A continuation is a text or a sequence of token ids. A text after a text is encoded together with it, and cut
        where the prompt's own ids end. If the prompt's ids do not begin the whole, it is encoded alone, without special
        tokens, as after token ids and chat messages. A space between both texts therefore belongs to the continuation.
        All continuations are computed together, and share the KV of the prompt. Ctrl-C cancels them, and an error ends
        all of them. Raises InvalidInput, also for a continuation without tokens, and every error of `generate`.
        """
        batch = ScoreBatch(self.client.inputs, prompt, continuations, namespace=namespace, timeout=timeout)
        return batch.scores(self._completions(batch.requests))

    def warm(
        self,
        prompt: Prompt,
        *,
        pin: bool = False,
        ttl: float | None = None,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> Warmed:
        """Compute a prompt into the cache ahead of its use, wait for that, and pin it if `pin`.

        `ttl` ends the pin after that many seconds. Chat messages are rendered as the beginning of a conversation.
        Raises PinBudgetExceeded, and every error of `generate`.
        """
        request = self.client.warming(prompt, pin, ttl, namespace, timeout)
        handle = self.client.handle(request)
        try:
            self.client.begin(request)
            usage = handle.result().usage
        finally:
            handle.cancel()
        return self.client.warmed(request, usage, ttl).result() if pin else Warmed(usage)

    def compress(
        self,
        prompt: Prompt | Conversation,
        keep: float = 0.75,
        *,
        method: str = "reconstruct",
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> CompressedPrefix:
        """Compute a prompt, keep a share of its KV as a compressed prefix for later requests, and wait for that.

        It changes their answers. It stays pinned until `release_prefix`, new weights, or its namespace is cleared; an
        equal one is returned at once, also after a call that was interrupted at its end. A chat session is compressed
        in its namespace. Raises InvalidInput where nothing can be compressed, OutOfBlocks, PinBudgetExceeded,
        PrefixGone, and every error of `generate`.
        """
        prefixes, ask = self.client.prefixes, self.client.thread.ask
        made, number, deadline = self.client.planned(prompt, keep, method, namespace, timeout)
        if prefixes.find(made.name, number) is None:
            pieces = prefixes.pieces(made, number, deadline)
            self.warm(made.text, namespace=made.namespace, timeout=timeout)
            try:
                while ask(lambda: next(pieces, False)):
                    pass
            finally:
                self.client.thread.post(pieces.close)
        return ask(lambda: prefixes.register(made, number))

    def release_prefix(self, prefix: CompressedPrefix) -> None:
        """Drop a compressed prefix: new requests that name it raise PrefixGone. May be called twice."""
        self.client.release_prefix(prefix).result()

    def probe(
        self, prompt: Prompt, *, namespace: Hashable = None, prefix: CompressedPrefix | None = None
    ) -> Explanation:
        """Return how much of a prompt is cached, and why not more; changes nothing, not even recency."""
        return self.client.probe(prompt, namespace, prefix).result()

    def demote(self, prompt: Prompt, *, keep: int = 0, namespace: Hashable = None) -> None:
        """Mark a cached prompt as no longer needed after its first `keep` tokens.

        Its blocks that no other prompt shares are evicted first; a request for the prompt undoes that.
        """
        self.client.demote(prompt, keep, namespace)

    def export_run(self, tokens: Prompt, namespace: Hashable = None) -> Run:
        """Return the longest cached prefix of a prompt with its KV, for `import_run` of an engine with equal weights.

        Waits; requests go on meanwhile. The first export or import reads all weights. Raises InvalidInput if nothing is
        cached, and for a model with recurrent state; WeightsChanged, EngineClosed.
        """
        inputs = self.client.inputs
        ids, number = inputs.encode(tokens), inputs.namespaces.number(namespace)
        return self.client.runs.export_run(self._model, ids, number)

    def import_run(self, run: Run, namespace: Hashable = None) -> int:
        """Cache the run of another engine, and return how many of its tokens are cached then, as far as there is room.

        Waits as `export_run`. Raises InvalidInput, with nothing changed, for a run that is damaged, or was computed
        with other weights or settings; WeightsChanged, EngineClosed.
        """
        if not isinstance(run, Run):
            raise InvalidInput(f"a run is what export_run returns, or Run.read, got {run!r:.100}")
        inputs = self.client.inputs
        inputs.encode(run.tokens)
        return self.client.runs.import_run(self._model, run, inputs.namespaces.number(namespace))

    def stats(self) -> EngineStats:
        """Return counters and gauges of one moment between two steps."""
        return self.client.thread.ask(self.client.stats)

    def what_if(self) -> WhatIfReport | None:
        """Return the hit rates that LRU pools of other sizes would have; None with `what_if=False`."""
        return self.client.thread.ask(self.client.curve.ask).result()

    def tree(self, namespace: Hashable = ALL) -> TreeView:
        """Return the cached tree of one moment, of one namespace if that is given. O(nodes), between steps.

        Nodes show the beginning of their text if the engine was loaded with `expose_text`.
        """
        return self.client.tree(namespace).result()

    def flight_recording(self, path: str | os.PathLike[str]) -> None:
        """Write the engine's activity of the last ten minutes to a file, for `radixkv-monitor --replay`.

        Raises InvalidInput for an engine without a monitor, OSError.
        """
        if self.monitoring is None:
            raise InvalidInput("this engine records nothing: it was loaded with monitor=False, or could not be watched")
        self.monitoring.flight(path)

    def audit(self, blocks: int = 64) -> AuditReport:
        """Recompute at least `blocks` cached blocks, chosen at random, compare, and drop those that differ.

        Waits for the report. Requests go on meanwhile, more slowly: about 128 tokens are recomputed between two steps
        (with `deterministic` a whole chunk). Requests that read a differing block, or may have, fail with
        RequestFailed. The cache's recency and hits stay as they are. With `host_memory`, runs on the host are loaded
        for that time, which may evict others; a run that cannot be loaded is dropped. Raises InvalidInput where there
        is nothing to audit, EngineError if the model raises, EngineClosed.
        """
        report = self.client.audit(blocks)
        try:
            return report.result()
        except BaseException:
            report.cancel()  # no effect, unless Ctrl-C came first
            raise

    def clear_cache(self) -> None:
        """Drop every cached prefix that no request and no pin holds, and return when none is left on a disk.

        Raises EngineError if the disk cannot delete its records.
        """
        self.client.clear_cache().result().result()

    def reload_weights(self, state: State | None = None) -> None:
        """Use the model's present weights from now on, or the weights of `state`, which has the names of its
        state_dict.

        Call it after each update of the model that was loaded: nothing detects one, and answers before the call mix two
        models. `state` is written into that model; packed and quantised layers are computed again. Then the self-test
        runs, and all cached KV is dropped, pins included. Requests that have begun end with WeightsChanged; waiting
        ones run with the new weights. Raises InvalidInput, with nothing changed, for a state that does not fit. Raises
        InvalidInput or UnsupportedModel for weights that fail the self-test; the engine then ends requests with
        WeightsChanged until a reload succeeds. Costs a copy of the weights and five forwards of 50 tokens.
        """
        self.client.reload_weights(state).result()

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """End running requests with EngineClosed, stop, and free pool and model; `model` has no weights afterwards. A
        model that the caller holds stays. May be called twice.

        With `drain` no new request is taken, and present ones finish first, for at most `timeout` seconds and however
        slowly they are read; an audit ends. Ctrl-C ends the draining at once, and is raised again. In any case the
        current step is waited for.
        """
        check_seconds("timeout", timeout)
        if timeout is not None and not drain:
            raise InvalidInput("timeout is how long draining may take: pass drain=True with it")
        try:
            self.client.thread.close(drain, timeout, self.client.core.disable_backpressure)
        finally:
            self._finalizer.detach()
            for each in self._outputs:
                each.close()
            self._model, self.client.runs.weights = self._model.without_weights(), NO_WEIGHTS
            trim()

    def __enter__(self) -> Self:
        """Use the engine in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine at once."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied. Raises TypeError."""
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        """Name the model and the pool, without a call on the engine's thread."""
        state = ", closed" if self.client.thread.closed else ""
        return f"<{type(self).__name__} {self._model.name} on {self._model.device}: {self._pool}{state}>"

    # ---- facts

    @property
    def model(self) -> LoadedModel:
        """The model, its tokenizer and its limits; read only."""
        return self._model

    @property
    def core(self) -> Core:
        """Cache, runner and scheduler, for tests and experiments. They belong to the engine's thread.

        Read or change them only while the engine is idle, or in `engine.client.thread.ask(call)`.
        """
        return self.client.core

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that has none: defaults, and the suggestions of generation_config.json."""
        return self.client.inputs.default_params

    @property
    def context_limit(self) -> int:
        """The most tokens of prompt and reply together: the limit of the model, or the size of the pool."""
        return self.client.inputs.context_limit


def _shut(thread: EngineThread, outputs: list[TraceWriter | WhatIfThread | monitoring.Monitoring]) -> None:
    thread.close()
    for each in outputs:
        each.close()


def _crashed(outputs: list[TraceWriter | WhatIfThread | monitoring.Monitoring], error: BaseException) -> None:
    for each in outputs:
        each.crashed(error)


def _cached_namespaces(cache: weakref.ref[PrefixCache]) -> list[Hashable]:
    """Return the namespaces with cached prefixes; any thread may call this."""
    held = cache()
    return [] if held is None else [each.value for each in {*list(held.state.tree.roots), *held.past_text.namespaces()}]


def _decoder(model: LoadedModel) -> Callable[[list[int]], str] | None:
    """Return a function from token ids to text; None for a model without a tokenizer."""
    tokenizer = model.codec
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))


def _shown(handles: list[Handle]) -> Any:
    from rich.progress import track

    return track(handles, description="generate")
