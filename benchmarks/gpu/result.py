"""What a part is given, and what it hands back.

Knows: rows, reasons and time left. Knows no device and no kernel.
"""

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
"""One measured case; `case` names it, `skipped` or `failed` says why there is no number."""


class Skipped(Exception):
    """A part, or a case, that cannot run here; says why."""


def why(error: Exception) -> Row:
    """Why a row has no number: it was skipped, or it failed."""
    if isinstance(error, Skipped):
        return {"skipped": str(error)}
    return {"failed": f"{type(error).__name__}: {error}".strip()[:500]}


@dataclass(frozen=True)
class Ceilings:
    """What this device can do at most, measured in this run; None where it was not."""

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
    """What a part needs to know. After `deadline`, on the monotonic clock, no case is begun."""

    device: Device
    sizes: Sizes
    deadline: float
    ceilings: Ceilings = field(default_factory=Ceilings)
    peers: Path | None = None

    def case(self, name: str, measure: Callable[[], Row | Iterator[Row]], **known: Any) -> Iterator[Row]:
        """The rows of one case, or one that says why there is none."""
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
