"""The engine for requests: prompts in, completions out, from any thread.

Knows: how a model, a pool and a cache are put together, and how callers reach the thread that owns them. Knows no
conversation: `radixkv.chat.Engine` adds those.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from radixkv.cache import Explanation, PrefixCache
from radixkv.engine import prompts as forms
from radixkv.engine.core import Core, Forward
from radixkv.engine.handle import Handle
from radixkv.engine.outputs import Completion
from radixkv.engine.prompts import Prompt, TokenIds
from radixkv.engine.request import Request, derive_seed
from radixkv.engine.scheduler import Limits
from radixkv.engine.sizing import blocks_for, check_free
from radixkv.engine.stats import EngineStats
from radixkv.engine.warmed import Warmed
from radixkv.engine.worker import Worker
from radixkv.errors import EngineClosed, InvalidInput, PromptTooLong
from radixkv.models.sampling_params import SamplingParams, checked_params, is_int

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel

ATTENTION = "torch"  # the backend that computes attention
Params = SamplingParams | Sequence[SamplingParams] | None


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
        seed: int = 0,
    ) -> None:
        """Put ready parts together; `load` makes them. The engine owns runner and cache from now on."""
        self._model = model
        self._core = core = Core(cache, runner, limits or Limits(), reuse=prefix_cache)
        self._worker = Worker(
            core.step,
            lambda: core.busy,
            lambda: core.close(EngineClosed("the engine was closed while the request ran")),
        )
        self._bytes_per_block = bytes_per_block
        self._pool_tokens = cache.num_blocks * cache.block_size
        self._loaded_at = time.perf_counter()
        self._seed = seed
        self._numbers = itertools.count(1)
        # Also at interpreter exit, so that the thread does not outlive what it uses.
        self._finalizer = weakref.finalize(self, self._worker.close)

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
        max_sequences: int = 64,
        max_batch_tokens: int = 2048,
        prefill_chunk: int = 512,
        prefix_cache: bool = True,
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a model ("tiny", a local folder, a hub name, or a transformers model) and give it a KV pool.

        `kv_memory` is "auto" (on a CPU a quarter of the free memory, at most 4 GiB; on a GPU what is left at 90% of the
        card), bytes, or a size such as "512MB"; `num_blocks` overrides it. `eviction` is one of lru, fifo, lfu, slru.
        A step runs at most `max_batch_tokens` tokens of at most `max_sequences` sequences, and at most `prefill_chunk`
        of one prompt. `attention` is "auto" or "torch", which is all there is yet. `prefix_cache=False` computes every
        prompt in full and shares nothing, for comparisons.
        `seed` is the root of the seeds of requests that bring none.
        Raises UnsupportedModel or InvalidInput.
        """
        from radixkv.models.adapter import load
        from radixkv.models.runner import Runner

        limits = Limits(max_sequences, max_batch_tokens, prefill_chunk)
        _check_sizes(num_blocks, block_size, seed)
        if attention not in ("auto", ATTENTION):
            raise InvalidInput(f"attention={attention!r}: allowed are 'auto' and {ATTENTION!r}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        bytes_per_block = _bytes_per_block(loaded, block_size)
        if num_blocks is None:
            num_blocks = blocks_for(kv_memory, bytes_per_block, device)
        check_free(num_blocks * bytes_per_block, loaded.device.type)
        cache = PrefixCache(num_blocks, block_size, eviction)
        runner = Runner(loaded, num_blocks, block_size)
        return cls(loaded, runner, cache, limits, bytes_per_block=bytes_per_block, prefix_cache=prefix_cache, seed=seed)

    # ---- requests

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts, batched, and wait; one Completion a prompt, in their order.

        With `params.n > 1` a completion's `alternatives` are the other streams'.
        A prompt is a text, a sequence of token ids, or a list of chat messages; `params` is one for all or one for
        each. `progress` shows a bar. Ctrl-C cancels what still runs and passes on. Raises InvalidInput and its kinds
        before anything runs, RequestFailed or EngineClosed.
        """
        batch = forms.check_batch(prompts)
        requests = [
            self._request(prompt, each, namespace, 0)
            for prompt, each in zip(batch, _per_prompt(params, len(batch)), strict=True)
        ]
        handles = [self._start(request) for request in requests]
        try:
            return [handle.result() for handle in _shown(handles, progress)]
        finally:
            for handle in handles:
                handle.cancel()  # nothing to do unless one of them raised, or Ctrl-C did

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: Hashable = None, priority: int = 0
    ) -> Handle:
        """Start one request and return at once; iterate the handle for chunks, or wait for its result.

        Only requests with equal `namespace` share cached prefixes. What a higher `priority` leaves in the cache is
        evicted later. Raises InvalidInput and its kinds, or EngineClosed.
        """
        return self._start(self._request(prompt, params, namespace, priority))

    def warm(
        self, prompt: Prompt, *, pin: bool = False, ttl: float | None = None, namespace: Hashable = None
    ) -> Warmed:
        """Compute a prompt into the cache ahead of its use, wait for it, and pin it there if `pin`.

        `ttl` ends the pin after that many seconds. Chat messages are rendered as the beginning of a conversation.
        Raises PinBudgetExceeded, or what `submit` raises.
        """
        if ttl is not None and not pin:
            raise InvalidInput("ttl is how long a pin lasts: pass pin=True with it")
        ids = self._encode(prompt, reply=False)
        request = self._request(ids, None, namespace, 0, sample=False)
        usage = self._start(request).result().usage
        held = self._worker.ask(lambda: self._core.scheduler.pin(ids, namespace, ttl)) if pin else None
        return Warmed(usage, held, self._worker)

    def probe(self, prompt: Prompt, *, namespace: Hashable = None) -> Explanation:
        """How much of a prompt is cached now, and why not more; changes nothing, not even recency."""
        ids = self._encode(prompt, reply=False)
        _check_namespace(namespace)
        return self._worker.ask(lambda: self._core.cache.explain(ids, namespace))

    def demote(self, prompt: Prompt, *, keep: int = 0, namespace: Hashable = None) -> None:
        """Say that a cached prompt will not be asked for again behind its first `keep` tokens.

        What is cached there and shared with nothing else is the first to be evicted; asking for it again undoes that.
        """
        ids = self._encode(prompt, reply=False)
        _check_namespace(namespace)
        if not is_int(keep) or keep < 0:
            raise InvalidInput(f"keep is how many tokens to leave alone, an int >= 0; got {keep!r}")
        self._worker.post(lambda: self._core.demote(ids, keep, namespace))

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment, between two steps."""
        return self._worker.ask(self._stats)

    def clear_cache(self) -> None:
        """Drop every cached prefix that nobody holds."""
        self._worker.ask(lambda: self._core.cache.clear())

    def close(self) -> None:
        """End what still runs with EngineClosed, stop, and free the pool; the model stays. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        """Use the engine in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    # ---- facts

    @property
    def model(self) -> LoadedModel:
        """The model, its tokenizer and its limits; not to be changed."""
        return self._model

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and reply may have together: what the model allows, or what the pool holds."""
        return min(self._model.max_length, self._pool_tokens)

    # ---- inside

    def _encode(self, prompt: Prompt, *, reply: bool) -> TokenIds:
        return forms.encode(prompt, self._model.tokenizer, self._model.vocab_size, reply=reply)

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, namespace: Hashable, priority: int, *, sample: bool = True
    ) -> Request:
        ids = self._encode(prompt, reply=True)
        params = checked_params(params)
        self._check(params)
        _check_namespace(namespace)
        if not is_int(priority):
            raise InvalidInput(f"priority must be an int, got {priority!r}")
        request = Request(
            prompt=ids,
            params=params,
            max_tokens=min(params.max_tokens, self._room_behind(ids)) if sample else 0,
            stop_ids=_stop_ids(params, self._model.stop_token_ids),
            seed=derive_seed(self._seed, next(self._numbers)) if params.seed is None else params.seed,
            tokenizer=self._model.tokenizer,
            namespace=namespace,
            priority=priority,
        )
        self._core.scheduler.check_fits(request)
        return request

    def _check(self, params: SamplingParams) -> None:
        """What only the engine can tell about sampling parameters: whether they fit the model."""
        if params.stop and self._model.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if max(ids, default=0) >= self._model.vocab_size:
                raise InvalidInput(
                    f"{name} names token {max(ids)}, this model's vocabulary is 0..{self._model.vocab_size - 1}"
                )
        if params.min_tokens and len(_stop_ids(params, self._model.stop_token_ids)) >= self._model.vocab_size:
            raise InvalidInput("every token is a stop token, so that min_tokens leaves nothing to draw")

    def _room_behind(self, ids: TokenIds) -> int:
        room = self.context_limit - len(ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and leaves no room for a reply: the model takes "
                f"{self._model.max_length} tokens, the pool holds {self._pool_tokens}"
            )
        return room

    def _start(self, request: Request) -> Handle:
        self._worker.post(lambda: self._core.add(request))
        return Handle(request.outlet, lambda: self._cancel(request))

    def _cancel(self, request: Request) -> None:
        try:
            self._worker.post(lambda: self._core.cancel(request))
        except EngineClosed:
            return  # closing ended it

    def _stats(self) -> EngineStats:
        core, model = self._core, self._model
        return EngineStats(
            model=model.name,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            attention=ATTENTION,
            max_length=model.max_length,
            kv_bytes=self._bytes_per_block * core.cache.num_blocks,
            uptime_s=time.perf_counter() - self._loaded_at,
            waiting=len(core.scheduler.waiting),
            running=len(core.scheduler.running),
            cache=core.cache.stats(),
            **asdict(core.counters),
        )


def _check_sizes(num_blocks: object, block_size: object, seed: object) -> None:
    for name, value in (("num_blocks", 1 if num_blocks is None else num_blocks), ("block_size", block_size)):
        if not is_int(value) or value < 1:
            raise InvalidInput(f"{name} must be an int, at least 1, got {value!r}")
    if not is_int(seed):
        raise InvalidInput(f"seed must be an int, got {seed!r}")


def _check_namespace(namespace: object) -> None:
    try:
        hash(namespace)
    except Exception as error:  # a tuple may hold what is not hashable, and a class of the caller's may raise anything
        raise InvalidInput(
            f"a namespace must be hashable (a string, say), and {type(namespace).__name__} is not: {error}"
        ) from error


def _stop_ids(params: SamplingParams, of_model: frozenset[int]) -> frozenset[int]:
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | of_model


def _per_prompt(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        return [checked_params(params)] * count
    if len(params) != count:
        raise InvalidInput(f"{len(params)} sampling params for {count} prompts: pass one for all, or one for each")
    return list(params)


def _shown(handles: list[Handle], progress: bool) -> Sequence[Handle] | Any:
    if not progress:
        return handles
    from rich.progress import track

    return track(handles, description="generate")


def _bytes_per_block(model: LoadedModel, block_size: int) -> int:
    per_token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in model.layers)
    return per_token * block_size * model.dtype.itemsize
