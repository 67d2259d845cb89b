"""A whole engine on a simulated GPU: the answers of the CPU, whatever runs late, and whatever fails."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from radixkv.engine import engine as engine_module
from radixkv.engine.core import Core
from radixkv.engine.engine import RequestEngine
from radixkv.errors import DeviceLost, EngineClosed
from radixkv.models import adapter, loader
from radixkv.sampling.params import SamplingParams
from tests.models.recurrent.hybrids import hybrid
from tests.selection import mostly_long
from tests.virtual_gpu import VirtualGpu, installed
from tests.virtual_gpu.engines import Doubled, answers, load, scored, searched, words


@cache
def expected() -> list[tuple[int, ...]]:
    with load("cpu") as engine:
        return answers(engine)


@pytest.mark.parametrize(("seed", "streams"), [(0, 32), (1, 32), (2, 32), (1, 1)])
def test_answers_match_the_cpu(seed: int, streams: int) -> None:
    with installed(VirtualGpu(seed, streams=streams)) as gpu, load(gpu.place) as engine:
        with gpu.serving():
            assert answers(engine) == expected()
            assert answers(engine) == expected()  # hits
        stats = engine.stats()
        assert stats.cached_tokens and stats.cache.copied_blocks
        engine.client.thread.ask(engine.core.cache.check)
        assert not gpu.findings


Scores = tuple[list[tuple[tuple[int, ...], float]], list[list[float]]]


@cache
def expected_scores() -> Scores:
    with load("cpu", tokenizer=words(), logits_processors=[Doubled()]) as engine:
        return searched(engine), scored(engine)


@pytest.mark.parametrize("seed", range(2))
def test_beams_bad_words_and_scores_match_the_cpu(seed: int) -> None:
    """Nothing waits but for downloads; the processors of bad words and of users do not, either."""
    replies, scores = expected_scores()
    with (
        installed(VirtualGpu(seed)) as gpu,
        load(gpu.place, tokenizer=words(), logits_processors=[Doubled()]) as engine,
    ):
        for _ in range(2):  # then with hits
            with gpu.serving():
                found, probabilities = searched(engine), scored(engine)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in replies]
            assert [score for _, score in found] == pytest.approx([score for _, score in replies], abs=1e-5)
            for mine, theirs in zip(probabilities, scores, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)
        assert engine.stats().host_bound_rows
        engine.client.thread.ask(engine.core.cache.check)
        assert not gpu.findings


@pytest.mark.parametrize("after", range(20, 400, 90))
def test_a_step_without_memory_is_tried_again_or_fails_alone(after: int) -> None:
    with installed(VirtualGpu(after)) as gpu, load(gpu.place) as engine:
        gpu.inject("allocation", after)
        assert answers(engine) == expected()
        engine.client.thread.ask(engine.core.cache.check)
        assert gpu.counts["allocation"] > after and not gpu.findings


@pytest.mark.parametrize("after", [0, 60, 200])
def test_a_lost_device_ends_the_engine_with_its_reason(after: int) -> None:
    with installed(VirtualGpu(after)) as gpu, load(gpu.place) as engine:
        gpu.inject("launch", after)
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed.*illegal memory access"):
            answers(engine)
        launched = gpu.counts["launch"]
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed.*illegal memory access"):
            engine.generate([[1, 2, 3]])
        assert gpu.counts["launch"] == launched and not gpu.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_named_model_is_read_as_without_a_simulated_gpu(dtype: torch.dtype) -> None:
    """Libraries build a model on the meta device before they read its weights."""
    cpu = torch.device("cpu")
    options = {"tokenizer": None, "dtype": dtype, "revision": None, "trust_remote_code": False}
    expected, _ = loader.read("tiny", device=cpu, **options)
    with installed(VirtualGpu()) as gpu:
        found, _ = loader.read("tiny", device=gpu.place, **options)
        tensors = dict(found.named_buffers()) | dict(found.named_parameters(remove_duplicate=False))
        for name, theirs in [*expected.named_buffers(), *expected.named_parameters(remove_duplicate=False)]:
            assert tensors[name].device == gpu.place
            torch.testing.assert_close(tensors[name].cpu(), theirs, rtol=0, atol=0)  # of the same dtype
        assert found.dtype == dtype
        assert torch.empty(1, device=gpu.place).shape == (1,)
        with gpu.place:
            skeleton = torch.nn.Linear(2, 3)
        with pytest.raises(AssertionError, match="for the meta device"):
            skeleton(torch.ones(1, 2, device=gpu.place))
        assert not gpu.findings


def test_the_pool_leaves_the_memory_of_the_largest_step() -> None:
    """A tenth of this card is less than a step of 256 tokens takes."""
    prompts = [[start + i % 60 for i in range(100)] for start in (3, 5, 7)]
    memory = 2 << 20
    with (
        installed(VirtualGpu(memory=memory)) as gpu,
        load(gpu.place, num_blocks=None, max_batch_tokens=256, prefill_chunk=64) as engine,
    ):
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
        assert engine.stats().cache.num_blocks * engine.core.runner.store.bytes_per_block > memory / 3
        assert gpu.reserved() < memory and not gpu.findings


def turns(engine: RequestEngine) -> list[tuple[int, ...]]:
    """Return the replies of prompts that come back one after the other, most of them after they were evicted."""
    params = SamplingParams(temperature=0, max_tokens=5)
    texts = [[(3 + 7 * i + start) % 90 + 3 for i in range(33)] for start in (0, 20, 40)]
    return [engine.generate([text], params)[0].token_ids for text in [*texts, *texts, *texts]]


@pytest.mark.parametrize(("depth", "seed"), mostly_long([(0, 0), (0, 1), (1, 0), (1, 1)], (1, 0)))
def test_loads_from_host_memory_match_the_cpu(depth: int, seed: int) -> None:
    """A small pool swaps most blocks; prompts that part inside a block load and copy pieces of blocks.

    At depth 1 nothing waits but for downloads.
    """
    params = SamplingParams(temperature=0, max_tokens=5)
    texts = [[(3 + 7 * i + start) % 90 + 3 for i in range(33)] for start in (0, 20, 40)]
    texts += [text[:cut] + [5] * 9 for text, cut in zip(texts, (22, 19, 14), strict=True)]

    def core(*parts: Any, **options: Any) -> Core:
        return Core(*parts, **{**options, "depth": depth})

    def replies(place: torch.device | str, gpu: VirtualGpu | None = None) -> list[tuple[int, ...]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "Core", core)
            engine = load(place, num_blocks=16, host_memory=1 << 20)
        waits = () if depth else ("synchronisation",)
        with engine, nullcontext() if gpu is None else gpu.serving(allow=waits):
            found = [engine.generate([text], params)[0].token_ids for text in [*texts, *texts]]
            stats = engine.stats().cache
            assert stats.loaded_tokens and stats.offloaded_blocks and engine.core.depth == depth
            engine.client.thread.ask(engine.core.cache.check)
            return found

    expected = replies("cpu")
    with installed(VirtualGpu(seed)) as gpu:
        assert replies(gpu.place, gpu) == expected
        assert not gpu.findings


@pytest.mark.long
def test_steps_over_recurrent_state_wait_for_nothing() -> None:
    settings: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_sequences": 4, "prefill_chunk": 8, "seed": 3}
    settings |= {"attention": "torch", "compile": False, "monitor": False}

    def replies(place: torch.device | str, gpu: VirtualGpu | None = None) -> list[tuple[int, ...]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "tested", lambda loaded: 0.0)
            engine = RequestEngine.load(hybrid("lfm2"), device=str(place), **settings)
        with engine, nullcontext() if gpu is None else gpu.serving():
            found = [*answers(engine), *turns(engine)]
            assert engine.stats().cached_tokens and engine.core.depth == int(gpu is not None)
            return found

    expected = replies("cpu")
    with installed(VirtualGpu()) as gpu:
        assert replies(gpu.place, gpu) == expected
        assert not gpu.findings
