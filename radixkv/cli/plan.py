"""`radixkv plan`: compute the size of the KV of a model, and the number of sequences that fit into a memory.

The size of a token comes from `radixkv.sizing.kv_shapes`; no torch is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_shapes import kv_shape
from radixkv.sizing.kv_size import (
    ASSUMED_DTYPE,
    DRAFT_BYTES,
    KVShape,
    check_kv_dtype,
    parse_bytes,
    parse_size,
    size_text,
)
from radixkv.sizing.memory import HostSize, StateSlots, disk_blocks, host_for_disk, host_size, state_slots

_SHARES = (16, 4, 2, 1)  # a sequence that ends after one n-th of the context


@dataclass(frozen=True)
class Plan:
    """The KV sizes of one model on `ranks` tensor-parallel ranks; all bytes belong to the fullest rank."""

    shape: KVShape
    dtype: str
    context: int
    block_size: int
    ranks: int
    memory: int | None  # of a rank
    max_sequences: int = 64
    state_memory: str = "auto"
    host_memory: str | None = None  # of a rank
    kv_dtype: str = "auto"
    disk_memory: str | None = None  # of a rank
    past_text: int = 0  # bytes, for drafts

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return self.shape.bytes_per_token(self.dtype, self.ranks, self.kv_dtype)

    @cached_property
    def whole_token(self) -> int:
        """Bytes of a token in all layers and heads."""
        return self.shape.bytes_per_token(self.dtype, kv_dtype=self.kv_dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of `block_size` tokens."""
        return self.bytes_per_token * self.block_size

    @cached_property
    def bytes_per_state(self) -> int:
        """Bytes of the recurrent state of a sequence; 0 for a model without."""
        return self.shape.bytes_per_state(self.dtype)

    @cached_property
    def slots(self) -> StateSlots:
        """Slots for states in the memory, which must be given: as an engine with these settings divides it.

        Raises InvalidInput with the numbers if they are too few.
        """
        assert self.memory is not None
        if not self.bytes_per_state:
            return StateSlots(0, 0)
        return state_slots(self.memory, self.bytes_per_state, self.max_sequences, self.state_memory)

    @property
    def kv_memory(self) -> int:
        """Bytes of the memory, which must be given, that states leave to KV."""
        assert self.memory is not None
        return self.memory - self.slots.total * self.bytes_per_state

    @property
    def blocks(self) -> int:
        """Number of whole blocks that fit into the memory, which must be given."""
        return self.kv_memory // self.bytes_per_block

    def fitting(self) -> Plan:
        """Return this plan with the longest context, up to its own, of which one sequence fits; needs a memory."""
        return replace(self, context=min(self.context, self.blocks * self.block_size))

    @cached_property
    def host(self) -> HostSize:
        """Offloaded blocks, and snapshots of recurrent states, that fit into the host memory; none without it.

        With a disk, an engine has host memory anyway. Raises InvalidInput with the numbers for too little memory.
        """
        given: str | int | None = self.host_memory
        if self.disk and self.memory is not None:
            given = host_for_disk(given, self.blocks * self.bytes_per_block, self.bytes_per_block)
        return host_size(given, self.bytes_per_block, self.bytes_per_state, self.max_sequences)

    @cached_property
    def disk(self) -> int:
        """Blocks that fit on the disk; 0 without one. Raises InvalidInput for too few, and for recurrent states."""
        if self.disk_memory is None:
            return 0
        return disk_blocks(self.disk_memory, self.bytes_per_block, self.block_size, self.bytes_per_state)

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks of a sequence; the last one may be partly filled."""
        return -(-tokens // self.block_size)

    def lengths(self) -> list[Length]:
        """Compare slabs of the whole context with pages, for sequences of several lengths; needs a memory."""
        slabs = self.kv_memory // (self.context * self.bytes_per_token)
        return [self._length(n, slabs) for n in sorted({max(1, self.context // share) for share in _SHARES})]

    def _length(self, tokens: int, slabs: int) -> Length:
        blocks = self.blocks_of(tokens)
        mean = ((blocks - 1) * self.block_size + 1 + tokens) / 2  # of the lengths that end in the same block
        return Length(
            tokens, slabs, 1 - mean / self.context, self.blocks // blocks, 1 - mean / (blocks * self.block_size)
        )


@dataclass(frozen=True)
class Length:
    """The number of sequences of up to `tokens` that fit without sharing, and the empty share of their memory.

    Shares are means over the lengths that end in the same block as `tokens`.
    """

    tokens: int
    contiguous_sequences: int
    contiguous_empty: float
    paged_sequences: int
    paged_empty: float


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 0. Raises InvalidInput for an unknown model and for invalid sizes and numbers."""
    plan = _plan(arguments)
    print(json.dumps(_plain(plan), indent=2) if arguments.json else _text(plan))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    shape = kv_shape(arguments.model)
    context = arguments.context or shape.context
    if context is None:
        raise InvalidInput(f"model {arguments.model!r} names no longest sequence: give --context")
    for option in ("context", "block_size", "tensor_parallel", "max_sequences"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise InvalidInput(f"--{option.replace('_', '-')} {value}: it must be at least 1")
    memory = None if arguments.memory is None else parse_size(arguments.memory)
    dtype = arguments.dtype or shape.dtype or ASSUMED_DTYPE
    check_kv_dtype(arguments.kv_dtype, dtype)
    EngineConfig(speculate=arguments.speculate)  # refuses unknown modes
    if arguments.state_memory != "auto":
        parse_bytes(arguments.state_memory, "state_memory")
        if not shape.states:
            raise InvalidInput(f"--state-memory {arguments.state_memory}: model {shape.name!r} has no recurrent state")
        if memory is None:
            raise InvalidInput(f"--state-memory {arguments.state_memory} is a part of the KV memory: give --memory too")
    plan = Plan(
        shape, dtype, context, arguments.block_size, arguments.tensor_parallel, memory,
        arguments.max_sequences, arguments.state_memory, arguments.host_memory, arguments.kv_dtype,
        arguments.disk_memory, DRAFT_BYTES if arguments.speculate == "tree" else 0,
    )  # fmt: skip
    if memory is not None and not plan.blocks:
        raise InvalidInput(
            f"--memory {arguments.memory}: one block of this model takes {size_text(plan.bytes_per_block)}"
        )
    return plan


def _notes(plan: Plan) -> list[str]:
    """List the assumptions and limits that apply to the numbers."""
    notes = list(plan.shape.notes)
    if plan.shape.dtype is None and plan.dtype == ASSUMED_DTYPE:
        notes.append(f"the model names no dtype; {ASSUMED_DTYPE} is assumed, the dtype of most weights")
    if obstacle := plan.shape.ranks_obstacle(plan.ranks):
        notes.append(f"radixkv refuses {plan.ranks} ranks: {obstacle}. The numbers are of the fullest rank")
    if plan.shape.context is not None and plan.context > plan.shape.context:
        notes.append(f"a context of {plan.context:,} tokens is more than the model's own {plan.shape.context:,}")
    if plan.past_text:
        notes.append(f"the past text of drafts takes {size_text(plan.past_text)} of host memory in addition")
    if plan.disk and plan.host_memory is None:
        notes.append("without --host-memory, an engine with a disk takes half of its pool up to 256 MiB, or an eighth")
    if plan.memory is not None and (most := plan.fitting().context) < plan.context:
        notes.append(f"no sequence of {plan.context:,} tokens fits; --context {most} is the largest that does")
    return notes


# ---- output


def layers_text(shape: KVShape) -> list[str]:
    """Describe each kind of layer in one line."""
    lines = []
    for layer, count in Counter(shape.layers).items():
        value = "" if layer.value_dim == layer.key_dim else f" (values {layer.value_dim})"
        lines.append(f"{count} x {layer.kv_heads} KV heads x {layer.key_dim}{value}")
    return lines


def _text(plan: Plan) -> str:
    of_rank = f", each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    slab = plan.context * plan.bytes_per_token
    rows = [
        ("layers", _shortened(layers_text(plan.shape))),
        ("dtype", plan.dtype if plan.kv_dtype == "auto" else f"{plan.dtype}, KV in {plan.kv_dtype}"),
        (f"a token{of_rank}", size_text(plan.bytes_per_token)),
        (f"a block of {plan.block_size} tokens{of_rank}", size_text(plan.bytes_per_block)),
        (f"a sequence of {plan.context:,} tokens{of_rank}", size_text(slab)),
    ]
    if plan.ranks > 1:
        rows.insert(2, ("a token, all layers and heads", size_text(plan.whole_token)))
    if plan.bytes_per_state:
        tokens = plan.bytes_per_state // plan.bytes_per_token
        state = f"{size_text(plan.bytes_per_state)} in {len(plan.shape.states)} layers"
        text = f"{state}, as much as the KV of {tokens:,} tokens"
        rows.append(("a recurrent state", text))
    if plan.memory is not None and plan.bytes_per_state:
        taken = f"{plan.slots.rows} sequences at once, {plan.slots.snapshots} snapshots"
        share = ", at most a third" if plan.state_memory == "auto" else ""
        rows.append((f"states{share}", f"{size_text(plan.slots.total * plan.bytes_per_state)}: {taken}"))
    if plan.memory is not None:
        full = plan.blocks // plan.blocks_of(plan.context)
        rows += [
            (f"{size_text(plan.memory)}{of_rank}", f"{plan.blocks:,} blocks, {plan.blocks * plan.block_size:,} tokens"),
            (f"sequences of {plan.context:,} tokens that fit", f"{full:,}"),
        ]
    rows += _lower_tiers(plan, of_rank)
    width = max(len(name) for name, _ in rows)
    lines = [plan.shape.name, *(f"  {name:<{width}}  {text}" for name, text in rows)]
    if plan.memory is not None:
        lines += ["", *_lengths_text(plan.fitting()), ""]
    return "\n".join([*lines, *(f"note: {note}" for note in _notes(plan))]).rstrip()


def _lower_tiers(plan: Plan, of_rank: str) -> Iterator[tuple[str, str]]:
    """Describe what host memory and a disk hold."""
    if plan.host.blocks:
        states, tokens = plan.host.snapshots, plan.host.blocks * plan.block_size
        memory = size_text(plan.host.blocks * plan.bytes_per_block + states * plan.bytes_per_state)
        more = f", {states:,} snapshots of recurrent states" if states else ""
        yield f"host memory of {memory}{of_rank}", f"{plan.host.blocks:,} more blocks, {tokens:,} tokens{more}"
    if plan.disk_memory is not None:
        memory, tokens = size_text(parse_bytes(plan.disk_memory)), plan.disk * plan.block_size
        yield f"disk of {memory}{of_rank}", f"{plan.disk:,} blocks, {tokens:,} tokens"


def _shortened(lines: list[str], most: int = 4) -> str:
    """Join the first lines; --json has all of them."""
    return ", ".join(lines[:most]) + (f", ... ({len(lines)} kinds)" if len(lines) > most else "")


def _lengths_text(plan: Plan) -> list[str]:
    """Format a table of the sequences that fit and the empty memory, by the length of the sequences."""
    lines = [
        f"  Sequences that share nothing: a slab of {plan.context:,} tokens each, or blocks as they grow",
        f"  {'tokens':>10}  {'slabs':>8}  {'empty':>6}  {'paged':>8}  {'empty':>6}",
    ]
    for each in plan.lengths():
        slabs = f"{each.contiguous_sequences:>8,}  {each.contiguous_empty:>6.1%}"
        lines.append(f"  {each.tokens:>10,}  {slabs}  {each.paged_sequences:>8,}  {each.paged_empty:>6.1%}")
    return lines


def _plain(plan: Plan) -> Mapping[str, Any]:
    fits = None
    if plan.memory is not None:
        fits = {
            "memory": plan.memory,
            "state_rows": plan.slots.rows,
            "state_snapshots": plan.slots.snapshots,
            "blocks": plan.blocks,
            "tokens": plan.blocks * plan.block_size,
            "sequences": plan.blocks // plan.blocks_of(plan.context),
            "lengths": [asdict(each) for each in plan.lengths()],
        }
    return {
        "model": plan.shape.name,
        "layers": [{"count": count, **asdict(layer)} for layer, count in Counter(plan.shape.layers).items()],
        "dtype": plan.dtype,
        "context": plan.context,
        "block_size": plan.block_size,
        "tensor_parallel": plan.ranks,
        "kv_dtype": plan.kv_dtype,
        "bytes_per_token": plan.whole_token,
        "bytes_per_block": plan.whole_token * plan.block_size,
        "bytes_per_state": plan.bytes_per_state,
        "rank": {
            "bytes_per_token": plan.bytes_per_token,
            "bytes_per_block": plan.bytes_per_block,
            "bytes_per_sequence": plan.bytes_per_token * plan.context,
            "fits": fits,
            "host": {
                "blocks": plan.host.blocks,
                "tokens": plan.host.blocks * plan.block_size,
                "state_snapshots": plan.host.snapshots,
            },
            "disk": {"blocks": plan.disk, "tokens": plan.disk * plan.block_size},
        },
        "past_text_bytes": plan.past_text,
        "notes": _notes(plan),
    }
