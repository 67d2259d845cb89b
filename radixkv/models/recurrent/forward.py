"""Compute a step of a model with recurrent state: the packed row is cut into calls of each mixer, over slots of states.

All decodes of a step share one call; each longer chunk has calls of its own, cut where a snapshot is taken. Attention
and all other layers see the whole row. The caller has run the copies that the cache has queued.

The arena has one tensor for each state of each layer, with all slots side by side. Tensors of one shape are a single
allocation, so that one launch copies their part of a slot. A slot holds all states of one sequence after some tokens.
The running sequences have the first slots, so that a decode of many sequences updates a slice of each tensor in place.
A slot of zeros is the state before the first token. Slots after those of the device are in host memory, where only
whole slots are copied to and from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.models.loaded import SequenceInput, StateKey, StateSpec
from radixkv.models.recurrent.mixers import Mixer, mixed_by
from radixkv.sizing.recurrent_state import EMPTY, StateStep

Slots = slice | Tensor
"""Several slots: neighbours as a slice, others as an index [count]."""


class StateArena:
    """The states of `num_slots` slots on a device, and of `host_slots` more in host memory.

    `copied` and `copied_bytes` count the copies of whole slots so far.

    The cache owns the slots and queues the copies between them. Not safe for two threads at once.
    """

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: torch.device, host_slots: int = 0) -> None:
        """Allocate bytes_per_slot bytes of zeros for each slot. Raises InvalidInput for less than one on the device."""
        if num_slots < 1:
            raise InvalidInput(f"a model with recurrent state needs at least one slot for it, not {num_slots}")
        self.num_slots, self.device = num_slots, device
        self.bytes_per_slot = sum(spec.num_bytes for spec in specs)
        self.copied = self.copied_bytes = 0
        self._tensors: dict[StateKey, Tensor] = {}
        self._shapes: list[tuple[Tensor, Tensor]] = []  # [slots, layers, *shape] on the device, and on the host
        for shape, dtype in dict.fromkeys((spec.shape, spec.dtype) for spec in specs):
            keys = [spec.key for spec in specs if (spec.shape, spec.dtype) == (shape, dtype)]
            states = torch.zeros(len(keys), num_slots, *shape, dtype=dtype, device=device)
            self._tensors.update(zip(keys, states.unbind(), strict=True))
            on_host = device_of(device).pinned((host_slots, len(keys), *shape), dtype)
            self._shapes.append((states.transpose(0, 1), on_host))

    def read(self, key: StateKey, slots: Slots) -> Tensor:
        """Return one state of `slots`, [count, *shape]: a view for a slice, a copy for an index."""
        return self._tensors[key][slots] if isinstance(slots, slice) else self._tensors[key].index_select(0, slots)

    def write(self, key: StateKey, slots: Tensor, states: Tensor) -> None:
        """Store `states` [count, *shape] in the slots of an index [count]."""
        self._tensors[key].index_copy_(0, slots, states)

    def copy_part(self, key: StateKey, source: int, target: int) -> None:
        """Copy one state of a slot; after the copies of all states, call `count`."""
        tensor = self._tensors[key]
        tensor[target].copy_(tensor[source])

    def count(self, copies: int) -> None:
        """Count copies of whole slots that were made part by part."""
        self.copied += copies
        self.copied_bytes += copies * self.bytes_per_slot

    def stats(self) -> dict[str, int]:
        """Return the memory of all slots and the copies so far, by the names of an engine's stats."""
        return {
            "state_bytes": self.num_slots * self.bytes_per_slot,
            "state_copies": self.copied,
            "state_copied_bytes": self.copied_bytes,
        }

    @torch.inference_mode()
    def run(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy slots (source, target) one after the other; a source EMPTY sets the target to zeros.

        A copy takes bytes_per_slot at the speed of memory: some 11 ms for the 52 MB of Qwen3.5-4B on a CPU.
        """
        with device_of(self.device).current():
            for source, target in copies:
                for memories in self._shapes:
                    if source == EMPTY:
                        self._slot(memories, target).zero_()
                    else:
                        self._slot(memories, target).copy_(self._slot(memories, source), non_blocking=True)
                self.count(int(source != EMPTY))

    def _slot(self, memories: tuple[Tensor, Tensor], slot: int) -> Tensor:
        """Return the states of a slot that have one shape, as a view [layers, *shape]."""
        on_device, on_host = memories
        return on_device[slot] if slot < self.num_slots else on_host[slot - self.num_slots]


class RecurrentForward:
    """Computes the steps of a model with recurrent state: `forward` computes them, with its mixers over `arena`."""

    def __init__(self, forward: Callable[[Sequence[SequenceInput], Tensor | None], Tensor], arena: StateArena) -> None:
        """`forward` computes a step like `StepForward.run`."""
        self._forward, self._arena = forward, arena

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs) + additional, vocab] as `Runner.run` does; every input has a state.

        A forward that raises leaves the rows of its inputs in an unknown state.
        """
        calls = mixer_calls(inputs, self._arena.device)
        with mixed_by(MixerStep(self._arena, calls)):
            logits = self._forward(inputs, sampled)
        self._arena.count(sum(len(call.snapshots) for call in calls))
        self._arena.run(_final_snapshots(inputs))
        return logits


def _final_snapshots(inputs: Sequence[SequenceInput]) -> Iterator[tuple[int, int]]:
    """Yield the copies of slots (source, target) after the last tokens of the inputs."""
    for each in inputs:
        assert each.state is not None, "an input of a model with recurrent state has no row"
        for snapshot in each.state.snapshots:
            if snapshot.tokens == len(each.tokens):
                yield each.state.row.number, snapshot.slot


class MixerCall(NamedTuple):
    """One call of a mixer: the tokens of the packed row, as [B, 1] if `joint`, else [1, n], and their slots.

    `snapshots` are copies of slots (source, target) to make after the call, if another call for the row follows.
    """

    tokens: Slots
    joint: bool
    slots: Slots
    snapshots: tuple[tuple[int, int], ...] = ()


def mixer_calls(inputs: Sequence[SequenceInput], device: torch.device) -> list[MixerCall]:
    """Return the calls that serve all inputs of a step: one for all single tokens, the others by input and snapshot."""
    single: list[tuple[int, int]] = []  # row, token
    calls: list[MixerCall] = []
    first = 0
    for each in inputs:
        assert each.state is not None, "an input of a model with recurrent state has no row"
        if len(each.tokens) == 1:
            single.append((each.state.row.number, first))
        else:
            calls += _cut(first, len(each.tokens), each.state)
        first += len(each.tokens)
    if single:
        single.sort()
        rows, tokens = zip(*single, strict=True)
        assert len(set(rows)) == len(rows), "two inputs have the same row"
        calls.insert(0, MixerCall(_slots(tokens, device), True, _slots(rows, device)))
    return calls


def _cut(first: int, count: int, state: StateStep) -> Iterator[MixerCall]:
    """Yield the calls of one chunk of `count` tokens, which ends at each snapshot."""
    start, row = 0, state.row.number
    for end in sorted({snapshot.tokens for snapshot in state.snapshots} | {count}):
        taken = tuple((row, snapshot.slot) for snapshot in state.snapshots if snapshot.tokens == end < count)
        yield MixerCall(slice(first + start, first + end), False, slice(row, row + 1), taken)
        start = end


def _slots(numbers: Sequence[int], device: torch.device) -> Slots:
    """Return ascending neighbours as a slice, other numbers as an index."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return device_of(device).upload(np.array(numbers, np.int64))


class MixerStep:
    """Answers the mixers of one forward: cuts the row, runs each call on its slots, and puts the outputs together."""

    def __init__(self, arena: StateArena, calls: Sequence[MixerCall]) -> None:
        self._arena, self._calls = arena, calls

    def mix(self, mixer: Mixer, arguments: dict[str, Any]) -> Any:
        """Return the output of `mixer`: a tensor [1, T, ...], or a tuple of such."""
        hidden = arguments[mixer.hidden]
        outputs = [self._run(mixer, arguments, hidden, call) for call in self._calls]
        if isinstance(outputs[0], tuple):
            return tuple(self._joined(parts, hidden.shape[1]) for parts in zip(*outputs, strict=True))
        return self._joined(outputs, hidden.shape[1])

    def _run(self, mixer: Mixer, arguments: dict[str, Any], hidden: Tensor, call: MixerCall) -> Any:
        part = hidden[0, call.tokens]
        view = StateView(self._arena, call.slots)
        more = {mixer.hidden: part[:, None] if call.joint else part[None], mixer.cache: view}
        output = mixer.compute(arguments | more)
        view.finish(call.snapshots)
        return output

    def _joined(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Return the outputs [B, 1, ...] or [1, n, ...] of all calls as one row [1, count, ...]."""
        if len(parts) == 1 and isinstance(self._calls[0].tokens, slice):
            return parts[0].flatten(0, 1)[None]
        whole = parts[0].new_empty(count, *parts[0].shape[2:])
        for call, part in zip(self._calls, parts, strict=True):
            whole[call.tokens] = part.flatten(0, 1)
        return whole[None]


class StateView:
    """The cache that one call of a mixer sees: the states of its slots; none is fresh.

    The states of neighbouring slots are views, which the mixer may also change in place. Others are gathered when
    they are read, and `finish` stores them. Slots of zeros stand for fresh sequences.
    """

    def __init__(self, arena: StateArena, slots: Slots) -> None:
        self._arena, self._slots = arena, slots
        self._states: dict[StateKey, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the last columns [B, channels, width] before these tokens."""
        return self._state(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the states [B, ...] after the last tokens."""
        return self._state(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Append columns [B, channels, T] and keep the last ones; return all [B, channels, width + T]."""
        state = self._state(StateKey(layer_idx, "conv", state_idx))
        columns = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        state.copy_(columns[..., -state.shape[-1] :])
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Store and return states [B, ...]."""
        state = self._state(StateKey(layer_idx, "recurrent", state_idx))
        return state.copy_(recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no state is rolled back."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: zeros stand for the state of a fresh sequence."""
        return True

    def finish(self, snapshots: Sequence[tuple[int, int]]) -> None:
        """Store gathered states, and copy this mixer's from slot to slot for each snapshot."""
        for key, state in self._states.items():
            if not isinstance(self._slots, slice):
                self._arena.write(key, self._slots, state)
            for source, target in snapshots:
                self._arena.copy_part(key, source, target)

    def _state(self, key: StateKey) -> Tensor:
        if key not in self._states:
            self._states[key] = self._arena.read(key, self._slots)
        return self._states[key]
