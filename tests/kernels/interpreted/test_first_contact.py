"""The checks of a new GPU hold on a simulated one, and a row fails for each fault that it is there for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.attention import triton_backend
from radixkv.models import adapter, cuda_graphs
from radixkv_kernels import attention
from tests.virtual_gpu import VirtualGpu

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from gpu import contact_checks, device, first_contact

HELD, FAILED = first_contact.HELD, first_contact.FAILED


def place(torch_device: Any = "cpu") -> Any:
    return device.Device(torch.device(torch_device), "simulated", 2, 9, 0, 0, True)


def states(check: Callable[[Any], Any], where: Any) -> dict[str, str]:
    return {row.name: row.state for row in check(where)}


@pytest.fixture(autouse=True)
def _untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test takes seconds in the interpreter."""
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)


def test_graphs_are_recorded_and_replayed(virtual_gpu: VirtualGpu) -> None:
    assert states(contact_checks.graphs, place(virtual_gpu.place)) == {"graphs": HELD, "replayed logits": HELD}


def test_no_graph_at_all_fails(virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("a step waits")

    monkeypatch.setattr(cuda_graphs.DeviceRecorder, "warm_up", refuse)
    assert states(contact_checks.graphs, place(virtual_gpu.place)) == {"graphs": FAILED}


def test_a_missing_graph_fails_with_its_reason(virtual_gpu: VirtualGpu) -> None:
    for number in range(1, 20):
        virtual_gpu.inject("capture", number)
    (graphs, *_) = contact_checks.graphs(place(virtual_gpu.place))
    assert graphs.state == FAILED and "missing: AcceleratorError" in graphs.said


def test_a_replay_of_another_step_fails(virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = cuda_graphs.StepGraphs.run

    def late(self: Any, inputs: Any, work: Any, bucket: Any, sampled: Any = None) -> Any:
        found = fill(self, inputs, work, bucket, sampled)
        return found if bucket.tokens < 4 else found.roll(1, dims=1)

    monkeypatch.setattr(cuda_graphs, "_replays_the_same", lambda *_: True)
    monkeypatch.setattr(cuda_graphs.StepGraphs, "run", late)
    assert states(contact_checks.graphs, place(virtual_gpu.place)) == {"graphs": HELD, "replayed logits": FAILED}


def test_one_wrong_row_of_many_counts_as_much_as_all() -> None:
    expected = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[63] += 0.2 * expected[0]
    assert contact_checks.worst_row(found, expected) > 0.1
    assert contact_checks.worst_row(found.fill_(torch.nan), expected) == float("inf")


def test_a_tree_is_read_level_by_level_from_a_graph(virtual_gpu: VirtualGpu) -> None:
    found = {row.name: row for row in contact_checks.tree(place(virtual_gpu.place), 2)}
    assert {name: row.state for name, row in found.items()} == {
        "levels of the tree": HELD,
        "tree against flat": HELD,
        "tree from a graph": HELD,
    }
    assert found["levels of the tree"].said.startswith("2 shared runs of 2 levels")


def test_captures_fail_and_recover(virtual_gpu: VirtualGpu) -> None:
    assert states(contact_checks.capture, place(virtual_gpu.place)) == {
        "a failed capture": HELD,
        "a later capture": HELD,
    }


def test_experts_are_recorded(virtual_gpu: VirtualGpu) -> None:
    found = states(contact_checks.experts, place(virtual_gpu.place))
    assert found == {"experts": HELD, "experts, replayed logits": HELD}


@pytest.mark.parametrize("fault", [None, "attention", "write"])
def test_kernels_are_compared_with_the_reference(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "attention":
        attend = attention.attend
        monkeypatch.setattr(triton_backend, "_kernels", lambda: SkewedKernels(attend))
    elif fault is not None:
        monkeypatch.setattr(triton_backend, fault, lambda *_: None)
    expected = {"kernels, and bound launches": FAILED if fault else HELD}
    assert states(contact_checks.kernels, place()) == expected


class SkewedKernels:
    """The kernels, but for an attention that is off by two percent."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def __getattr__(self, name: str) -> Any:
        return getattr(attention, name)

    def attend(self, *inputs: Any, **options: Any) -> torch.Tensor:
        return self._attend(*inputs, **options) * 1.02


def test_draws_equal_the_hosts_and_one_that_differs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(contact_checks.sampling, place()) == {"greedy and random draws": HELD}
    drawn = contact_checks.draw_by_kernel
    monkeypatch.setattr(contact_checks, "draw_by_kernel", lambda logits, best, rows: drawn(logits, best, rows) + 1)
    assert states(contact_checks.sampling, place()) == {"greedy and random draws": FAILED}
