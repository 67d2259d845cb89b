"""The findings of `radixkv doctor --tensor-parallel N`: weights and KV of each rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from radixkv.cli.doctor_checks import Finding, note, ok
from radixkv.sizing.kv_size import size_text

if TYPE_CHECKING:
    from radixkv.models.loaded import LoadedModel
    from radixkv.models.ranks.rank_zero import Ranks


def ranks(arguments: argparse.Namespace, names: str) -> Iterator[Finding]:
    """Load the model on all ranks with the settings `names`, and report their weights and KV.

    Raises the errors of `Engine.load`.
    """
    from radixkv.config import EngineConfig
    from radixkv.models.adapter import place_of
    from radixkv.models.ranks.rank_zero import Ranks

    size, usual = arguments.tensor_parallel, EngineConfig()
    settings = {name: getattr(arguments, name) for name in names.split() if name != "device"}
    with closing(Ranks(size, arguments.rank_timeout, place_of(arguments.device))) as transport:
        loaded = transport.load(arguments.model, compile=False, deterministic=False, **settings)
        yield from _held(loaded, transport, arguments.block_size)
        reserved = transport.step_memory(
            loaded,
            block_size=arguments.block_size,
            max_batch_tokens=usual.max_batch_tokens,
            max_sequences=arguments.max_sequences,
            prefill_chunk=usual.prefill_chunk,
        )
    if reserved:
        yield ok("steps", f"the largest step takes {size_text(reserved)} on a rank, in addition to weights and pool")
    if loaded.device.type == "cpu":
        yield note("ranks", "on a CPU ranks make nothing faster: they are for tests")


def _held(loaded: LoadedModel, transport: Ranks, block_size: int) -> Iterator[Finding]:
    """Describe the weights of each rank, and the KV heads and bytes of one."""
    weights = transport.held_bytes(loaded)
    held = ", ".join(size_text(each) for each in weights)
    yield ok("ranks", f"{loaded.name} on {len(weights)} ranks; weights of each: {held}")
    heads = sorted({layer.kv_heads for layer in loaded.stored_layers})
    token, layer = loaded.bytes_per_token, f"{' or '.join(map(str, heads))} KV head{'s' * (heads != [1])} of each layer"
    block = f"{size_text(token * block_size)} a block of {block_size} tokens"
    yield ok("KV", f"{layer} on a rank: {size_text(token)} a token, {block}")
