"""The slots of a state arena: rows of running sequences, free snapshot slots, and the queue of copies between them.

A copy counts as done once it is queued: the model drains the queue before each forward, and nothing else reads slots.
Rows are packed at each drain, so a row that is freed and taken between two forwards costs no copy.
"""

from __future__ import annotations

from heapq import heappop, heappush

from radixkv.errors import OutOfStates
from radixkv.sizing.recurrent_state import StateRow


class StateSlots:
    """Slots [0, rows) run sequences; `snapshots` slots, then `host_snapshots` slots in host memory, hold snapshots.

    >>> from radixkv.sizing.recurrent_state import EMPTY
    >>> slots = StateSlots(rows=2, snapshots=1)
    >>> first, second = slots.take_row(), slots.take_row()
    >>> slots.copy(EMPTY, second.number)
    >>> slots.release_row(first)
    >>> slots.drain(), second.number
    ([(-1, 1), (1, 0)], 0)
    """

    __slots__ = (
        "_copies", "_gaps", "_rows", "drains", "free", "host_free", "host_start", "num_host", "num_rows",
        "num_snapshots",
    )  # fmt: skip

    def __init__(self, rows: int, snapshots: int, host_snapshots: int = 0) -> None:
        self.num_rows, self.num_snapshots, self.num_host = rows, snapshots, host_snapshots
        self.host_start = rows + snapshots  # the first slot in host memory
        self.free = list(range(self.host_start - 1, rows - 1, -1))  # snapshot slots
        self.host_free = list(range(self.host_start + host_snapshots - 1, self.host_start - 1, -1))
        self.drains = 0  # forwards that have begun: a plan that is older than the last one may have been executed
        self._rows: list[StateRow | None] = []
        self._gaps: list[int] = []  # a heap of the numbers of free rows among `_rows`
        self._copies: list[tuple[int, int]] = []

    @property
    def rows_in_use(self) -> int:
        """Rows of running sequences."""
        return len(self._rows) - len(self._gaps)

    def rows(self) -> list[StateRow]:
        """Return the rows in use, by their numbers."""
        return [row for row in self._rows if row is not None]

    def refuse_full(self) -> None:
        """Raise OutOfStates if all rows are in use."""
        if self.rows_in_use == self.num_rows:
            raise OutOfStates(
                f"all {self.num_rows} rows of recurrent state are in use: close sequences, or give the cache more rows"
            )

    def take_row(self) -> StateRow:
        """Take the first free row; the caller has checked that there is one, and sets its state by a copy."""
        if self._gaps:
            row = StateRow(heappop(self._gaps))
            self._rows[row.number] = row
        else:
            row = StateRow(len(self._rows))
            self._rows.append(row)
        return row

    def release_row(self, row: StateRow) -> None:
        """Free a row, and drop the queued copies into it that nothing reads. O(queued copies)."""
        self._rows[row.number] = None
        heappush(self._gaps, row.number)
        for at in range(len(self._copies) - 1, -1, -1):
            source, target = self._copies[at]
            if source == row.number:
                break
            if target == row.number:
                del self._copies[at]

    def copy(self, source: int, target: int) -> None:
        """Queue the copy of a slot, or of the EMPTY state, into another slot; the slot of a row is its number."""
        self._copies.append((source, target))

    def give_back(self, slot: int) -> None:
        """Free a snapshot slot of either memory."""
        (self.free if slot < self.host_start else self.host_free).append(slot)

    def drain(self) -> list[tuple[int, int]]:
        """Pack the rows, and return the copies (source, target) since the last call, to be run in this order."""
        self.drains += 1
        rows = self._rows
        while self._gaps and rows:
            last = rows.pop()
            if last is None:
                continue
            gap = heappop(self._gaps)
            if gap >= len(rows):  # this gap, and all later ones, were at the end
                rows.append(last)
                break
            self._copies.append((last.number, gap))
            rows[gap], last.number = last, gap
        self._gaps.clear()
        copies, self._copies = self._copies, []
        return copies

    def queued(self) -> list[tuple[int, int]]:
        """Return the copies that wait for the next drain."""
        return list(self._copies)
