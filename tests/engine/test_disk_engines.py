"""Engines with a disk cache: restarts, other fingerprints, disks that hang or fail, and refusals."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.attention.host_store import HostCosts
from radixkv.disk import folder as folders
from radixkv.disk import store as store_module
from radixkv.disk.records import Index
from radixkv.disk.slabs import Slabs
from radixkv.engine import disk_cache, disk_stage, kv_facts
from radixkv.errors import EngineError, InvalidInput, RequestTimedOut
from radixkv.models import identity
from radixkv.models.runner import Runner
from radixkv.models.weights import reload
from radixkv.sizing.memory import host_for_disk
from tests.disk.stored import let_any_disk_do

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
SAVED = 11 * 16  # of a prompt of 200 tokens: whole blocks, without the last token
PROMPT = list(range(10, 210))


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading be worth it, whatever this machine is busy with, and write to almost full disks."""
    monkeypatch.setattr(Runner, "host_costs", lambda self, chunk: HostCosts(1e-6, 1.0))
    let_any_disk_do(monkeypatch)


def load(folder: Path, model: Any = "tiny", **fields: Any) -> Engine:
    options = {"num_blocks": 64, "host_memory": "8MiB", "disk_memory": "64MiB", "monitor": False} | fields
    engine = Engine.load(model, disk_cache=folder, **options)
    store = engine.core.records._tier.store  # type: ignore[attr-defined]
    assert store.settle(20.0)
    return engine


def run(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> tuple[tuple[int, ...], int]:
    """The tokens of a reply, and how many tokens of its prompt were read from the disk."""
    done = engine.generate([prompt], GREEDY, **options)[0]
    engine.client.thread.ask(engine.core.cache.check)
    return done.token_ids, done.usage.disk_tokens


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, tuple[int, ...]]:
    """A folder with the text of PROMPT, and the reply."""
    with load(tmp_path / "disk") as engine:
        reply, read = run(engine)
        assert not read
    return tmp_path / "disk", reply


def test_an_engine_that_is_started_again_finds_its_text(filled: tuple[Path, tuple[int, ...]]) -> None:
    folder, reply = filled
    with load(folder) as engine:
        assert run(engine) == (reply, SAVED + 16)  # the prompt's last block is complete, but for the token before
        assert run(engine) == (reply, 0)
        stats = engine.stats()
        assert stats.disk_tokens == stats.host_tokens
        assert stats.disk.written_blocks == 0, "a block is written once"


def test_bits_from_the_disk_equal_those_computed(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, logprobs=2, temperature=0.0)
    fields = {"deterministic": True, "prefill_chunk": 64}
    with load(tmp_path, **fields) as engine:
        first = engine.generate([PROMPT], params)[0]
    with load(tmp_path, **fields) as engine:
        again = engine.generate([PROMPT], params)[0]
    assert again.usage.disk_tokens >= 128 and again.usage.cached_tokens == 192
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)


def test_text_that_leaves_the_host_is_read_again(tmp_path: Path) -> None:
    prompts = [[number, *PROMPT[:100]] for number in range(1, 12)]
    with load(tmp_path, num_blocks=16, host_memory="2MiB") as engine:
        replies = [run(engine, prompt)[0] for prompt in prompts]
        assert engine.core.records._tier.store.settle(20.0)  # type: ignore[attr-defined]
        assert engine.stats().disk.written_blocks
        again = [run(engine, prompt) for prompt in prompts]
        assert [reply for reply, _ in again] == replies
        assert sum(read for _, read in again) > 200
        assert engine.stats().disk.damaged_records == 0


def test_an_idle_engine_writes_so_that_a_killed_one_loses_little(tmp_path: Path) -> None:
    with load(tmp_path / "disk") as engine:
        reply, _ = run(engine)
        until = time.monotonic() + 20
        while engine.stats().disk.written_blocks < 12 and time.monotonic() < until:
            time.sleep(0.02)
        shutil.copytree(tmp_path / "disk", tmp_path / "killed")
    (tmp_path / "killed").chmod(0o700)
    with load(tmp_path / "killed") as engine:
        assert run(engine) == (reply, SAVED + 16)


def test_requests_for_one_text_share_a_read(filled: tuple[Path, tuple[int, ...]]) -> None:
    folder, reply = filled
    with load(folder) as engine:
        done = engine.generate([PROMPT, PROMPT, [*PROMPT[:150], 9, 9]], GREEDY)
        assert [each.token_ids for each in done[:2]] == [reply, reply]
        assert engine.stats().disk.read_blocks == 12


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 8},
        {"dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"weights": "int8"},
        {"model_code": "transformers"},
    ],
)
def test_other_settings_have_a_folder_of_their_own(
    filled: tuple[Path, tuple[int, ...]], fields: dict[str, Any]
) -> None:
    folder, reply = filled
    with load(folder, **fields) as engine:
        assert run(engine)[1] == 0
    assert len(folders.listed(folder)) == 2
    with load(folder) as engine:
        assert run(engine) == (reply, SAVED + 16)


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert kv_facts._plain({"c", "a", "b"}) == ["a", "b", "c"]  # sets of texts are in another order in each


def test_other_weights_have_a_folder_of_their_own(tmp_path: Path) -> None:
    with load(tmp_path) as engine:
        model = engine.model.model
        old = {name: each.clone() for name, each in model.state_dict().items() if each.dtype.is_floating_point}
        other = {name: each + 0.01 * torch.ones_like(each) for name, each in old.items()}
        reply, _ = run(engine)
        engine.reload_weights(other)
        assert engine.core.records._tier.store.settle(20.0)  # type: ignore[attr-defined]
        assert run(engine)[1] == 0
    assert len(folders.listed(tmp_path)) == 2
    with load(tmp_path) as engine:
        assert run(engine)[0] == reply


def test_two_engines_cannot_use_one_folder(filled: tuple[Path, tuple[int, ...]]) -> None:
    folder, _ = filled
    with load(folder), pytest.raises(InvalidInput, match=f"disk_cache=.*process {os.getpid()}"):
        load(folder)
    with load(folder) as engine:
        assert run(engine)[1]


def test_what_is_cleared_is_not_found_again(tmp_path: Path) -> None:
    with load(tmp_path / "disk") as engine:
        for namespace in ("ann", ("tenant", 1), None):
            run(engine, namespace=namespace)
    with load(tmp_path / "disk") as engine:
        engine.client.thread.ask(lambda: engine.core.clear_namespace(engine.client.inputs.namespaces.number("ann")))
        reads = [run(engine, namespace="ann")[1]]  # perhaps while the deletion is under way
        assert engine.core.records._tier.store.settle(20.0)  # type: ignore[attr-defined]
        reads += [run(engine, namespace=namespace)[1] for namespace in (("tenant", 1), ("tenant", True), None, 1)]
        assert reads == [0, 192, 0, 192, 0]
        engine.clear_cache()
        shutil.copytree(tmp_path / "disk", tmp_path / "killed")  # what a process that is killed now leaves
    (tmp_path / "killed").chmod(0o700)
    with load(tmp_path / "killed") as engine:
        assert run(engine)[1] == engine.stats().disk.records == 0


def test_records_that_cannot_be_deleted_are_an_error(filled: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with load(filled[0]) as engine:
        monkeypatch.setattr(Index, "clear", fail)
        monkeypatch.setattr(os, "replace", lambda *args: fail(None))
        with pytest.raises(EngineError, match="could not delete its records: disk I/O error"):
            engine.clear_cache()
        assert run(engine)[1] == 0, "what may be deleted is not found"


def test_a_namespace_of_another_kind_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(tmp_path) as engine:
        run(engine, namespace=1.5)
        run(engine, namespace=frozenset({1}))
    with load(tmp_path) as engine:
        assert engine.stats().disk.records == 0
    assert caplog.text.count("stays in memory") == 1


def test_a_disk_that_hangs_delays_no_request_for_long(
    filled: tuple[Path, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reply = filled
    monkeypatch.setattr(disk_stage, "_LEAST_WAIT", 0.05)
    read, hangs = Slabs.read, threading.Event()

    def late(slabs: Slabs, slot: int, image: Any) -> bool:
        hangs.wait(20.0)
        return read(slabs, slot, image)

    with load(folder) as engine:
        monkeypatch.setattr(Slabs, "read", late)
        monkeypatch.setattr(disk_stage, "CLOSE_S", 0.2)
        handle = engine.submit(PROMPT, GREEDY)
        other = engine.generate([[5, 6, 7]], GREEDY)[0]  # overtakes
        assert other.usage.total_s < 20
        assert (handle.result().token_ids, handle.result().usage.disk_tokens) == (reply, 0)
        assert engine.stats().disk.abandoned_reads == 1
        engine.client.thread.ask(engine.core.cache.check)
        hangs.set()


def test_cancelled_and_timed_out_requests_end_at_once(
    filled: tuple[Path, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reply = filled
    read, hangs = Slabs.read, threading.Event()
    monkeypatch.setattr(Slabs, "read", lambda *args: bool(hangs.wait(20.0)) and read(*args))
    with load(folder) as engine:
        one, two = engine.submit(PROMPT, GREEDY), engine.submit(PROMPT, GREEDY, timeout=0.1)
        with pytest.raises(RequestTimedOut):
            two.result()
        one.cancel()
        assert engine.stats().waiting == 0
        engine.client.thread.ask(engine.core.cache.check)
        hangs.set()
        assert run(engine)[0] == reply


def test_a_fault_of_a_read_costs_hits_only(filled: tuple[Path, tuple[int, ...]]) -> None:
    folder, reply = filled
    (slab,) = folder.glob("*/slab-00000")
    data = bytearray(slab.read_bytes())
    data[len(data) // 2] ^= 1
    slab.write_bytes(data)
    with load(folder) as engine:
        done, read = run(engine)
        assert done == reply and 0 < read < SAVED
        assert engine.stats().disk.damaged_records
    with load(folder) as engine:
        assert run(engine) == (reply, SAVED + 16)


@pytest.mark.parametrize("namespace", [None, ("tenant", 1)])
def test_audits_read_the_disk(tmp_path: Path, namespace: Any) -> None:
    with load(tmp_path) as engine:
        engine.core.records._next_write = time.perf_counter() + 1000  # type: ignore[attr-defined]
        reply, _ = run(engine, namespace=namespace)
        engine.client.thread.ask(lambda: engine.core.runner.store.keys[1].add_(1.0))  # type: ignore[attr-defined]
    with load(tmp_path) as engine:
        report = engine.audit(4)
        assert report.differ and report.differences[0].namespace == namespace
        assert engine.stats().disk.read_blocks
        assert run(engine, namespace=namespace)[0] == reply
    with load(tmp_path) as engine:
        assert run(engine, namespace=namespace)[0] == reply
        assert not engine.audit(24).differ


def test_wrong_kv_is_dropped_from_the_disk_too(filled: tuple[Path, tuple[int, ...]]) -> None:
    folder, reply = filled
    with load(folder) as engine:
        run(engine)
        engine.client.thread.ask(lambda: engine.core.runner.store.keys[1].add_(1.0))  # type: ignore[attr-defined]
        assert engine.audit(1000).differ
    with load(folder) as engine:
        assert run(engine)[0] == reply


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"disk_memory": "1MiB"}, "disk_memory of .* has room for"),
        ({"disk_memory": "auto"}, "disk_memory"),
        ({"prefix_cache": False}, "prefix_cache=False has none"),
    ],
)
def test_wrong_settings_are_refused_at_load(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        load(tmp_path, **fields)


def test_wrong_folders_are_refused_at_load(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o755)
    for folder, reason in ((file, "no folder"), (public, "chmod 700")):
        with pytest.raises(InvalidInput, match=f"disk_cache=.*{reason}"):
            load(folder)


def test_a_disk_has_host_memory_by_default(tmp_path: Path) -> None:
    with load(tmp_path, num_blocks=160, host_memory=None) as engine:
        assert engine.stats().cache.host_blocks == 80
    assert host_for_disk(0, 1 << 30, 1 << 16) == 256 << 20
    assert host_for_disk("1GiB", 1 << 30, 1 << 16) == "1GiB"
    assert host_for_disk(None, 16 << 30, 1 << 16) == 2 << 30


# ---- what is written


def test_after_a_fault_of_writing_the_text_in_memory_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PAUSE", 0.0)
    with load(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Slabs, "sync", lambda slabs: (_ for _ in ()).throw(OSError(28, "full")))
            reply, _ = run(engine)
            until = time.monotonic() + 20
            while not engine.stats().disk.failed_writes and time.monotonic() < until:
                time.sleep(0.02)
        assert engine.stats().disk.failed_writes
    with load(tmp_path) as engine:
        assert run(engine) == (reply, SAVED + 16)


def test_a_small_disk_keeps_the_text_that_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "disk_blocks", lambda *args: 12)
    prompts = [[number, *range(300, 500)] for number in (1, 2, 3)]
    with load(tmp_path) as engine:
        engine.core.records._next_write = time.perf_counter() + 1000  # type: ignore[attr-defined]
        for prompt in prompts:
            run(engine, prompt)
    with load(tmp_path) as engine:
        assert [engine.probe(prompt).disk for prompt in prompts] == [0, 0, 192]


def test_a_session_that_ends_before_the_folder_is_open_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, late = folders.DiskFolder.place, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(folders.DiskFolder, "place", lambda *args: late.wait(20.0) and place(*args))
        with Engine.load("tiny", disk_cache=tmp_path, num_blocks=64, host_memory="8MiB", monitor=False) as engine:
            reply, _ = run(engine)
            threading.Timer(0.3, late.set).start()
    with load(tmp_path) as engine:
        assert run(engine)[0] == reply and engine.stats().disk_tokens


@pytest.mark.parametrize("change", ["file", "tensors"])
def test_weights_that_change_before_their_digest_is_known_have_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = tmp_path / "model"
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine:
        files = identity.files_of(engine.model.model)
    shutil.copytree(files[0].parent, source)
    late, module = threading.Event(), {"file": folders.DiskFolder, "tensors": reload}[change]
    name = {"file": "digest", "tensors": "digest_of_tensors"}[change]
    digest = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: late.wait(20.0) and digest(*args))
    with Engine.load(str(source), disk_cache=tmp_path / "disk", num_blocks=64, monitor=False) as engine:
        if change == "tensors":
            engine.reload_weights()
            parameters = list(engine.model.model.parameters())
            with torch.no_grad():
                parameters[0].add_(0.01)
        else:
            os.utime(source / files[0].name, (1, 1))
        late.set()
        assert engine.core.records._tier.store.settle(20.0)  # type: ignore[attr-defined]
        assert not engine.core.records._tier.store.ready  # type: ignore[attr-defined]
    assert len(folders.listed(tmp_path / "disk")) == (change == "tensors")  # of the weights in the file


# ---- reads that are late


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of the disk wait until this is set."""
    read, go = Slabs.read, threading.Event()
    monkeypatch.setattr(Slabs, "read", lambda *args: bool(go.wait(20.0)) and read(*args))
    yield go
    go.set()


def test_an_audit_while_a_request_waits_for_the_same_text(
    filled: tuple[Path, tuple[int, ...]], gate: threading.Event
) -> None:
    folder, reply = filled
    with load(folder) as engine:
        handle, report = engine.submit(PROMPT, GREEDY), engine.client.audit(4)
        threading.Timer(0.3, gate.set).start()
        assert handle.result(timeout=20).token_ids == reply
        assert not report.result(20).differ
        engine.client.thread.ask(engine.core.cache.check)
        assert not engine.core.cache.state.host.blocks.lent  # type: ignore[union-attr]


def test_text_that_is_cleared_while_it_is_read_is_not_used(tmp_path: Path, gate: threading.Event) -> None:
    with load(tmp_path) as engine:
        replies = [run(engine, namespace=each)[0] for each in "xy"]
    with load(tmp_path) as engine:
        handles = [engine.submit(PROMPT, GREEDY, namespace=each) for each in "xy"]
        engine.client.thread.ask(lambda: engine.core.clear_namespace(engine.client.inputs.namespaces.number("x")))
        gate.set()
        done = [each.result(timeout=20) for each in handles]
        assert [each.token_ids for each in done] == replies
        assert done[0].usage.disk_tokens == 0
        assert engine.core.records._tier.store.settle(20.0)  # type: ignore[attr-defined]
        engine.client.thread.ask(engine.core.cache.check)


def test_a_disk_that_hangs_leaves_the_host_alone(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[number, *PROMPT] for number in range(1, 9)]
    with load(tmp_path, num_blocks=256) as engine:
        for prompt in prompts:
            run(engine, prompt)
    monkeypatch.setattr(disk_stage, "_LEAST_WAIT", 0.05)
    with load(tmp_path, host_memory="4MiB") as engine:
        for prompt in prompts:
            run(engine, prompt)
        host = engine.core.cache.state.host
        assert host is not None and len(host.blocks.lent) <= host.blocks.num_blocks // 2
        assert caplog.text.count("answers too late") == 1
        gate.set()


def test_many_sessions_after_a_restart_wait_for_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[number, *PROMPT] for number in range(1, 17)]
    with load(tmp_path, num_blocks=512) as engine:
        for prompt in prompts:
            run(engine, prompt)
    monkeypatch.setattr(disk_stage, "_LEAST_WAIT", 0.0)
    read = Slabs.read
    monkeypatch.setattr(Slabs, "read", lambda *args: time.sleep(0.005) or read(*args))
    with load(tmp_path, num_blocks=512, host_memory="64MiB") as engine:
        store = engine.core.records._tier.store  # type: ignore[attr-defined]
        monkeypatch.setattr(store, "seconds", lambda blocks: blocks * 0.01)
        done = engine.generate(prompts, GREEDY)
        assert all(each.usage.disk_tokens for each in done)


def test_a_folder_stays_locked_while_its_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_stage, "CLOSE_S", 0.2)
    go, sync = threading.Event(), Slabs.sync
    monkeypatch.setattr(Slabs, "sync", lambda slabs: go.wait(20.0) and sync(slabs))
    with load(tmp_path) as engine:
        run(engine)
    with pytest.raises(InvalidInput, match="used by process"):
        load(tmp_path)
    go.set()


def test_a_clear_that_is_cancelled_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clear = Index.clear
    monkeypatch.setattr(Index, "clear", lambda index: time.sleep(0.3) or clear(index))

    async def main() -> None:
        async with await AsyncEngine.load("tiny", disk_cache=tmp_path, num_blocks=64, monitor=False) as engine:
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.clear_cache(), 0.1)

    asyncio.run(main())
    assert "exception" not in caplog.text
