"""The runner executes a plan exactly: copies first, writes to the slots, logits of the wanted rows only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.attention import plan
from radixkv.cache.types import WritePlan
from radixkv.models import adapter
from radixkv.models.attention_interface import own_attention
from radixkv.models.loaded import SequenceInput
from radixkv.models.runner import Runner
from radixkv.models.step_batch import logit_places
from tests.models.step_runner import chunk


@pytest.fixture
def runner(build: Callable[..., Any]) -> Runner:
    return Runner(adapter.load(build("llama", torch.float64)), 12, 4)


@pytest.mark.usefixtures("exact_softmax")
def test_additional_rows_follow_the_last_rows(runner: Runner) -> None:
    """Also of isolated inputs: by input, then by position, without the last row again."""
    whole = [chunk([3, 4, 5, 6, 7], 0, [1, 2]), chunk([8], 0, [3]), chunk([9, 10, 11], 0, [4]), chunk([12, 13], 0, [5])]
    own = [own_rows(runner, each.tokens.tolist()) for each in whole]
    wanted = [each._replace(logit_rows=rows) for each, rows in zip(whole, (3, 1, 3, 1), strict=True)]
    expected = torch.cat([*(rows[-1:] for rows in own), own[0][2:4], own[2][0:2]])
    for alone in ((), (0,), (2,), (1, 2), (0, 1, 2, 3), (3,)):
        inputs = [each._replace(isolated=index in alone) for index, each in enumerate(wanted)]
        torch.testing.assert_close(runner.run(inputs), expected, rtol=0, atol=1e-9)
    for index, places in enumerate(logit_places([each.logit_rows for each in wanted])):
        torch.testing.assert_close(expected[places], own[index][-wanted[index].logit_rows :])


def own_rows(runner: Runner, tokens: list[int]) -> torch.Tensor:
    """Return the logits [tokens, vocab] of the model's own forward."""
    with own_attention(runner.loaded.model), torch.inference_mode():
        found: torch.Tensor = runner.loaded.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def test_logits_are_float32_for_a_model_in_16_bits(build: Callable[..., Any]) -> None:
    runner = Runner(adapter.load(build("llama", torch.bfloat16)), 4, 4)
    assert runner.store.dtype == torch.bfloat16
    assert runner.run([chunk([3, 4], 0, [1])]).dtype == torch.float32


def test_only_the_slots_of_the_plan_are_written(runner: Runner) -> None:
    for pool in (*runner.store.keys, *runner.store.values):
        pool.fill_(7.0)
    runner.run([chunk([3, 4, 5, 6, 7], 0, [9, 2])])
    for layer in range(len(runner.store.layers)):
        for part in runner.store.gather(layer, range(12), 48):
            written = (part != 7.0).any(dim=2).any(dim=0).nonzero()[:, 0].tolist()
            assert sorted(written) == [8, 36, 37, 38, 39]


def test_tokens_that_the_host_has_not_read_match_their_sampled_rows(runner: Runner) -> None:
    """Also of an input with a forward of its own, and after known tokens."""
    known = [chunk([8], 0, [1]), chunk([5, 9], 0, [2]), chunk([7], 0, [3])]
    expected = runner.run(known)
    unknown = [
        known[0]._replace(tokens=np.zeros(1, np.int32), sampled_row=2),
        known[1]._replace(tokens=np.array([5, 0], np.int32), sampled_row=0),
        known[2],
    ]
    sampled = torch.tensor([9, 96, 8])
    for inputs in (unknown, [unknown[0]._replace(isolated=True), *unknown[1:]]):
        found = runner.run(inputs, (), sampled)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    with pytest.raises(AssertionError, match="not known"):
        runner.run(unknown)


def test_copies_come_before_writes(runner: Runner) -> None:
    whole = runner.run([chunk([3, 4, 5, 6, 7, 8], 0, [0, 1])])
    runner.run([chunk([3, 4, 5, 6, 7], 0, [0, 1])])
    branched = runner.run([chunk([8], 5, [0, 4]), chunk([9], 5, [0, 1])], copies=[(1, 4)])
    torch.testing.assert_close(branched[0], whole[0], rtol=0, atol=1e-9)


def test_the_vocabulary_is_computed_for_wanted_rows_only(runner: Runner) -> None:
    rows = []
    runner.loaded.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[1])
    )
    long = chunk(list(range(3, 23)), 0, [0, 1, 2, 3, 4])
    runner.run([long, chunk([8, 9], 0, [5])])
    runner.run([long._replace(logit_rows=7), chunk([8, 9], 0, [5])])
    assert rows == [2, 8]


def test_one_work_list_for_each_distinct_window(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build_list = plan.build

    def counting(*args: Any, **options: Any) -> Any:
        built.append(args[3])
        return build_list(*args, **options)

    model = build("gemma2")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3
    model.config.layer_types = [*model.config.layer_types, "sliding_attention"]
    runner = Runner(adapter.load(model), 12, 4)
    monkeypatch.setattr(plan, "build", counting)
    runner.run([chunk([3, 4, 5], 0, [0])])
    assert built == [21, None]


def test_a_failed_step_leaves_the_runner_in_order(runner: Runner) -> None:
    with pytest.raises(IndexError):
        runner.run([chunk([3, 4000, 5], 0, [0])])
    expected = runner.run([chunk([3, 4, 5], 0, [1])])
    torch.testing.assert_close(runner.run([chunk([3, 4, 5], 0, [0])]), expected, rtol=0, atol=1e-9)


def test_host_memory_keeps_what_a_forward_computed(build: Callable[..., Any]) -> None:
    """A prefix that was offloaded and loaded into other blocks gives the logits of the same prefix in the pool."""
    runner = Runner(adapter.load(build("llama", torch.float32)), 12, 4, host_blocks=6)
    assert runner.host is not None
    assert runner.host.nbytes == 6 * runner.store.bytes_per_block
    costs = runner.host_costs(16)
    assert 0 < costs.load_seconds_per_token < 1
    assert 0 < costs.prefill_seconds_per_token < 1
    tokens, table, other = list(range(10, 28)), [3, 1, 4, 8, 5], [9, 10, 2, 0, 11]
    runner.run([chunk(tokens[:17], 0, table)])
    expected = runner.run([chunk(tokens[17:], 17, table)])
    runner.host.offload([(block, image) for image, block in enumerate(table)])
    for pool in (*runner.store.keys, *runner.store.values):
        pool.zero_()
    slots = chunk(tokens[:17], 0, other).slots
    runner.host.load([SimpleNamespace(plan=WritePlan(slots, []), sources=np.arange(17))])
    assert torch.equal(runner.run([chunk(tokens[17:], 17, other)]), expected)


@pytest.mark.parametrize(
    ("tick", "counts"),
    [
        (1e-4, [16, 16, 256, 256]),  # seconds of each look at the clock
        (0.095, [16, 16, 33, 69]),
        (0.4, [16, 16]),
    ],
)
def test_measuring_ends_soon_on_a_busy_machine(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tick: float, counts: list[int]
) -> None:
    runner = Runner(adapter.load(build("llama", torch.float32)), 64, 4, host_blocks=2)
    computed: list[int] = []
    run = runner.run

    def counted(inputs: list[SequenceInput]) -> torch.Tensor:
        computed.extend(len(each.tokens) for each in inputs)
        return run(inputs)

    monkeypatch.setattr(runner, "run", counted)
    clock = itertools.count(0, tick)
    monkeypatch.setattr("radixkv.models.step_costs.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    costs = runner.host_costs(512)
    assert computed == counts
    assert costs.prefill_seconds_per_token == pytest.approx(tick / counts[-1])
