"""The script that compiles all kernels keeps its rows, knows faults, and states which programs fit together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import compile_kernels as script
from kernel_cases import CASES, KINDS
from machine_code import Code, Loop

from radixkv_kernels.attention import Kind

TAILS = script.Row(
    "sm_90", "gqa 128", "tails", Kind(16, 64, 4, 3, 2), 1.5,
    Code(146, 68 << 10, 8, {128: 9}, {"key0": {128: 9}}, {"key0": 9}, {"key0": 3}, {"HMMA": 32}, [Loop(461, 9, 0)], 0),
    ["8 bytes spilled"], 0.125,
)  # fmt: skip
assert TAILS.code is not None
SHARERS = replace(TAILS, launch="sharers", code=replace(TAILS.code, registers=233, shared=112 << 10))
CHUNKS = replace(TAILS, launch="chunks", kind=Kind(128, 64, 8, 3, 1), code=replace(TAILS.code, registers=219))


class InTurn:
    """Has the methods of a pool of processes, and computes in this one."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, function: Callable[[Any], Any], jobs: list[Any]) -> Iterator[Any]:
        return map(function, jobs)


def test_a_second_sweep_compiles_only_launches_that_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = replace(TAILS, launch="merge", kind=None, code=None)
    made, rows = [], {"tails": TAILS, "merge": broken, "chunks": CHUNKS}

    def compiled(job: script.Job) -> script.Row:
        made.append(job[2])
        return rows[job[2]]

    monkeypatch.setattr(script, "compiled", compiled)
    monkeypatch.setattr(script, "ProcessPoolExecutor", InTurn)
    todo, path = [("sm_90", CASES[0], name) for name in rows], tmp_path / "rows"
    assert list(script.results(todo[:2], 1, path)) == [TAILS, broken]
    path.write_text(path.read_text() + '["3.9.0", "cut o')
    assert list(script.results(todo, 1, path)) == [TAILS, broken, CHUNKS]
    assert list(script.results([todo[0], todo[2]], 1, path)) == [TAILS, CHUNKS]
    assert made == ["tails", "merge", "merge", "chunks"]


def test_only_faults_that_are_not_known_are_news() -> None:
    known = [("sm_90", "gqa 128", "tails", "spilled"), ("sm_90", "gqa 128", "tails", "bypass")]
    news, lines = script.compared([TAILS, SHARERS], [*known, ("sm_80", "gqa 128", "tails", "of another sweep")])
    assert news == ["sm_90, gqa 128, sharers, 8 bytes spilled"]
    assert lines == ["known faults: 1, others: 1", "known, but no longer found: sm_90, gqa 128, tails, bypass"]
    assert script.compared([replace(TAILS, faults=[])], []) == ([], [])


def test_known_faults_name_launches_that_exist() -> None:
    lines = [tuple(line.split("\t")) for line in script.KNOWN.read_text().splitlines()]
    assert len(set(lines)) == len(lines)
    for _, target, case, launch, words in lines:
        assert target in script.GPUS
        assert case in {each.name for each in CASES}
        assert words
        assert launch in {*KINDS, "spread", "merge", "write", "copy", "draw", "norm", "silu", "rotate"}


def test_the_scarcest_resource_limits_programs() -> None:
    assert script.fitting(TAILS) == (3, "registers")
    assert script.fitting(SHARERS) == (2, "registers")
    assert script.fitting(TAILS, TAILS, SHARERS) == (0, "registers")
    assert script.fitting(replace(SHARERS, target="sm_89")) == (0, "shared memory")
    assert script.side_by_side([TAILS, SHARERS, CHUNKS, replace(TAILS, target="sm_80")]) == [
        "sm_90 gqa 128, side by side: tails + sharers, not tails + chunks (registers), not sharers + chunks (registers)"
    ]
