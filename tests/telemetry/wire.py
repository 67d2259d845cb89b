"""Records of every kind, drawn by Hypothesis, and small hand-made ones."""

from __future__ import annotations

from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from radixkv.telemetry.protocol import MOST_POOL, RECORDS
from radixkv.telemetry.records import (
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    RequestRecord,
    drawable,
)
from radixkv.telemetry.what_if import SIZES, WhatIfCurve, WhatIfReport

FACTS = EngineFacts(
    "e-1", 4242, 1000.0, "0.1.0", "tiny", "cpu", "float32", "torch", "lru", 64, 16, 4096, 2048, 64, 2048, 512
)


def node(number: int, parent: int = 0, blocks: tuple[int, ...] = (0, 1), **other: object) -> NodeRecord:
    return NodeRecord(number, parent, 0, 16, blocks, 0, 0, 0, 0, 0, False, 1.0, 2.0, **other)  # type: ignore[arg-type]


def request(number: int, phase: str = "decode", **other: object) -> RequestRecord:
    return RequestRecord(number, phase, None, None, 0, 1, 64, 32, 16, 48, 0, 3, 0, False, 1.0, **other)  # type: ignore[arg-type]


def eviction(number: int, wanted_again: float | None = None) -> EvictionRecord:
    return EvictionRecord(number, 5.0, 7, 0, 16, 1, 2.5, 0, True, "prompt", wanted_again)


COUNT = st.integers(0, 2**63 - 1)
TIME = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=20).map(drawable)


class Dice(Random):
    """Any value of an annotation, any record and any changes, in a tenth of the time of strategies for each field."""

    def record(self, kind: type) -> Any:
        """Any record of a kind; some fields have a range of their own."""
        own: dict[str, object] = {"head": self.ids(2**31), "preempted_ms": self.ids(2**31)}
        own |= {"priority": self.count() - self.count()}
        own |= {"blocks": self.count() if kind is EvictionRecord else self.runs()}
        own |= {"num_blocks": self.randint(1, MOST_POOL), "host_blocks": self.randint(0, MOST_POOL)}
        own |= {"block_size": self.count() or 1}
        return kind(**{name: own.get(name, self.any(hint)) for name, hint in get_type_hints(kind).items()})

    def changes(self, reset: bool | None = None) -> Changes:
        """Any changes."""
        lists = {name: tuple(self.record(kind) for _ in range(self.randrange(4))) for name, kind in RECORDS.items()}
        stats = {self.text(): self.choice((self.time, self.count))() for _ in range(self.randrange(5))}
        return Changes(
            time=self.time(),
            reset=self.random() < 0.5 if reset is None else reset,
            stats=stats,
            gone_nodes=self.ids(),
            gone_sequences=self.ids(),
            next_victims=self.choice((None, self.ids())),
            what_if=self.choice((None, self.report().as_fields())),
            **lists,
        )

    def report(self) -> WhatIfReport:
        recent, since_load = (
            WhatIfCurve(self.count(), self.count(), self.count(), tuple(self.count() for _ in SIZES)) for _ in range(2)
        )
        return WhatIfReport(self.count(), recent, since_load, self.count(), (self.text(),))

    def any(self, hint: Any) -> Any:
        plain = {int: self.count, float: self.time, str: self.text, bool: lambda: self.random() < 0.5}
        if hint in plain:
            return plain[hint]()
        if get_origin(hint) is Literal:
            return self.choice(get_args(hint))
        part = self.choice([part for part in get_args(hint) if part is not ...])
        return None if part is NoneType else self.any(part)

    def count(self) -> int:
        return self.choice((0, 1, self.randrange(200), self.randrange(2**63), 2**63 - 1))

    def time(self) -> float:
        return self.choice((0.0, -1.5, self.random() * 1e9, self.random() * 1e-300, 1.7e308))

    def text(self) -> str:
        points = (self.choice((self.randrange(128), self.randrange(0xD800))) for _ in range(self.randrange(12)))
        return drawable("".join(map(chr, points)))

    def ids(self, below: int = 2**63) -> tuple[int, ...]:
        return tuple(self.randrange(below) for _ in range(self.randrange(5)))

    def runs(self) -> tuple[int, ...]:
        return tuple(self.randrange(2 ** (31 - 11 * (at % 2))) for at in range(2 * self.randrange(5)))


DICE = st.integers(0, 2**32).map(Dice)
CHANGES = DICE.map(Dice.changes)
