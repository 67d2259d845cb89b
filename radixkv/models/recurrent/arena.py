"""The slots of recurrent states on a device: one tensor for each state of each layer, with all slots side by side.

A slot holds all states of one sequence after some tokens. The running sequences have the first slots, so that a decode
of many sequences updates a slice of each tensor in place. A slot of zeros is the state before the first token.

Slots after those of the device are in host memory, where only whole slots are copied to and from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.models.loaded import StateKey, StateSpec
from radixkv.sizing.recurrent_state import EMPTY

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
        self._tensors = {
            spec.key: torch.zeros(num_slots, *spec.shape, dtype=spec.dtype, device=device) for spec in specs
        }
        pinned = device_of(device).pinned
        self._on_host = {spec.key: pinned((host_slots, *spec.shape), spec.dtype) for spec in specs if host_slots}

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
                for key in self._tensors:
                    if source == EMPTY:
                        self._slot(key, target).zero_()
                    else:
                        self._slot(key, target).copy_(self._slot(key, source), non_blocking=True)
                self.count(int(source != EMPTY))

    def _slot(self, key: StateKey, slot: int) -> Tensor:
        """Return one state of a slot, as a view."""
        if slot < self.num_slots:
            return self._tensors[key][slot]
        return self._on_host[key][slot - self.num_slots]
