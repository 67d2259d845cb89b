"""Declare the counters and gauges of a record of statistics, each at its field.

`/metrics`, telemetry, `radixkv-monitor --once` and the tests of docs/ read these declarations. A figure without a
metric of its own says why.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_KEY = "figure"  # of the metadata of a field


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a record. A counter only grows, a gauge may fall.

    `metric` is its name in /metrics after "radixkv:", and `labels` are its labels there. A figure with `hidden` is not
    in /metrics, for this reason.
    """

    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    metric: str = ""
    hidden: str = ""
    labels: tuple[tuple[str, str], ...] = ()


def counter(unit: str, help: str, metric: str = "", *, hidden: str = "", **labels: str) -> Any:
    """Declare a field that counts. `metric` is the field's name unless it is given.

    >>> @dataclass(frozen=True)
    ... class Stats:
    ...     loaded: int = counter("blocks", "Blocks that were read", "blocks", direction="in")
    >>> [(name, figure.metric, figure.labels) for name, figure in figures(Stats)]
    [('loaded', 'blocks', (('direction', 'in'),))]
    """
    return _declare(Figure("counter", unit, help, metric, hidden, tuple(labels.items())))


def gauge(unit: str, help: str, metric: str = "", *, hidden: str = "", **labels: str) -> Any:
    """Declare a field that shows the present state, as `counter` does."""
    return _declare(Figure("gauge", unit, help, metric, hidden, tuple(labels.items())))


def _declare(figure: Figure) -> Any:
    return field(default=0, metadata={_KEY: figure})


def figures(record: type) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the declaration of each figure of a record class."""
    for each in fields(record):
        if (figure := each.metadata.get(_KEY)) is not None:
            yield each.name, replace(figure, metric=figure.metric or each.name)


def described(record: type[T]) -> type[T]:
    """Add the meaning of each figure to the docstring of a record class."""
    lines = (f"    {name}: {figure.help}" for name, figure in figures(record))
    record.__doc__ = "\n".join([record.__doc__ or "", *lines])
    return record


class Counts(Namespace):  # an attribute of SimpleNamespace, which is written in C, takes twice as long
    """The running counters of a record class: attributes that begin at 0. An unknown one raises AttributeError."""

    def __init__(self, record: type) -> None:
        super().__init__(**{name: 0 for name, figure in figures(record) if figure.kind == "counter"})
