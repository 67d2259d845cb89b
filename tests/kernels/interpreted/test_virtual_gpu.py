"""A whole engine with kernels and graphs on a simulated GPU: nothing waits while it serves, whatever runs late."""

from __future__ import annotations

import os

import pytest

from radixkv.engine.engine import RequestEngine
from radixkv.errors import DeviceLost, EngineClosed
from tests.virtual_gpu import VirtualGpu, installed
from tests.virtual_gpu.engines import answers, load

Answers = list[tuple[int, ...]]
SEEDS = range(1 + 30 * bool(os.environ.get("RADIXKV_LONG")))


CPU_ANSWERS: list[Answers] = []


@pytest.fixture
def expected() -> Answers:
    """The answers of an engine on the CPU."""
    if not CPU_ANSWERS:
        with load("cpu") as engine:
            CPU_ANSWERS.append(answers(engine))
    return CPU_ANSWERS[0]


def load_on(gpu: VirtualGpu) -> RequestEngine:
    return load(gpu.place, attention="triton", max_batch_tokens=16)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_engine_waits_for_downloads_alone_and_survives_all_but_a_lost_device(seed: int, expected: Answers) -> None:
    """One engine, as loading takes seconds in the interpreter."""
    with installed(VirtualGpu(seed)) as gpu, load_on(gpu) as engine:
        replays = gpu.counts["replay"]
        with gpu.serving():
            assert answers(engine) == expected
            assert answers(engine) == expected  # hits
        assert gpu.counts["replay"] > replays and engine.core.runner.eager.count == 0
        gpu.inject("allocation", 7 * seed % 40)
        with gpu.serving(allow=["release", "synchronisation"]):
            assert answers(engine) == expected  # the failed step is launched again
        engine.client.thread.ask(engine.core.cache.check)
        gpu.inject("launch", 30 + seed)
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed.*illegal memory access"):
            answers(engine)
        launched = gpu.counts["launch"]
        with pytest.raises((DeviceLost, EngineClosed), match=r"the device failed"):
            engine.generate([[1, 2, 3]])
        assert gpu.counts["launch"] == launched and not gpu.findings
