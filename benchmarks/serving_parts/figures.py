"""Turn the records of the clients into figures: rates, percentiles, and whether two engines gave the same answers.

A plain forward of the model gives the distance of the two logits where answers differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from .clients import Record
from .servers import Counted


@dataclass(frozen=True)
class Figures:
    """One run of one engine; times in milliseconds, None where the engine does not say."""

    requests: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p90_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    preemptions: int | None
    kv_mb: float
    held_mb: float | None

    def as_dict(self) -> dict[str, float | None]:
        """Rounded, for JSON."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def figures(records: Sequence[Record], counted: Counted) -> Figures:
    """The figures of a run."""
    begin, end = min(each.sent for each in records), max(each.arrivals[-1] for each in records)
    seconds, tokens = end - begin, sum(len(each.reply) for each in records)
    ttft = [(each.arrivals[0] - each.sent) * 1e3 for each in records]
    gaps = np.concatenate([np.diff(each.arrivals) for each in records]) * 1e3
    held = counted.held_bytes
    return Figures(
        len(records),
        seconds,
        len(records) / seconds,
        tokens / seconds,
        *_percentiles(ttft, 50, 90, 99),
        *_percentiles(gaps, 50, 90, 99, 100),
        sum(len(each.prompt) for each in records),
        counted.hit_tokens,
        counted.computed_tokens,
        counted.preemptions,
        counted.kv_bytes / 1e6,
        None if held is None else held / 1e6,
    )


def median(runs: Sequence[Figures]) -> Figures:
    """Field by field."""
    rows = {field.name: [getattr(run, field.name) for run in runs] for field in fields(Figures)}
    return Figures(**{name: None if None in row else statistics.median(row) for name, row in rows.items()})


def _percentiles(values: Any, *at: float) -> Iterable[float]:
    return (float(value) for value in np.percentile(values, at))


# ---- the same answers


@dataclass(frozen=True)
class Agreement:
    """How one engine's replies compare with another's: sessions alike to the last token, and how the others part.

    After the first difference the prompts of a session differ, so the comparison ends there. `widest` is the most
    that the two tokens' logits lay apart at a first difference.
    """

    sessions: int
    alike: int
    widest: float


def agreement(model: Any, ours: Sequence[Record], theirs: Sequence[Record]) -> Agreement:
    """Compare replies session by session; `model` (with its own attention) judges the first difference of each."""
    expected = {(each.session, each.turn): each for each in ours}
    forked: set[str] = set()
    widest, sessions = 0.0, {each.session for each in theirs}
    for found in sorted(theirs, key=lambda each: (each.session.count("."), each.session, each.turn)):
        twin = expected[found.session, found.turn]
        if found.session in forked or found.session.split(".")[0] in forked or found.reply == twin.reply:
            continue
        forked.add(found.session)
        widest = max(widest, _apart(model, twin, found))
    forked |= {name for name in sessions if name.split(".")[0] in forked}
    return Agreement(len(sessions), len(sessions) - len(forked), widest)


@torch.inference_mode()
def _apart(model: Any, one: Record, other: Record) -> float:
    """Return the distance of the logits of the first two tokens that differ, after the same history."""
    assert one.prompt == other.prompt, "the replies before this one were alike"
    at = next(i for i, (a, b) in enumerate(zip(one.reply, other.reply, strict=True)) if a != b)
    ids = torch.tensor([[*one.prompt, *one.reply[:at]]])
    logits = model(ids, logits_to_keep=1).logits[0, -1]
    return float((logits[one.reply[at]] - logits[other.reply[at]]).abs())
