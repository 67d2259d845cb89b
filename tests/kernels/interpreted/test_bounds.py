"""The check of bounds finds reads and writes that leave their tensors by one number, and no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from radixkv.attention import plan
from radixkv_kernels import attention, tiles
from tests.kernels.interpreted.attending import CPU, SMALL, separate
from tests.kernels.interpreted.bounds import checked


def run(change: dict[str, Any] | None = None, output: Tensor | None = None) -> None:
    """Attend a decode and a chunk along a plan of which some fields are changed."""
    case = separate([20, 40], [1, 5], group=2)
    work = plan.build(case.tables, case.kv_lengths, case.query_lengths, block_size=16)
    step = attention.plan(work, heads=4, kv_heads=2, chosen=SMALL, device=CPU, processors=2)
    changed = {name: field(getattr(step, name)) for name, field in (change or {}).items()}
    pools = case.store.keys[0], case.store.values[0]
    output = torch.empty(6, 4, 16) if output is None else output
    with checked():
        attention.attend(case.query, *pools, dataclasses.replace(step, **changed), scale=0.3, output=output)


def test_the_kernels_stay_inside() -> None:
    run()


def test_block_ids_without_room_for_the_last_iteration_are_left() -> None:
    def cut(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rows[0][: -tiles.OVERREAD].clone(), *rows[1:])

    with pytest.raises(InterpreterError, match="a kernel reads 16 of 16 numbers outside"):
        run({"rows": cut})


def test_an_output_that_lacks_a_number_is_left() -> None:
    output = torch.empty(6 * 4 * 16)[:-1].as_strided((6, 4, 15), (64, 16, 1))
    with pytest.raises(InterpreterError, match="a kernel writes 1 of"):
        run(output=output)
