"""A whole engine with kernels and graphs on a simulated GPU: nothing waits while it serves, whatever runs late."""

from __future__ import annotations

import pytest

from radixkv.engine.engine import RequestEngine
from radixkv.errors import DeviceLost, EngineClosed
from tests.virtual_gpu import VirtualGpu, installed
from tests.virtual_gpu.engines import Doubled, answers, load, searched, words

Answers = list[tuple[int, ...]]
SEEDS = range(1)


CPU_ANSWERS: list[tuple[Answers, Answers]] = []


@pytest.fixture
def expected() -> tuple[Answers, Answers]:
    """The answers of an engine on the CPU, and its replies to searches."""
    if not CPU_ANSWERS:
        with load("cpu", tokenizer=words(), logits_processors=[Doubled()]) as engine:
            CPU_ANSWERS.append((answers(engine), replies(engine)))
    return CPU_ANSWERS[0]


def replies(engine: RequestEngine) -> Answers:
    """Return the replies of beam searches, and of requests with bad words and a custom processor."""
    return [tokens for tokens, _ in searched(engine)]


def load_on(gpu: VirtualGpu) -> RequestEngine:
    return load(gpu.place, attention="triton", max_batch_tokens=16, tokenizer=words(), logits_processors=[Doubled()])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_engine_waits_for_downloads_alone_and_survives_all_but_a_lost_device(
    seed: int, expected: tuple[Answers, Answers]
) -> None:
    """One engine, as loading takes seconds in the interpreter."""
    plain, chosen = expected
    with installed(VirtualGpu(seed)) as gpu, load_on(gpu) as engine:
        replays = gpu.counts["replay"]
        with gpu.serving():
            assert answers(engine) == plain
            assert answers(engine) == plain  # hits
            assert replies(engine) == chosen
        assert gpu.counts["replay"] > replays and engine.core.runner.eager.count == 0 and gpu.counts["bound launch"]
        gpu.inject("allocation", 7 * seed % 40)
        with gpu.serving(allow=["release", "synchronisation"]):
            assert answers(engine) == plain  # the failed step is launched again
        engine.client.thread.ask(engine.core.cache.check)
        gpu.inject("launch", 30 + seed)
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed.*illegal memory access"):
            answers(engine)
        launched = gpu.counts["launch"]
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed"):
            engine.generate([[1, 2, 3]])
        assert gpu.counts["launch"] == launched and not gpu.findings


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_an_engine_replays_over_kv_in_fewer_bits(kv_dtype: str) -> None:
    """Hits and forks copy codes and scales; the answers are those of torch on the CPU."""
    with load("cpu", kv_dtype=kv_dtype) as engine:
        expected = answers(engine)
    gpu = VirtualGpu(0, streams=1)  # as of torch, if other engines have used its pool of streams
    with installed(gpu), load(gpu.place, attention="triton", max_batch_tokens=16, kv_dtype=kv_dtype) as engine:
        replays = gpu.counts["replay"]
        with gpu.serving():
            assert answers(engine) == expected
            assert answers(engine) == expected
        assert engine.core.runner.store.format.name == kv_dtype
        assert gpu.counts["replay"] > replays and engine.core.runner.eager.count == 0 and not gpu.findings
