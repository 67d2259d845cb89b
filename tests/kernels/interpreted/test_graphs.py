"""Replayed steps compute the same as launched ones, on a simulated GPU, and need nothing of the host meanwhile."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv import Engine, EngineConfig, EngineStats, SamplingParams
from radixkv.attention import plan
from radixkv.models import adapter, attention_interface, cuda_graphs, cuda_inputs
from radixkv.models.cuda_graphs import ATTEMPTS, UnrecordedForward, buckets, record_graphs
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv_kernels import graph_capacity
from radixkv_kernels.graph_capacity import Bucket
from tests.models.conftest import GROUPED, make
from tests.models.step_runner import BLOCK_SIZE, chunk
from tests.virtual_gpu import VirtualGpu, installed

BLOCKS = 120
SIZES: dict[str, Any] = {
    **GROUPED, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=3.0),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_local_experts=4),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(  # its second layer reads the KV of the first
        **SIZES,
        num_kv_shared_layers=1,
        layer_types=["full_attention"] * 2,
        head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 2,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(  # its first layer attends in chunks of 8 tokens
        **SIZES,
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=1,
        moe_layers=[],
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        attention_chunk_size=8,
    ),
}


def load(
    kind: str = "llama", place: torch.device | None = None, change: Callable[[Any], None] | None = None
) -> LoadedModel:
    """Load a small random model on a simulated GPU, or with torch's attention on the CPU, without its self-test."""
    model = make(CONFIGS[kind]())
    if change is not None:
        change(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "tested", lambda loaded: 0.0)
        if place is None:
            return adapter.load(model, attention="torch")
        return adapter.load(model, device=place, attention="triton", fuse=False)


class Pair:
    """The same steps on two runners: one on a GPU, that replays, and one on the CPU. Free slots hold NaN in both.

    Nothing is recorded, and nothing waits for the GPU, in any step.
    """

    def __init__(
        self,
        gpu: VirtualGpu,
        kind: str = "llama",
        *,
        most: int = 4,
        tokens: int = 16,
        deterministic: bool = False,
        change: Callable[[Any], None] | None = None,
    ) -> None:
        self.gpu = gpu
        self.plain = Runner(load(kind, change=change), BLOCKS, BLOCK_SIZE)
        self.replaying = Runner(load(kind, gpu.place, change), BLOCKS, BLOCK_SIZE, deterministic=deterministic)
        with pytest.MonkeyPatch.context() as patch:  # all steps are compared anyway
            patch.setattr(cuda_graphs, "_replays_the_same", lambda *args: True)
            record_graphs(self.replaying, most, tokens)
        for runner in (self.plain, self.replaying):
            for pool in (*runner.store.keys, *runner.store.values):
                pool.fill_(torch.nan)
        self.free = list(range(BLOCKS))
        random.Random(5).shuffle(self.free)
        self.lives: list[tuple[int, list[int]]] = []  # length, table
        self._probes = gpu.counts["replay"]

    @property
    def replays(self) -> int:
        """The steps that were replayed since the load."""
        return self.gpu.counts["replay"] - self._probes

    @property
    def graphs(self) -> Any:
        return self.replaying.forward.graphs  # type: ignore[attr-defined]

    def prefill(self, *counts: int) -> None:
        """Add sequences, in one step."""
        chunks = []
        for tokens in counts:
            table = [self.free.pop() for _ in range(-(-tokens // BLOCK_SIZE))]
            chunks.append(chunk(range(3, 3 + tokens), 0, table))
            self.lives.append((tokens, table))
        self.run(chunks)

    def fork(self, index: int, blocks: int | None = None) -> None:
        """Add a sequence that shares all full blocks, or some."""
        length, table = self.lives[index]
        whole = length // BLOCK_SIZE if blocks is None else blocks
        self.lives.append((whole * BLOCK_SIZE, table[:whole]))

    def step(self, rng: random.Random, which: Sequence[int] | None = None, counts: Sequence[int] = ()) -> None:
        """Compute one more token of some sequences, or all; of the first ones as many as `counts` says."""
        chunks = []
        for place, index in enumerate(range(len(self.lives)) if which is None else which):
            length, table = self.lives[index]
            count = counts[place] if place < len(counts) else 1
            table = table + [self.free.pop() for _ in range(-(-(length + count) // BLOCK_SIZE) - len(table))]
            chunks.append(chunk([rng.randrange(3, 97) for _ in range(count)], length, table))
            self.lives[index] = (length + count, table)
        self.run(chunks)

    def replay(self, chunks: list[SequenceInput], sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Run a step on the GPU; return its logits there."""
        with self.gpu.serving():
            return self.replaying.run(chunks, (), sampled)

    def run(self, chunks: list[SequenceInput]) -> None:
        """Run a step on both, and compare the logits and the pools."""
        ours, expected = self.replay(chunks), self.plain.run(chunks)
        torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=1e-4)
        pools = [(*runner.store.keys, *runner.store.values) for runner in (self.replaying, self.plain)]
        for a, b in zip(*pools, strict=True):  # padded rows were not written anywhere
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-4, equal_nan=True)

    def fill(self, number: float) -> None:
        """Let all KV be the same number."""
        for runner in (self.plain, self.replaying):
            for pool in (*runner.store.keys, *runner.store.values):
                pool.fill_(number)


@pytest.mark.parametrize("kind", ["gemma2", "llama4"])
def test_replays_compute_what_steps_would(kind: str, virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, growing contexts, chunks over them, branches, shared runs and none; each in the same few graphs."""
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    pair, rng = Pair(virtual_gpu, kind), random.Random(1)
    pair.prefill(11, 2)
    pair.fork(0)
    pair.fork(0)
    pair.step(rng)
    pair.step(rng, [2, 1, 0], [7])
    pair.step(rng, [3])
    assert pair.replays == 4
    assert pair.replaying.eager.count == 0


def served(settings: EngineConfig, texts: list[list[int]], new_tokens: int, seed: int) -> tuple[EngineStats, int]:
    """Ask an engine on a simulated GPU as one on the CPU; return its stats, and how many steps were replayed."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with Engine.load(make(CONFIGS["llama"]()), settings, device="cpu") as engine:
        expected = [reply.token_ids for reply in engine.generate(texts, params)]
    model = make(CONFIGS["llama"]())
    with installed(VirtualGpu(seed)) as gpu, Engine.load(model, settings, device=str(gpu.place)) as engine:
        recorded = gpu.counts["replay"]
        with gpu.serving():
            assert [reply.token_ids for reply in engine.generate(texts, params)] == expected
            stats = engine.stats()
    assert not gpu.findings
    return stats, gpu.counts["replay"] - recorded


@pytest.mark.parametrize("deterministic", [False])
@pytest.mark.parametrize("seed", [1])
def test_an_engine_serves_all_steps_from_graphs_and_waits_only_for_sampled_tokens(
    seed: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request's chunks run next to the decodes of others. A deterministic engine computes its four chunks."""
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)
    settings = EngineConfig(
        num_blocks=60, block_size=4, max_sequences=4, max_batch_tokens=24, prefill_chunk=12, monitor=False,
        compile=False, deterministic=deterministic,
    )  # fmt: skip
    stats, replays = served(settings, [[*range(3, 12)], [*range(3, 17)], [*range(5, 10)]], 5, seed)
    assert stats.eager_steps == 4 * deterministic
    assert deterministic or replays == stats.steps


def test_an_engine_with_host_memory_replays_all_steps_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)
    texts = [[(3 + 7 * i + start) % 90 + 3 for i in range(29)] for start in (0, 20, 40)] * 2
    settings = EngineConfig(
        num_blocks=14, block_size=4, max_sequences=1, max_batch_tokens=16, prefill_chunk=12, monitor=False,
        compile=False, host_memory=1 << 20,
    )  # fmt: skip
    stats, _ = served(settings, texts, 2, 0)
    assert (stats.cache.loaded_tokens > 0, stats.eager_steps) == (True, 0)


def test_all_sizes_are_recorded_at_load_with_a_launch_for_each_kind_of_tile_that_may_occur(
    virtual_gpu: VirtualGpu,
) -> None:
    pair = Pair(virtual_gpu, most=12, tokens=40)
    assert [each.tokens for each in buckets(12, 40)] == [12, 8, 4, 2, 1, 40, 32, 16]
    assert pair.graphs.buckets == sorted(buckets(12, 40))
    plans = {bucket: pair.graphs.inputs.plans(bucket)[0] for bucket in pair.graphs.buckets}
    # Tiles have up to 16 and 32 stacked rows, of two heads each.
    assert {bucket.tokens for bucket, step in plans.items() if not step.counts[1]} == {1, 2, 4, 8}
    assert all(step.counts[0] and step.num_merges == bucket.tokens for bucket, step in plans.items())


def test_a_batch_with_more_shared_runs_than_fit_is_replayed_with_fewer(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    monkeypatch.setattr(graph_capacity, "DEPTH", 1)
    pair = Pair(virtual_gpu, tokens=0)
    pair.lives = [(9, [pair.free.pop() for _ in range(3)])]
    pair.fill(0.5)
    for blocks in (1, 2, 2):
        pair.fork(0, blocks)
    pair.step(random.Random(13))
    assert pair.replays == 1


def test_tokens_that_only_the_device_has_are_relayed_to_a_replay(virtual_gpu: VirtualGpu) -> None:
    """Those of decodes, and of decodes next to a chunk; two steps in a row before the host reads anything."""
    pair = Pair(virtual_gpu)
    pair.prefill(5, 2, 6)
    known = [chunk([token], length, table) for token, (length, table) in zip((9, 8, 7), pair.lives, strict=True)]
    steps = [known, [known[0], chunk([8, 5], *pair.lives[1]), known[2]]]
    expected = [pair.plain.run(inputs) for inputs in steps]
    unknown = [known[0]._replace(tokens=np.zeros(1, np.int32), sampled_row=3)]
    unknown += [known[2]._replace(tokens=np.zeros(1, np.int32), sampled_row=0)]
    sampled = virtual_gpu.upload(np.array([7, 96, 96, 9]))
    found = [pair.replay([unknown[0], inputs[1], unknown[1]], sampled) for inputs in steps]
    sampled.fill_(-1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-4)
    assert pair.replays == 1 + 2
    with pytest.raises(AssertionError, match="not known"):
        pair.replaying.run(unknown)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_inputs_are_sent_while_a_step_reads_the_last_ones(seed: int) -> None:
    with installed(VirtualGpu(seed)) as gpu:
        staging, found = cuda_inputs.HostStaging(32, gpu), []
        with gpu.serving():
            for step in range(5):
                staging.wait()
                staging.put(8, np.full(8, step, np.int32))
                staging.send(16)
                found.append(staging.there[8:16] + 1)
        assert [each.tolist() for each in found] == [[step + 1] * 8 for step in range(5)]
        assert not gpu.findings


LIMITS = {
    "their block tables have too many entries": (2, 4, [5]),
    "no graph of decodes has a similar size": (1, 0, []),
    "no graph of chunks of prompts has a similar size": (2, 4, [4]),
}


@pytest.mark.parametrize("reason", LIMITS)
def test_steps_that_no_graph_serves_are_counted_and_logged_once_per_reason(
    reason: str, virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "entries" in reason:
        monkeypatch.setattr(cuda_inputs, "MOST_BLOCKS", 2)
    most, tokens, counts = LIMITS[reason]
    pair, rng = Pair(virtual_gpu, most=most, tokens=tokens), random.Random(5)
    pair.fill(0.5)
    pair.lives = [(3, [pair.free.pop()]), (2 + 4 * ("entries" in reason), [pair.free.pop() for _ in range(2)])]
    for _ in range(2):
        pair.step(rng, None, [] if "entries" in reason else counts)
    assert pair.replaying.eager.count == 2
    assert caplog.messages == [f"a step runs without a CUDA graph: {reason}"]


def test_additional_rows_of_logits_come_from_a_graph_with_as_many_rows(
    virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph for four sequences has four rows; a step with more rows is computed, and all rows are right."""
    pair = Pair(virtual_gpu)
    table, other = pair.free[:2], pair.free[2:4]
    pair.run([chunk([3, 4, 5, 6, 7], 0, table)._replace(logit_rows=3), chunk([8, 9], 0, other)])
    assert (pair.replays, pair.replaying.eager.count) == (1, 0)
    later = chunk([10, 11, 12], 5, table), chunk([3, 4, 5], 2, other)
    pair.run([each._replace(logit_rows=rows) for each, rows in zip(later, (3, 2), strict=True)])
    assert (pair.replays, pair.replaying.eager.count) == (1, 1)
    assert caplog.messages == ["a step runs without a CUDA graph: no graph has as many rows of logits"]


def test_a_recording_that_fails_for_a_moment_is_tried_again(
    virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    virtual_gpu.inject("capture")
    virtual_gpu.inject("capture", 1)
    pair = Pair(virtual_gpu, most=2)
    assert len(pair.graphs.buckets) == 3
    assert virtual_gpu.counts["capture"] == 5
    assert not caplog.messages


def test_a_larger_graph_serves_the_steps_of_one_that_cannot_be_recorded(
    virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 2, 1, and 16 with chunks, only the last is recorded."""
    for number in (0, 1, 3, 4, 5, 6):
        virtual_gpu.inject("capture", number)
    pair = Pair(virtual_gpu, most=2)
    assert virtual_gpu.counts["capture"] == 3 + 2 * (ATTEMPTS - 1)
    assert pair.graphs.buckets == [Bucket(16, 2, chunks=True)]
    pair.prefill(5, 3)
    pair.step(random.Random(7))
    assert pair.replays == 2
    (message,) = caplog.messages
    assert message.startswith("2 of 3 CUDA graphs could not be recorded; larger ones")
    assert "AcceleratorError" in message


def test_a_step_that_takes_more_than_the_share_of_all_graphs_is_not_recorded(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Smaller ones are recorded."""
    monkeypatch.setattr(cuda_graphs, "SHARE", 5e-5)  # 53,687 bytes
    pair = Pair(virtual_gpu, most=1, tokens=48)
    assert [bucket.tokens for bucket in pair.graphs.buckets] == [1, 16]
    (message,) = caplog.messages
    assert re.fullmatch(r"2 of 4 CUDA graphs could not .*: a step takes up to [\d.]+ KiB, and all .* 0% of .*", message)


def test_without_memory_for_the_inputs_of_graphs_steps_run_as_before_with_one_warning(
    virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(load("llama", virtual_gpu.place), BLOCKS, BLOCK_SIZE)
    forward = runner.forward
    virtual_gpu.inject("allocation")
    record_graphs(runner, 1, 0)
    assert isinstance(runner.forward, UnrecordedForward) and runner.forward._computed is forward
    (message,) = caplog.messages
    assert message.startswith("steps run without CUDA graphs: CUDA out of memory")


@pytest.mark.parametrize("fragments", [0, 1 << 30])
def test_memory_that_torch_keeps_of_other_steps_leaves_room_for_graphs_unless_it_is_fragmented(
    virtual_gpu: VirtualGpu, fragments: int
) -> None:
    """A share of the card is free, and all else is a tensor that is gone."""
    virtual_gpu.fragments = fragments
    runner = Runner(load("llama", virtual_gpu.place), BLOCKS, BLOCK_SIZE)
    free, memory = virtual_gpu.memory()
    kept = torch.empty(free - int(cuda_graphs.SHARE * memory) // 2, dtype=torch.uint8, device=virtual_gpu.place)
    del kept
    record_graphs(runner, 1, 0)
    assert isinstance(runner.forward, cuda_graphs.ReplayedForward) == (not fragments)


def test_graphs_that_are_recorded_again_have_the_share_of_memory_of_those_before(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(virtual_gpu, most=2, tokens=0)
    monkeypatch.setattr(pair.graphs._recorder, "_limit", 1.5 * pair.graphs._recorder._taken)
    for _ in range(3):
        pair.replaying.forward.record_again()  # type: ignore[attr-defined]
        assert len(pair.graphs.buckets) == 2


def test_a_step_is_not_padded_to_a_graph_of_several_times_its_size(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_PADDING", 6)
    pair = Pair(virtual_gpu, most=1)
    chunks = [[chunk(list(range(count)), 0, [1, 2, 3, 4])] for count in (7, 8, 10, 16)]
    assert [pair.graphs.serving(inputs) for inputs in chunks] == [None, *[Bucket(16, 1, chunks=True)] * 3]


def test_weights_that_moved_are_recorded_again_in_one_go_and_no_kv_is_written(virtual_gpu: VirtualGpu) -> None:
    pair = Pair(virtual_gpu)
    pair.prefill(6)
    for runner in (pair.plain, pair.replaying):
        model: Any = runner.loaded.model
        down = model.model.layers[0].mlp.down_proj
        down.weight = torch.nn.Parameter(down.weight.detach() * 2, requires_grad=False)
    before = [pool.cpu() for pool in pair.replaying.store.keys]
    pair.replaying.forward.record_again()  # type: ignore[attr-defined]
    for pool, kept in zip(pair.replaying.store.keys, before, strict=True):
        assert torch.equal(pool.cpu().view(torch.int32), kept.view(torch.int32))
    pair.step(random.Random(8))
    assert pair.replays == 2


def test_a_deterministic_decode_has_the_same_bits_replayed_and_computed(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is padded to its own bucket in both, and never to a larger one. Chunks of prompts are computed."""
    monkeypatch.setattr(attention_interface, "SPLIT", 8)
    pair = Pair(virtual_gpu, deterministic=True)
    pair.prefill(17, 2, 1)
    assert (pair.replays, pair.replaying.eager.count) == (0, 1)
    inputs = [chunk([5], length, [*table, pair.free.pop()]) for length, table in pair.lives]
    replayed = pair.replay(inputs).cpu()
    assert pair.replays == 1
    heights = []
    model: Any = pair.replaying.loaded.model
    model.model.embed_tokens.register_forward_pre_hook(lambda _, tokens: heights.append(tokens[0].shape[-1]))
    virtual_gpu.inject("capture")
    for attempt in range(1, ATTEMPTS):
        virtual_gpu.inject("capture", 2 + attempt)
    pair.replaying.forward.record_again()  # type: ignore[attr-defined]
    assert Bucket(4, 4) not in pair.graphs.buckets
    heights.clear()
    assert torch.equal(pair.replay(inputs).cpu(), replayed)
    assert heights == [4]
    assert (pair.replays, pair.replaying.eager.count) == (1, 2)


def reading(read: Callable[[torch.Tensor], Any]) -> Callable[[Any], None]:
    """Return a change of a model that does something with its hidden states on the host."""

    def change(model: Any) -> None:
        forward = model.model.layers[0].mlp.forward

        def changed(hidden: torch.Tensor) -> Any:
            read(hidden)
            return forward(hidden)

        model.model.layers[0].mlp.forward = changed

    return change


@pytest.mark.parametrize("read", [lambda hidden: hidden.sum().item(), lambda hidden: hidden[hidden > 0]])
def test_a_model_that_waits_for_the_device_is_never_recorded_and_runs_as_before_with_one_warning(
    read: Callable[[torch.Tensor], Any], virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(load("llama", virtual_gpu.place, reading(read)), BLOCKS, BLOCK_SIZE)
    forward = runner.forward
    record_graphs(runner, 1, 16)
    assert virtual_gpu.counts["capture"] == 0
    assert isinstance(runner.forward, UnrecordedForward) and runner.forward._computed is forward
    (message,) = caplog.messages
    assert message.startswith("2 of 2 CUDA graphs could not be recorded")
    assert "called a synchronizing CUDA operation" in message
    places = np.arange(3)
    for _ in range(2):
        runner.run([SequenceInput(places.astype(np.int32), 0, places, np.zeros(1, np.int32))])
    assert runner.stats()["eager_steps"] == 2
    assert caplog.messages[1:] == ["a step runs without a CUDA graph: none could be recorded when the model was loaded"]


@pytest.mark.parametrize(
    ("capability", "dtype", "waits"),
    [((9, 0), torch.bfloat16, False), ((8, 0), torch.bfloat16, True), ((9, 0), torch.float16, True)],
)
def test_small_decodes_of_experts_are_recorded_also_where_their_grouped_products_wait(
    capability: tuple[int, int],
    dtype: torch.dtype,
    waits: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(CONFIGS, "mixtral", lambda: transformers.MixtralConfig(**SIZES | experts))
    gpu = VirtualGpu(capability=capability)
    with installed(gpu):
        runner = Runner(load("mixtral", gpu.place, lambda model: model.to(dtype)), BLOCKS, BLOCK_SIZE)
        record_graphs(runner, 16, 0)
        assert isinstance(runner.forward, cuda_graphs.ReplayedForward)
        found = [bucket.tokens for bucket in runner.forward.graphs.buckets]
    assert not gpu.findings and found == ([1, 2, 4, 8] if waits else [1, 2, 4, 8, 16])
    assert runner.loaded.model.config._experts_implementation == "grouped_mm"
    if waits:
        cost, missing = caplog.messages
        assert "steps of more than 8 tokens run without CUDA graphs" in cost
        assert missing.startswith("1 of 5 CUDA graphs") and "a copy of the offsets of groups" in missing
    else:
        assert not caplog.messages


def test_a_model_whose_replay_computes_something_else_runs_as_before_with_one_warning(
    virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """A count on the host is the same in each replay."""

    def counting(model: Any) -> None:
        forward, calls = model.model.layers[0].mlp.forward, []

        def count(hidden: torch.Tensor) -> Any:
            calls.append(None)
            return forward(hidden) * len(calls)

        model.model.layers[0].mlp.forward = count

    runner = Runner(load("llama", virtual_gpu.place, counting), BLOCKS, BLOCK_SIZE)
    forward = runner.forward
    record_graphs(runner, 1, 0)
    assert isinstance(runner.forward, UnrecordedForward) and runner.forward._computed is forward
    assert caplog.messages == ["steps run without CUDA graphs: this model's replay does not compute the same"]
