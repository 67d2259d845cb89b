"""Make the parts of an engine that follow from its model and its settings: the pool's size, the cache, the facts."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from radixkv.cache import PrefixCache
from radixkv.cache.recurrent import Spacing
from radixkv.config import EngineConfig
from radixkv.disk import SCRATCH
from radixkv.engine.audit import piece_tokens
from radixkv.engine.speculation import speculating
from radixkv.sizing.kv_size import DRAFT_TOKENS, size_text
from radixkv.sizing.memory import PoolSize, pool_size
from radixkv.telemetry.records import EngineFacts
from radixkv.version import __version__

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel
    from radixkv.models.transport import Transport
    from radixkv.models.weights.fixed import Weights

_log = logging.getLogger(__name__)


class Built(NamedTuple):
    """A loaded model, its runner and its weights, the cache, and the settings that fit them."""

    model: LoadedModel
    runner: Any
    weights: Weights
    cache: PrefixCache
    config: EngineConfig


def build(transport: Transport, model: Any, tokenizer: Any | None, config: EngineConfig) -> Built:
    """Load a model by its transport, and make the runner and the cache of a pool that fits into memory."""
    loaded = transport.load(
        model,
        tokenizer=tokenizer,
        compile=config.compile,
        deterministic=config.deterministic,
        dtype=config.dtype,
        attention=config.attention,
        weights=config.weights,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        model_code=config.model_code,
        verify=config.verify,
        kv_dtype=config.kv_dtype,
    )
    config = speculating(loaded, config)
    size = _size_of_pool(transport, loaded, config)
    config, cache = _cache_of(loaded, config, size)
    runner, weights = transport.build(
        loaded,
        (config.max_sequences, config.max_batch_tokens),
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        deterministic=config.deterministic,
        recheck_tokens=config.prefill_chunk if config.deterministic else piece_tokens(config.block_size),
        state_slots=cache.stats().state_rows + cache.stats().state_slots,
        host_blocks=size.host_blocks and size.host_blocks + SCRATCH * (config.disk_cache is not None),
        host_states=size.host_snapshots,
    )
    return Built(loaded, runner, weights, cache, config)


def facts_of(
    model: LoadedModel, cache: PrefixCache, config: EngineConfig, bytes_per_block: int, *, exposes_text: bool
) -> EngineFacts:
    """Return the facts of an engine that telemetry sends."""
    return EngineFacts(
        engine=secrets.token_hex(8),
        pid=os.getpid(),
        started=time.time(),
        version=__version__,
        model=model.name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=model.attention,
        eviction=cache.eviction,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        bytes_per_block=bytes_per_block,
        max_length=model.max_length,
        max_sequences=config.max_sequences,
        max_batch_tokens=config.max_batch_tokens,
        prefill_chunk=config.prefill_chunk,
        exposes_text=exposes_text,
        host_blocks=cache.stats().host_blocks,
        kv_dtype=model.kv_dtype,
        tensor_parallel=config.tensor_parallel,
    )


def _size_of_pool(transport: Transport, loaded: LoadedModel, config: EngineConfig) -> PoolSize:
    """Return the size of the pool, of the states and of the host memory."""
    reserved = 0
    if config.kv_memory == "auto" and (config.num_blocks is None or loaded.state):
        reserved = transport.step_memory(
            loaded,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            prefill_chunk=config.prefill_chunk,
        )
    return pool_size(
        config.kv_memory,
        str(loaded.device),
        bytes_per_block=loaded.bytes_per_token * config.block_size,
        num_blocks=config.num_blocks,
        bytes_per_state=loaded.state_bytes,
        max_sequences=config.max_sequences,
        state_memory=config.state_memory,
        host_memory=config.host_memory if config.prefix_cache else None,
        reserved=reserved,
        disk=config.disk_cache is not None,
    )


def _cache_of(loaded: LoadedModel, config: EngineConfig, size: PoolSize) -> tuple[EngineConfig, PrefixCache]:
    """Return the cache of a pool, and the settings; a model with recurrent state runs as many sequences as it has rows.

    Snapshots of a deterministic engine lie on its chunk grid.
    """
    slots = size.slots
    if loaded.kv_dtype != "auto" and config.prefix_cache and not config.deterministic:
        _log.warning(
            "%s: with kv_dtype=%r a hit may change an answer, as KV computed in other chunks may round otherwise; "
            "deterministic=True prevents that", loaded.name, loaded.kv_dtype,
        )  # fmt: skip
    if not loaded.state and config.state_memory != "auto":
        _log.warning("%s: state_memory has no effect: the model has no recurrent state", loaded.name)
    if config.host_memory is not None and not config.prefix_cache:
        _log.warning("%s: host_memory has no effect: prefix_cache=False, so nothing would be loaded", loaded.name)
    if loaded.state and slots.rows < config.max_sequences:
        _log.warning(
            "%s: %d sequences run at once instead of %d: each takes a recurrent state of %s; set state_memory, "
            "or more kv_memory, for more", loaded.name, slots.rows, config.max_sequences, size_text(loaded.state_bytes),
        )  # fmt: skip
        config = replace(config, max_sequences=slots.rows)
    cache = PrefixCache(
        size.num_blocks,
        config.block_size,
        config.eviction,
        host_blocks=size.host_blocks,
        state_rows=slots.rows,
        state_snapshots=slots.snapshots if config.prefix_cache else 0,
        host_snapshots=size.host_snapshots,
        state_spacing=Spacing(grid=config.prefill_chunk) if config.deterministic else None,
        draft_tokens=DRAFT_TOKENS if config.speculate == "tree" else 0,
    )
    return config, cache
