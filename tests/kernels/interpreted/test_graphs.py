"""Replayed decode steps compute the same as launched ones; a list of calls stands in for a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv.attention import plan
from radixkv.models import adapter, attention_interface, cuda_inputs
from radixkv.models.cuda_graphs import record_decodes
from radixkv.models.fusion import fuse
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv_kernels import graph_capacity
from tests.kernels.launch_recorder import LaunchRecorder

SIZE, BLOCKS = 4, 120
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_hidden_layers=1),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, num_hidden_layers=2, head_dim=16, sliding_window=9, attn_logit_softcapping=3.0
    ),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(  # its second layer reads the KV of the first
        **SIZES,
        num_hidden_layers=2,
        num_kv_shared_layers=1,
        layer_types=["full_attention"] * 2,
        head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 2,
    ),
}


def load(kind: str = "llama", change: Callable[[Any], None] | None = None) -> LoadedModel:
    """Load a small random model on the kernels, without its self-test."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
    if change is not None:
        change(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "self_test", lambda loaded: 0.0)
        return adapter.load(model, attention="triton")


@dataclass
class Pair:
    """The same steps on two runners: one replays, one does not. Free slots hold NaN in both."""

    loaded: LoadedModel
    recorder: LaunchRecorder = field(default_factory=LaunchRecorder)
    most: int = 6
    deterministic: bool = False

    def __post_init__(self) -> None:
        self.plain, self.replaying = (
            Runner(self.loaded, BLOCKS, SIZE, deterministic=self.deterministic) for _ in range(2)
        )
        record_decodes(self.replaying, self.most, self.recorder)
        for runner in (self.plain, self.replaying):
            for pool in (*runner.store.keys, *runner.store.values):
                pool.fill_(torch.nan)
        self.free = list(range(BLOCKS))
        random.Random(5).shuffle(self.free)
        self.lives: list[tuple[int, list[int]]] = []  # length, table

    def prefill(self, tokens: int) -> None:
        """Add a sequence."""
        table = [self.free.pop() for _ in range(-(-tokens // SIZE))]
        self._run([self._chunk(list(range(3, 3 + tokens)), 0, table)], [])
        self.lives.append((tokens, table))

    def fork(self, index: int) -> None:
        """Add a sequence that shares all full blocks; the part-filled one is copied in the next step."""
        length, table = self.lives[index]
        whole = length // SIZE
        self.lives.append((length, [*table[:whole], *([-1] if length % SIZE else [])]))
        self._forked = (index, len(self.lives) - 1)

    def decode(self, rng: random.Random, which: list[int] | None = None) -> None:
        """Compute one more token of some sequences, or all."""
        chunks, copies = [], []
        for index in range(len(self.lives)) if which is None else which:
            length, table = self.lives[index]
            if table and table[-1] == -1:
                table[-1] = self.free.pop()
                copies.append((self.lives[self._forked[0]][1][len(table) - 1], table[-1]))
            if length % SIZE == 0:
                table.append(self.free.pop())
            chunks.append(self._chunk([rng.randrange(3, 97)], length, table))
            self.lives[index] = (length + 1, table)
        self._run(chunks, copies)

    def forget(self, bucket: int) -> None:
        """Drop the recordings of one bucket."""
        replays = self.replaying.forward.graphs.replays
        for key in [key for key in replays if key[0] == bucket]:
            del replays[key]

    def _chunk(self, tokens: list[int], start: int, table: list[int]) -> SequenceInput:
        places = np.arange(start, start + len(tokens))
        blocks = np.array(table, dtype=np.int32)
        slots = blocks[places // SIZE].astype(np.int64) * SIZE + places % SIZE
        return SequenceInput(np.array(tokens, dtype=np.int32), start, slots, blocks)

    def _run(self, chunks: list[SequenceInput], copies: list[tuple[int, int]]) -> None:
        ours, expected = self.replaying.run(chunks, copies), self.plain.run(chunks, copies)
        if self.deterministic:
            assert torch.equal(ours, expected)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
        pools = [(*runner.store.keys, *runner.store.values) for runner in (self.replaying, self.plain)]
        for a, b in zip(*pools, strict=True):  # padded rows were not written anywhere
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_replays_compute_what_steps_would(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of each size, growing contexts, branches and their copies, shared runs and none."""
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    pair, rng = Pair(load(kind)), random.Random(1)
    pair.prefill(11)
    pair.decode(rng)
    pair.fork(0)
    pair.decode(rng)
    pair.prefill(2)
    for which in (None, [0, 2], [2, 0, 1]):
        pair.decode(rng, which)
    assert pair.recorder.replays == 5 + 2  # and two of the probe
    assert len(pair.recorder.recordings) <= 4


def test_an_ordinary_step_is_not_recorded_again_and_launches_only_the_tiles_there_are() -> None:
    pair, rng = Pair(load()), random.Random(2)
    for _ in range(3):
        pair.prefill(2)
    for _ in range(2):
        pair.decode(rng)
    alone, together = pair.recorder.recordings  # the probe's, and one for the bucket of four
    assert alone.launches == together.launches == 1 + 1 + 1  # a write, one kind of tile and a merge
    assert pair.recorder.replays == 2 + 2


def test_a_deterministic_step_is_replayed_only_where_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_interface, "SPLIT", 8)
    pair, rng = Pair(load(), deterministic=True), random.Random(3)
    for length in (17, 3, 2):
        pair.prefill(length)
        pair.decode(rng)
    assert pair.recorder.replays == 2 + 2


def test_tokens_that_only_the_device_has_are_relayed_to_a_replay() -> None:
    pair = Pair(load(), most=4)
    for length in (5, 2, 6):
        pair.prefill(length)
    known = [pair._chunk([token], length, table) for token, (length, table) in zip((9, 8, 7), pair.lives, strict=True)]
    expected, replays = pair.plain.run(known), pair.recorder.replays
    unknown = [
        replace(each, tokens=np.zeros(1, np.int32), sampled_row=row)
        for each, row in zip(known, (3, -1, 0), strict=True)
    ]
    unknown[1] = known[1]
    sampled = torch.tensor([7, 96, 96, 9])
    for runner in (pair.plain, pair.replaying, pair.replaying):
        torch.testing.assert_close(runner.run(unknown, sampled=sampled), expected, rtol=0, atol=1e-4)
    assert pair.recorder.replays == replays + 2
    with pytest.raises(AssertionError, match="not known"):
        pair.replaying.run(unknown)


def test_logits_outlive_the_next_replay() -> None:
    pair, rng = Pair(load()), random.Random(4)
    pair.prefill(5)
    length, table = pair.lives[0]
    chunks = [pair._chunk([token], length, table) for token in (5, 6)]
    first = pair.replaying.run([chunks[0]])
    kept = first.clone()
    assert not torch.equal(pair.replaying.run([chunks[1]]), kept)
    assert torch.equal(first, kept)
    pair.decode(rng)


def test_a_batch_with_more_shared_runs_than_fit_is_replayed_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    monkeypatch.setattr(graph_capacity, "DEPTH", 1)
    pair, rng = Pair(load(), most=4), random.Random(13)
    pair.prefill(9)
    for blocks in (1, 2, 2):
        pair.fork(0)
        pair.lives[-1] = (blocks * SIZE, pair.lives[-1][1][:blocks])
    replays = pair.recorder.replays
    for _ in range(2):
        pair.decode(rng)
    assert pair.recorder.replays == replays + 2


@pytest.mark.parametrize("limit", ["blocks", "memory", "most"])
def test_what_does_not_fit_is_computed_without(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    if limit == "blocks":
        monkeypatch.setattr(cuda_inputs, "MOST_BLOCKS", 9)
    pair = Pair(load(), LaunchRecorder(1 if limit == "memory" else 1000), most=2 if limit == "most" else 6)
    rng, replays = random.Random(5), pair.recorder.replays
    pair.prefill(13)
    for _ in range(2):
        pair.fork(0)
        pair.lives[-1] = (12, pair.lives[-1][1][:3])
    pair.decode(rng)
    assert pair.recorder.replays == replays
    pair.decode(rng, [0])
    assert pair.recorder.replays == replays + 1
    assert not caplog.messages


def test_without_memory_for_its_own_recording_a_step_uses_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences are recorded in the bucket of four; then it serves one and two of them, padded."""
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    pair, rng = Pair(load(), most=4), random.Random(9)
    for length in (13, 3, 6):
        pair.prefill(length)
    pair.decode(rng)
    pair.forget(1)
    pair.recorder.most = len(pair.recorder.recordings)
    replays = pair.recorder.replays
    for which in ([1], [0, 2], [2, 1, 0]):
        pair.decode(rng, which)
    assert pair.recorder.replays == replays + 3
    assert len(pair.recorder.recordings) == 2
    pair.recorder.most = 1000
    pair.decode(rng, [1, 0])
    assert len(pair.recorder.recordings) == 3  # now it has its own


def test_a_step_without_shared_runs_is_served_by_a_recording_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    pair, rng = Pair(load(), most=16), random.Random(10)
    pair.prefill(12)
    for _ in range(9):
        pair.fork(0)
    pair.prefill(5)
    pair.decode(rng)
    assert (
        pair.recorder.recordings[-1].launches == 1 + 2 + 1
    )  # two kinds of tile: tails, and the run that ten rows share
    pair.recorder.most = len(pair.recorder.recordings)
    replays = pair.recorder.replays
    pair.decode(rng, [0, 10])
    assert pair.recorder.replays == replays + 1


def test_a_deterministic_step_is_never_padded_into_a_larger_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_interface, "SPLIT", 8)
    pair, rng = Pair(load(), deterministic=True, most=2), random.Random(11)
    for _ in range(2):
        pair.prefill(5)
    pair.decode(rng)
    pair.forget(1)
    pair.recorder.most = len(pair.recorder.recordings)
    replays = pair.recorder.replays
    pair.decode(rng, [0])
    assert pair.recorder.replays == replays


def _reading(model: Any, read: Callable[[torch.Tensor], Any]) -> None:
    """Let the model do something with its hidden states on the host."""
    forward = model.model.layers[0].mlp.forward

    def reading(hidden: torch.Tensor) -> Any:
        read(hidden)
        return forward(hidden)

    model.model.layers[0].mlp.forward = reading


HOSTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda hidden: hidden.sum().item(),
    "bool": lambda hidden: bool((hidden > 0).any()),
    "tolist": lambda hidden: hidden.tolist(),
    "numpy": lambda hidden: hidden.numpy(),
    "tensor": lambda hidden: torch.tensor([1.0, 2.0]),
    "from_numpy": lambda hidden: torch.from_numpy(np.zeros(3)),
    "nonzero": lambda hidden: hidden.nonzero(),
    "mask": lambda hidden: hidden[hidden > 0],
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_that_depends_on_the_host_runs_as_before_with_one_warning(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair, rng = Pair(load(change=lambda model: _reading(model, HOSTS[host]))), random.Random(6)
    pair.prefill(5)
    for _ in range(2):
        pair.decode(rng)
    assert not pair.recorder.replays
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("decode steps run without CUDA graphs from now on: CaptureError: ")


def test_a_model_that_can_neither_be_compiled_nor_recorded_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    def branching(hidden: torch.Tensor) -> int:
        return 1 if hidden.sum() > 0 else 2

    torch._dynamo.reset()
    runner = Runner(load(change=lambda model: _reading(model, branching)), BLOCKS, SIZE)
    fuse(runner, "eager")
    record_decodes(runner, 6, LaunchRecorder())
    assert [message.partition(":")[0] for message in caplog.messages] == ["the model runs uncompiled from now on"]
    torch._dynamo.reset()


def test_a_model_whose_replay_computes_something_else_runs_as_before_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A count on the host is the same in each replay."""

    def counting(model: Any) -> None:
        forward, calls = model.model.layers[0].mlp.forward, []

        def count(hidden: torch.Tensor) -> Any:
            calls.append(None)
            return forward(hidden) * len(calls)

        model.model.layers[0].mlp.forward = count

    Pair(load(change=counting))
    assert caplog.messages == ["decode steps run without CUDA graphs: this model's replay does not compute the same"]


def test_a_recording_that_fails_later_leaves_those_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(LaunchRecorder):
        def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            if self.recordings:
                raise torch.OutOfMemoryError("no memory for a graph")
            return super().record(step)

    pair, rng = Pair(load(), Failing()), random.Random(7)
    for _ in range(2):
        pair.prefill(5)
    for _ in range(2):
        pair.decode(rng)
        pair.decode(rng, [1])
    assert pair.recorder.replays == 2 + 2
    assert len(caplog.messages) == 1


def test_recorded_steps_run_what_was_compiled_at_load() -> None:
    """Nothing is compiled while requests are served: neither for recorded steps nor for others, of any length."""

    class Again:
        full = False

        def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            return step

    compiled: list[Any] = []
    torch._dynamo.reset()
    pair = Pair(load())
    pair.replaying = Runner(pair.loaded, BLOCKS, SIZE)
    fuse(pair.replaying, lambda graph, inputs: compiled.append(graph) or graph)  # type: ignore[arg-type]
    assert len(compiled) == 2  # several tokens, and one
    record_decodes(pair.replaying, 6, Again())
    rng = random.Random(12)
    for pool in (*pair.replaying.store.keys, *pair.replaying.store.values):
        pool.fill_(torch.nan)
    for length in (1, 5, 7):
        pair.prefill(length)
        pair.decode(rng)
    pair.replaying.forward = pair.replaying.forward.computed
    pair.decode(rng)
    assert len(compiled) == 2
    torch._dynamo.reset()


def test_the_host_waits_for_the_last_copy_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("wait", "put", "send"):
        original = getattr(cuda_inputs.HostStaging, name)
        monkeypatch.setattr(
            cuda_inputs.HostStaging,
            name,
            lambda self, *args, original=original, name=name: calls.append(name) or original(self, *args),
        )
    pair = Pair(load())
    calls.clear()
    pair.prefill(5)
    assert not calls
    pair.decode(random.Random(8))
    assert calls[0] == "wait"
    assert calls[-1] == "send"
    assert set(calls[1:-1]) == {"put"}
