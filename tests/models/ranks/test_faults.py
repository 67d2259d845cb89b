"""A rank that raises fails one request; a rank that dies or hangs ends the engine; no process is ever left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed as dist
import transformers

from radixkv import Engine
from radixkv.errors import DeviceLost, EngineClosed, InvalidInput, RequestFailed
from radixkv.models.ranks import processes, rank_zero
from tests.models.conftest import SIZES, make
from tests.models.ranks.faulty_rank import FILE, PHASES, faulty, order
from tests.models.ranks.worlds import GREEDY, LOAD, llama, others, ranked, runs, tokens, until
from tests.models.recurrent.hybrids import hybrid
from tests.selection import mostly_long

GOOD = [[3, 4, 5], [3, 4, 6]]
CROWD = [[seed, *range(10, 40)] for seed in range(3, 11)]  # more than the pool holds
HOST: dict[str, Any] = {"num_blocks": 24, "host_memory": "4MB"}
REASONS = {"die": "was ended by signal 9", "hang": "does not answer for 3 seconds"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", autouse=True)
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that orders faults of transfers."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("orders") / "order"
        patch.setattr(processes, "PROGRAM", "tests.models.ranks.faulty_rank")
        patch.setenv(FILE, str(path))
        yield path


class TestARankThatRaises:
    @pytest.fixture(scope="class")
    def engine(self, folder: str) -> Iterator[Engine]:
        with ranked(folder, **HOST) as engine:
            yield engine

    @pytest.fixture(scope="class")
    def single(self, folder: str) -> Iterator[Engine]:
        with Engine.load(folder, **LOAD) as engine:
            yield engine

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("phase", PHASES)
    def test_fails_one_request(
        self, engine: Engine, single: Engine, phase: str, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own, run = engine.core.runner.own, engine.core.runner.own.run
        monkeypatch.setattr(own, "run", lambda inputs, *rest: faulty(inputs, 0, lambda: run(inputs, *rest)))
        prompts = [GOOD[0], [9, order("raise", phase, rank), 4], GOOD[1]]
        first, bad, last = [engine.submit(prompt, GREEDY) for prompt in prompts]
        with pytest.raises(RequestFailed, match="ValueError: as ordered"):
            bad.result(60)
        expected = tokens(single, GOOD)
        assert [[each.result(60).token_ids] for each in (first, last)] == expected == tokens(engine, GOOD)

    @pytest.mark.parametrize("transfer", mostly_long(["offload", "load"], "load"))
    def test_in_a_transfer_fails_no_request(self, engine: Engine, single: Engine, orders: Path, transfer: str) -> None:
        for text in ("", f"raise {transfer}", ""):
            orders.write_text(text)
            assert tokens(engine, CROWD) == tokens(single, CROWD)
        stats = engine.stats()
        assert getattr(stats, f"failed_{transfer}s") > 0 and stats.host_tokens > 0

    def test_dies_and_ends_the_engine(self, engine: Engine) -> None:
        """The last test of this engine: to start two ranks takes longer than all of them."""
        ends(engine, [[9, order("die", "inside"), 4]], REASONS["die"])


def ends(engine: Engine, prompts: list[list[int]], reason: str) -> None:
    """Check that the requests end with one error within thrice the timeout, and that no process is left."""
    began = time.monotonic()
    for handle in [engine.submit(prompt, GREEDY) for prompt in prompts]:
        with pytest.raises(EngineClosed, match=f"rank 1 of 2 {reason}") as caught:
            handle.result(60)
        assert isinstance(caught.value.__cause__, DeviceLost)
    assert time.monotonic() - began < 15 and not others()
    with pytest.raises(EngineClosed, match=f"rank 1 of 2 {reason}"):
        engine.submit(GOOD[0])


CASES = [(fault, phase) for fault in REASONS for phase in PHASES if (fault, phase) != ("die", "inside")]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "phase"), CASES)
def test_a_rank_that_dies_or_hangs_ends_the_engine(folder: str, fault: str, phase: str) -> None:
    with ranked(folder, rank_timeout=3.0) as engine:
        ends(engine, [[9, order(fault, phase), 4]], REASONS[fault])


@pytest.mark.long
@pytest.mark.parametrize("transfer", ["offload", "load"])
@pytest.mark.parametrize("fault", list(REASONS))
def test_so_does_one_in_a_transfer(folder: str, orders: Path, fault: str, transfer: str) -> None:
    orders.write_text("")
    with ranked(folder, rank_timeout=3.0, **HOST) as engine:
        engine.generate(CROWD, GREEDY)
        orders.write_text(f"{fault} {transfer}")
        ends(engine, CROWD[:4], REASONS[fault])
    orders.write_text("")


@pytest.mark.long
def test_a_rank_may_take_longer_than_the_timeout_to_reload(folder: str, orders: Path) -> None:
    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with ranked(folder, rank_timeout=3.0) as engine:
        before = tokens(engine, GOOD)
        orders.write_text("slow")
        engine.reload_weights(state)
        assert tokens(engine, GOOD) == before
    orders.write_text("")


@pytest.mark.long
def test_an_idle_engine_ends_with_a_rank_and_the_next_one_works(folder: str) -> None:
    with ranked(folder) as engine:
        others()[0].terminate()  # which a rank ignores
        before = tokens(engine, GOOD)
        others()[0].kill()
        until(lambda: engine.client.thread.closed, 3 * 2)
    with ranked(folder) as engine:
        assert tokens(engine, GOOD) == before


# ---- rank 0 ends

SCRIPT = f"""
import sys
from radixkv import Engine, SamplingParams
engine = Engine.load(sys.argv[1], device="cpu", num_blocks=64, block_size=8, tensor_parallel=2)
print("loaded", flush=True)
while True:
    engine.generate([{GOOD[0]}], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
"""
SERVE = ("-m", "radixkv", "serve", "--tensor-parallel", "2", "--port", "0", "--kv-memory", "1MB", "--quiet")


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], **pipes) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_other_rank_ends_with_rank_0(folder: str, number: signal.Signals) -> None:
    with process("-c", SCRIPT, folder) as rank_0:
        assert rank_0.stdout is not None and rank_0.stdout.readline() == "loaded\n"
        (other,) = others(rank_0.pid)
        rank_0.send_signal(number)
        rank_0.communicate(timeout=30)
        until(lambda: not runs(other), 15)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0, 4.0])
def test_an_interrupt_while_a_model_is_loaded_leaves_no_process(folder: str, seconds: float) -> None:
    with process("-c", SCRIPT, folder) as rank_0:
        until(lambda: others(rank_0.pid))
        (other,) = others(rank_0.pid)
        time.sleep(seconds)
        rank_0.send_signal(signal.SIGINT)
        rank_0.communicate(timeout=60)
        until(lambda: not runs(other), 15)


@pytest.mark.long
def test_a_server_ends_its_streams_and_then_all_ranks(folder: str) -> None:
    with process(*SERVE, folder) as rank_0:
        assert rank_0.stderr is not None
        url = next(line.split()[-1] for line in rank_0.stderr if "/v1" in line)
        (other,) = others(rank_0.pid)
        body = {"model": folder, "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}]}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            rank_0.send_signal(signal.SIGTERM)
            assert [*filter(None, lines)][-1] == "data: [DONE]"
        rank_0.communicate(timeout=60)
        assert rank_0.returncode == 0
        until(lambda: not runs(other), 15)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "int8"}, "weights='int8' cannot be divided"),
        ({"compile": True}, "compile=True is not possible"),
        ({"model": "tiny"}, "layer 0 has 3 KV heads, which do not divide by 2 ranks"),
        ({"model": lambda folder: make(transformers.LlamaConfig(**SIZES))}, "loads a model from its files"),
        ({"model": lambda folder: hybrid("qwen3_next").save_pretrained(folder) or str(folder)}, "recurrent"),
        ({"model": lambda folder: (folder / "a.gguf").write_bytes(b"GGUF") and folder / "a.gguf"}, "is a GGUF file"),
    ],
)
def test_what_ranks_cannot_run_is_refused_before_a_process_starts(
    options: dict[str, Any], reason: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(rank_zero, "Processes")
    options = {name: value(tmp_path) if callable(value) else value for name, value in options.items()}
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        Engine.load(**{"model": folder, **options}, device="cpu", tensor_parallel=2)


def test_a_process_with_a_world_of_its_own_starts_no_rank(folder: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidInput, match=r"already takes part in a torch\.distributed world"):
            Engine.load(folder, device="cpu", tensor_parallel=2)
        assert not others()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_cannot_start_is_reported(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROGRAM", "no.such.module")
    with pytest.raises(DeviceLost, match="rank 1 of 2 has ended with status 1"):
        Engine.load(folder, device="cpu", tensor_parallel=2)
