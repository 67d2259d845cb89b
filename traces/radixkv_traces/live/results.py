"""Results on disk: summary.json, requests.csv and moments.csv in a folder.

Knows outcomes and files. What is written is whole or is not there: a file is renamed into place at its end.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.live.figures import Figures
from radixkv_traces.live.outcome import Moment, Outcome
from radixkv_traces.live.player import Played

SUMMARY, REQUESTS, MOMENTS = "summary.json", "requests.csv", "moments.csv"
COLUMNS = [
    *("run", "number", "session", "warmup", "due_s", "sent_s"),
    *("ttft_ms", "tpot_ms", "e2e_ms"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "error"),
]


def folder(path: str, *, fresh: bool = False) -> Path:
    """The folder, made if it is missing, before anything is measured; `fresh` wants one without results.

    Raises InvalidInput where it cannot be.
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


def write(out: Path, summary: Figures, runs: Sequence[Played]) -> None:
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
