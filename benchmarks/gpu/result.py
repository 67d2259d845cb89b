"""The input of a part (device, sizes, deadline) and its output (rows)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Device
    from .shapes import Sizes

Row = dict[str, Any]
"""One measured case; `case` names it, `skipped` or `failed` has the reason for a missing number."""


class Skipped(Exception):
    """A part or a case cannot run here; the message has the reason."""


def why(error: Exception) -> Row:
    """Return the reason why a row has no number: it was skipped, or it failed."""
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    return {"failed": f"{type(error).__name__}: {error}".strip()[:500]}


@dataclass(frozen=True)
class Ceilings:
    """The device's ceilings, measured in this run; None if unmeasured."""

    copy_tb_s: float | None = None
    read_tb_s: float | None = None
    matmul_tflop_s: float | None = None

    def share(self, rate: float | None) -> float | None:
        """`rate` as a share of the read bandwidth."""
        return None if rate is None or not self.read_tb_s else round(rate / self.read_tb_s, 4)

    @classmethod
    def of(cls, rows: list[Row]) -> Ceilings:
        """The best of each kind of row."""

        def best(case: str, name: str) -> float | None:
            return max((row[name] for row in rows if row["case"].startswith(case) and name in row), default=None)

        return cls(best("copy", "tb_s"), best("read", "tb_s"), best("matmul", "tflop_s"))


@dataclass
class Bench:
    """The input of a part. After `deadline`, on the monotonic clock, no case is begun."""

    device: Device
    sizes: Sizes
    deadline: float
    ceilings: Ceilings = field(default_factory=Ceilings)
    peers: Path | None = None

    def case(self, name: str, measure: Callable[[], Row | Iterator[Row]], **known: Any) -> Iterator[Row]:
        """Yield the rows of one case, or one with the reason for its failure."""
        if time.monotonic() > self.deadline:
            yield {"case": name, **known, "skipped": "the time of this part was used up"}
            return
        try:
            found = measure()
            for row in [found] if isinstance(found, dict) else found:
                yield {"case": name, **known, **row}
        except Exception as error:
            yield {"case": name, **known, **why(error)}


Part = Callable[[Bench], Iterator[Row]]
