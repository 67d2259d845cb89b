"""Count the tokens of streams on the device, for the penalties of rows whose last token the host has not read yet.

A stream with penalties has a slot: one row of a table [slots, vocab]. An entry is twice the number of the token's
occurrences in the reply, plus 1 if the prompt contains the token. The table is written in stream order only: a slot is
filled from the history once, and each draw then adds its token on the device. Tokens that the host appends, for example
to a beam, are added before the next draw.

Invariant: a slot's entries count the first `counted` tokens of its stream. If the stream's text is shorter, the slot is
filled again, for example after a preemption that dropped a sampled token. So no slot need be released: a stream that
needs one takes over the slot that was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.sampling.params import SampleRow

Positions = NDArray[np.int64]
_FEWEST = 8  # slots of the first table


@dataclass(eq=False)
class Slot:
    """One row of the table: its number, the tokens that it counts (-1: none), and whether a draw needs it."""

    index: int
    counted: int = -1
    in_use: Callable[[], bool] = field(default=lambda: False)


@dataclass(frozen=True)
class Filling:
    """The slots of some rows, and the entries of the table, counted from its start, that must be written first.

    `cleared` are numbers of slots, `seen` entries that become 1, `replied` entries to which 2 is added each time.
    """

    slots: list[Slot]
    lengths: list[int]
    cleared: Positions
    seen: Positions
    replied: Positions


class TokenCounts:
    """The table and its slots. Grows to the streams of the draws in flight, to a power of two; never shrinks."""

    def __init__(self, place: torch.device) -> None:
        """Allocate nothing until a row has penalties."""
        self._place = place
        self._slots: OrderedDict[Hashable, Slot] = OrderedDict()  # the one used longest ago comes first
        self._free: list[int] = []
        self.table = torch.empty((0, 0), dtype=torch.int32, device=place)

    def plan(self, rows: Sequence[SampleRow], vocab: int) -> Filling:
        """Assign a slot to each row, and return the entries to fill; the table may be replaced by a larger one.

        Raises nothing of its own. A plan that is not carried out costs another filling only.
        """
        if self.table.shape[1] != vocab:
            self._slots.clear()
            self._free.clear()
            self.table = torch.empty((0, vocab), dtype=torch.int32, device=self._place)
        slots = self._assign([object() if row.stream is None else row.stream for row in rows])
        lengths = [len(row.history) + row.in_flight for row in rows]
        cleared: list[int] = []
        seen: list[Positions] = []
        replied: list[Positions] = []
        for row, slot, length in zip(rows, slots, lengths, strict=True):
            if slot.counted == length:
                continue
            assert not row.in_flight, "a stream's slot was lost while its last token is unknown to the host"
            tokens, first = np.asarray(row.history, np.int64), slot.index * vocab
            parts = [(replied, tokens[slot.counted :])]
            if not row.prompt_length <= slot.counted < length:
                cleared.append(slot.index)
                parts = [(seen, tokens[: row.prompt_length]), (replied, tokens[row.prompt_length :])]
            slot.counted = -1
            for entries, part in parts:
                entries.append(part[part < vocab] + first)
        return Filling(slots, lengths, np.array(cleared, np.int64), _joined(seen), _joined(replied))

    def fill(self, filling: Filling, cleared: Tensor, seen: Tensor, replied: Tensor) -> None:
        """Write the entries of a filling, which the device has copies of. At most four launches."""
        entries = self.table.view(-1)
        if len(cleared):
            self.table.index_fill_(0, cleared, 0)
            entries.index_fill_(0, seen, 1)
        if len(replied):
            entries.index_add_(0, replied, torch.full_like(replied, 2, dtype=torch.int32))
        for slot, length in zip(filling.slots, filling.lengths, strict=True):
            slot.counted = length

    def add(self, filling: Filling, entries: Tensor, increments: Tensor, in_use: Callable[[], bool]) -> None:
        """Add `increments` to entries of the table: the tokens that were drawn for a filling's streams; see `hold`."""
        self.table.view(-1).index_add_(0, entries, increments)
        for slot, length in zip(filling.slots, filling.lengths, strict=True):
            slot.counted = length + 1
        self.hold(filling, in_use)

    def hold(self, filling: Filling, in_use: Callable[[], bool]) -> None:
        """Assign none of a filling's slots to another stream until `in_use` returns False."""
        for slot in filling.slots:
            slot.in_use = in_use

    def _assign(self, keys: list[Hashable]) -> list[Slot]:
        """Return the slot of each stream, an undefined one for a new stream."""
        missing = []
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)
            else:
                missing.append(key)
        if len(missing) > len(self._free):
            self._take_over(len(missing) - len(self._free), set(keys))
        if len(missing) > len(self._free):
            self._grow(len(missing) - len(self._free))
        for key in missing:
            self._slots[key] = Slot(self._free.pop())
        return [self._slots[key] for key in keys]

    def _take_over(self, count: int, keep: set[Hashable]) -> None:
        """Free up to `count` slots, those used longest ago first, of streams that no draw in flight needs."""
        taken: list[Hashable] = []
        for key, slot in self._slots.items():
            if len(taken) == count:
                break
            if key not in keep and not slot.in_use():
                taken.append(key)
        for key in taken:
            self._free.append(self._slots.pop(key).index)

    def _grow(self, count: int) -> None:
        """Add at least `count` free slots, to a power of two in all."""
        old, vocab = self.table.shape
        size = max(_FEWEST, 1 << (old + count - 1).bit_length())
        table = torch.empty((size, vocab), dtype=torch.int32, device=self._place)
        table[:old].copy_(self.table)
        self.table = table
        self._free.extend(range(old, size))


def _joined(parts: list[Positions]) -> Positions:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
