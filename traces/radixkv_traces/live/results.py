"""Measurements of a replay: rates, latencies, hits and goodput, and the files that hold them.

Latencies are in milliseconds. A result file is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from radixkv.errors import InvalidInput
from radixkv_traces.live.player import ReplayRun
from radixkv_traces.live.requests import TOO_LONG, Moment, Outcome

Figures: TypeAlias = dict[str, Any]

SUMMARY, REQUESTS, MOMENTS = "summary.json", "requests.csv", "moments.csv"
COLUMNS = [
    *("run", "number", "session", "warmup", "due_s", "sent_s"),
    *("ttft_ms", "tpot_ms", "e2e_ms"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "error"),
]
_ERRORS = 5  # most frequent error messages that are kept
GOODPUT = ("ttft", "tpot", "e2e")


def summary(run: ReplayRun, goodput: Mapping[str, float] | None = None) -> Figures:
    """Return all figures of a replay; unknown ones are None. Requests of the warm-up are not counted. O(tokens).

    A hit is a request with at least half of its prompt cached. `tpot` is the time for each token after the first, `itl`
    the time between two pieces of a stream. `late` is the delay between due and sent.
    """
    outcomes = [outcome for outcome in run.outcomes if not outcome.warmup]
    good = [outcome for outcome in outcomes if outcome.answer is not None]
    seconds = run.seconds
    output = sum(outcome.answer.output_tokens for outcome in good if outcome.answer)
    return {
        "target": run.target,
        "whole": run.whole,
        "seconds": round(seconds, 3),
        "requests": len(outcomes),
        "finished": len(good),
        "failed": sum(outcome.error not in (None, TOO_LONG) for outcome in outcomes),
        "too_long": sum(outcome.error == TOO_LONG for outcome in outcomes),
        "errors": dict(Counter(o.error for o in outcomes if o.error not in (None, TOO_LONG)).most_common(_ERRORS)),
        "unfinished": sum(outcome.ended is None for outcome in outcomes),
        "warmup_requests": len(run.outcomes) - len(outcomes),
        "requests_per_s": _rate(len(good), seconds),
        "output_tokens": output,
        "output_tokens_per_s": _rate(output, seconds),
        **_hits(good),
        "preemptions": _total(outcome.answer.preemptions for outcome in good if outcome.answer),
        "ttft_ms": latencies(outcome.ttft for outcome in good),
        "ttft_hit_ms": latencies(outcome.ttft for outcome in good if is_hit(outcome)),
        "ttft_miss_ms": latencies(outcome.ttft for outcome in good if is_hit(outcome) is False),
        "tpot_ms": latencies(outcome.tpot for outcome in good),
        "itl_ms": _gaps(good),
        "e2e_ms": latencies(outcome.total for outcome in good),
        "late_ms": None if run.asap else latencies(outcome.late for outcome in outcomes),
        "goodput": _goodput(outcomes, goodput, seconds) if goodput else None,
    }


def is_hit(outcome: Outcome) -> bool | None:
    """Whether at least half of a prompt was cached; None where the target does not report it."""
    answer = outcome.answer
    if answer is None or answer.cached_tokens is None or not answer.prompt_tokens:
        return None
    return answer.cached_tokens * 2 >= answer.prompt_tokens


def latencies(seconds: Iterable[float | None]) -> Figures | None:
    """Return mean, median, p90 and p99 in milliseconds; None without values."""
    return _percentiles(np.array([value for value in seconds if value is not None]))


def parse_goodput(bars: Sequence[str]) -> dict[str, float]:
    """Parse limits such as `ttft:500` (milliseconds). Raises InvalidInput."""
    parsed = {}
    for bar in bars:
        name, _, text = bar.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in GOODPUT or not 0 < value < float("inf"):
            raise InvalidInput(f"goodput {bar!r}: allowed is NAME:MILLISECONDS, NAME one of {', '.join(GOODPUT)}")
        parsed[name] = value
    return parsed


def compared(with_cache: Figures, without: Figures) -> Figures:
    """Compare two runs: median latencies without the cache over those with it, and the inverse ratio of the rates."""
    ratios: Figures = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        one, other = with_cache[name], without[name]
        ratios[name] = round(other["median"] / one["median"], 3) if one and other and one["median"] else None
    for name in ("requests_per_s", "output_tokens_per_s"):
        ratios[name] = round(with_cache[name] / without[name], 3) if without[name] and with_cache[name] else None
    return ratios


def _hits(good: Sequence[Outcome]) -> Figures:
    reported = [o.answer for o in good if o.answer is not None and o.answer.prompt_tokens is not None]
    prompt = _total(answer.prompt_tokens for answer in reported)
    cached = _total(answer.cached_tokens for answer in reported)
    rate = None if cached is None or not prompt else round(cached / prompt, 5)
    return {"prompt_tokens": prompt, "cached_tokens": cached, "hit_rate": rate}


def _goodput(outcomes: Sequence[Outcome], bars: Mapping[str, float], seconds: float) -> Figures:
    met = sum(_meets(outcome, bars) for outcome in outcomes)
    share = round(met / len(outcomes), 4) if outcomes else None
    return {"bars_ms": dict(bars), "met": met, "share": share, "requests_per_s": _rate(met, seconds)}


def _meets(outcome: Outcome, bars: Mapping[str, float]) -> bool:
    """Whether a request kept every limit; False without an answer."""
    if outcome.answer is None:
        return False
    # An answer of one token has no time after its first.
    took = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2e": outcome.total}
    return all((value := took[name]) is not None and value * 1e3 <= bar for name, bar in bars.items())


def _gaps(good: Sequence[Outcome]) -> Figures | None:
    gaps = [np.diff(np.array(outcome.arrivals)) for outcome in good if len(outcome.arrivals) > 1]
    return _percentiles(np.concatenate(gaps)) if gaps else None


def _percentiles(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> Figures | None:
    if not seconds.size:
        return None
    median, p90, p99 = np.percentile(seconds, (50, 90, 99))
    values = {"mean": seconds.mean(), "median": median, "p90": p90, "p99": p99}
    return {name: round(float(value) * 1e3, 3) for name, value in values.items()}


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def folder(path: str, *, fresh: bool = False) -> Path:
    """Return the folder, created if it is missing, before anything is measured; `fresh` refuses one with results.

    Raises InvalidInput.
    """
    made = Path(path)
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--out {path}: {error.strerror or error}") from error
    if not os.access(made, os.W_OK):
        raise InvalidInput(f"--out {path}: no permission to write there")
    if fresh and (made / SUMMARY).exists():
        raise InvalidInput(f"--out {path}: there are results already; name another folder")
    return made


def write(out: Path, summary: Figures, runs: Sequence[ReplayRun]) -> None:
    """Write all three files. O(requests + moments)."""
    _replace(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    _write_rows(out / REQUESTS, COLUMNS, (_row(run.target, o) for run in runs for o in run.outcomes))
    names = ["run", *(field.name for field in fields(Moment))]
    _write_rows(out / MOMENTS, names, ((run.target, *astuple(moment)) for run in runs for moment in run.moments))


def _row(run: str, outcome: Outcome) -> tuple[Any, ...]:
    answer = outcome.answer
    said = (
        (None,) * 4
        if answer is None
        else (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens, answer.preemptions)
    )
    took = (_ms(outcome.ttft), _ms(outcome.tpot), _ms(outcome.total))
    head = (run, outcome.number, outcome.session, int(outcome.warmup), round(outcome.due, 4), round(outcome.sent, 4))
    error = "unfinished" if outcome.ended is None else outcome.error
    return (*head, *took, *said, error)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _write_rows(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    part.replace(path)


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
