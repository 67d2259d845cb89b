"""Prefill apart from decode, in one process: answers, faults of the prefill worker, keys and options."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from socketserver import TCPServer, ThreadingTCPServer
from typing import Any

import pytest

from radixkv import AsyncEngine, Completion, Engine, SamplingParams
from radixkv.cli import main
from radixkv.cli.main import _parser
from radixkv.engine.runs import Run
from radixkv.errors import InvalidInput, ProtocolError
from radixkv.fleet import roles, run_transport
from radixkv.fleet.roles import KEY, RemotePrefill, measured_threshold
from radixkv.fleet.run_transport import PrefillServer, SocketTransport

SECRET = b"a secret of both roles"
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LENGTH, THRESHOLD, PATIENCE = 150, 40, 20.0
HERE, NO_RUN = "is computed here", "got no run"
Place = tuple[str, int]


@pytest.fixture(scope="module")
def prefilling() -> Iterator[Engine]:
    with Engine.load("tiny") as engine:
        yield engine


@pytest.fixture
def decoding() -> Iterator[Engine]:
    with Engine.load("tiny") as engine:
        yield engine


@contextmanager
def running(server: TCPServer) -> Iterator[Any]:
    """Serve on a thread; yields the address."""
    with server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        try:
            yield server.server_address
        finally:
            server.shutdown()


def listening(engine: Engine, lease: float = 60.0) -> AbstractContextManager[Any]:
    return running(PrefillServer(engine, ("127.0.0.1", 0), SECRET, lease))


def network(place: Place, carried: int, end: Callable[[], object]) -> AbstractContextManager[Any]:
    """A network that carries so many bytes of the prefill worker's answers; `end` is called before it closes."""

    def carry(given: socket.socket, *_: Any) -> Any:
        with socket.create_connection(place) as taken:
            threading.Thread(target=pump, args=(given, taken, 1 << 30), daemon=True).start()
            pump(taken, given, carried)
            end()

    def pump(source: socket.socket, target: socket.socket, left: int) -> None:
        with suppress(OSError):
            while left and (data := source.recv(min(left, 4096))):
                target.sendall(data)
                left -= len(data)

    return running(ThreadingTCPServer(("127.0.0.1", 0), carry))


def transport(place: Place, key: bytes = SECRET) -> SocketTransport:
    return SocketTransport(place, key, PATIENCE)


def text(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=length)


def ask(
    engine: Engine, place: Place, *prompts: list[int], namespace: str | None = None, timeout: float = PATIENCE
) -> list[Completion]:
    """Send prompts at once, as a decode worker does."""
    remote = RemotePrefill(AsyncEngine(engine), transport(place), THRESHOLD, timeout)

    async def one(prompt: list[int]) -> Completion:
        return await (await remote.submit(prompt, GREEDY, namespace=namespace)).result()

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*map(one, prompts))

    return asyncio.run(all_of_them())


def received(sock: socket.socket) -> bytes:
    """All that the other end sends until it closes."""
    with suppress(ConnectionResetError), sock.makefile("rb") as stream:
        return stream.read()
    return b""


def answers(completions: list[Completion]) -> list[Any]:
    return [each.token_ids for each in completions]


def alone(engine: Engine, *prompts: list[int]) -> list[Any]:
    """The answers of one engine, in a namespace of its own."""
    return answers(engine.generate(list(prompts), GREEDY, namespace="alone"))


def logged(caplog: pytest.LogCaptureFixture, said: str) -> list[str]:
    return [each.message for each in caplog.records if said in each.message]


def until(condition: Callable[[], Any]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_hundred_requests_have_the_answers_of_one_engine(prefilling: Engine, decoding: Engine) -> None:
    heads, draw = [text(number, 60) for number in range(5)], random.Random(9)
    prompts = [draw.choice(heads)[: draw.randint(1, 60)] + text(seed, draw.randint(1, 60)) for seed in range(100)]
    with listening(prefilling) as place:
        found = [one for at in range(0, 100, 20) for one in ask(decoding, place, *prompts[at : at + 20])]
    assert answers(found) == alone(prefilling, *prompts)
    assert decoding.stats().computed_tokens < 0.5 * sum(map(len, prompts))
    assert prefilling.stats().cache.pinned_blocks == 0


def test_a_long_prompt_is_computed_elsewhere_in_its_own_namespace(prefilling: Engine, decoding: Engine) -> None:
    with listening(prefilling) as place:
        ask(decoding, place, text(1000), namespace="ann")
    assert decoding.stats().computed_tokens == 1 + GREEDY.max_tokens - 1
    for engine in (prefilling, decoding):
        assert engine.probe(text(1000), namespace="ann").length >= LENGTH - 1
        assert engine.probe(text(1000)).length == 0


def test_short_cached_and_scored_prompts_are_computed_here(decoding: Engine, caplog: pytest.LogCaptureFixture) -> None:
    decoding.warm(text(1))
    remote = RemotePrefill(AsyncEngine(decoding), transport(("127.0.0.1", 1)), THRESHOLD, PATIENCE)
    prompts = [(text(1) + text(2, THRESHOLD), GREEDY), (text(3, THRESHOLD), GREEDY)]
    for prompt, params in [*prompts, (text(4), GREEDY.but(prompt_logprobs=0))]:
        asyncio.run(remote.submit(prompt, params, namespace=None))
    assert not logged(caplog, HERE)


FAULTS = {  # bytes of the answers that arrive, and whether the network then hangs
    "at the connection": (0, False),
    "while it computes": (64, False),
    "in the head of the run": (80, False),
    "in the images": (30_000, False),
    "a hang in the images": (30_000, True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_engine_computes_the_prompt_once(
    fault: str, prefilling: Engine, decoding: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    (carried, hangs), ended = FAULTS[fault], threading.Event()
    with listening(prefilling) as place, network(place, carried, lambda: ended.wait(PATIENCE * hangs)) as cut:
        begun = time.monotonic()
        found = ask(decoding, cut, text(7), timeout=0.5 if hangs else PATIENCE)
        assert time.monotonic() - begun < PATIENCE / 2
        ended.set()
        until(lambda: prefilling.stats().cache.pinned_blocks == 0)
    assert answers(found) == alone(prefilling, text(7))
    assert decoding.stats().computed_tokens == LENGTH + GREEDY.max_tokens - 1
    assert len(logged(caplog, HERE)) == 1


def test_a_dead_prefill_worker_is_not_asked_for_a_while(decoding: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    remote = RemotePrefill(AsyncEngine(decoding), transport(place), THRESHOLD, PATIENCE)
    for seed in range(3):
        asyncio.run(remote.submit(text(seed), GREEDY, namespace=None))
    assert len(logged(caplog, HERE)) == 1


def test_runs_of_other_settings_and_prompts_that_do_not_fit_are_computed_here(
    prefilling: Engine, decoding: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for options, said in (({"kv_dtype": "int8"}, "other weights or settings"), ({"num_blocks": 8}, "refuses the text")):
        with Engine.load("tiny", **options) as other, listening(other) as place:
            prompt = text(len(said))
            assert answers(ask(decoding, place, prompt)) == alone(prefilling, prompt)
        assert logged(caplog, said)


def test_a_lease_ends(prefilling: Engine) -> None:
    with listening(prefilling, lease=0.2) as place:
        ticket = transport(place).offer(text(20), None)
        assert prefilling.stats().cache.pinned_blocks > 0
        time.sleep(0.4)
        with pytest.raises((InvalidInput, OSError)):
            transport(place).fetch(ticket)
    assert prefilling.stats().cache.pinned_blocks == 0


def test_another_key_is_refused_by_both_ends(prefilling: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with listening(prefilling) as place:
        with pytest.raises(ProtocolError, match="another key"):
            transport(place, b"not the secret of them").offer([5, 6], None)
        until(lambda: logged(caplog, "another key"))
        with socket.create_connection(place) as sock, sock.makefile("rwb") as stream:  # its own proof is sent back
            for _ in range(2):
                stream.write(stream.read(32))
                stream.flush()
            assert not stream.read(1)


def test_connections_without_a_proof_end_soon_and_have_few_threads(
    prefilling: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_transport, "_PROOF_SECONDS", 0.5)
    monkeypatch.setattr(run_transport, "_MOST_THREADS", threading.active_count() + 3)
    with listening(prefilling) as place, ExitStack() as open_:
        idle = [open_.enter_context(socket.create_connection(place, PATIENCE)) for _ in range(9)]
        assert 1 <= sum(len(received(sock)) == 32 for sock in idle) <= 3
        assert transport(place).fetch(transport(place).offer([5, 6], None)).tokens.tolist() == [5, 6]


@pytest.mark.parametrize("request_", ["{}", "[" * 9999])
def test_a_wrong_request_ends_its_connection_only(
    request_: str, prefilling: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(prefilling) as place:
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", lambda _: request_)
            with pytest.raises(OSError, match="closed the connection"):
                transport(place).offer([5, 6], None)
        assert logged(caplog, NO_RUN)
        assert transport(place).fetch(transport(place).offer([5, 6], None)).tokens.tolist() == [5, 6]


@pytest.mark.parametrize(("slow_from", "threshold"), [(256, 256), (10_000, float("inf"))])
def test_the_threshold_is_the_first_size_that_arrives_sooner(
    slow_from: int, threshold: float, prefilling: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sizes = [0.0], list[int]()

    class Timed(SocketTransport):
        def fetch(self, ticket: Any) -> Run:
            clock[0] += 1
            return super().fetch(ticket)

    def warm(tokens: list[int], namespace: str) -> None:
        sizes.append(len(tokens))
        clock[0] += 2 if len(tokens) >= slow_from else 0.5

    with listening(prefilling) as place, Engine.load("tiny") as engine, monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: clock[0])
        patched.setattr(engine, "warm", warm)
        assert measured_threshold(engine, Timed(place, SECRET, PATIENCE)) == threshold
    assert sizes == [32, *(size for size in (32, 64, 128, 256, 512, 1024, 2048) if size <= threshold)]


@pytest.mark.parametrize(
    ("key", "address", "said"),
    [
        ("", "127.0.0.1:0", KEY),
        ("short", "127.0.0.1:0", KEY),
        ("k" * 16, "here", "HOST:PORT"),
        *(("k" * 16, f"127.0.0.1:0 --prefill-timeout={wrong}", "-timeout") for wrong in ("0", "nan")),
        *(("k" * 16, f"127.0.0.1:0 --prefill-threshold={wrong}", "-threshold") for wrong in ("-1", "nan")),
    ],
)
def test_wrong_options_are_refused(key: str, address: str, said: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(KEY, key)
    assert main(["worker", "tiny", "--role", "prefill", "--prefill-address", *address.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("broken", [False, True])
def test_a_prefill_worker_serves_until_a_signal_or_its_engine_breaks(
    broken: bool, tmp_path: Path, decoding: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is in a file."""
    (tmp_path / "key").write_bytes(SECRET + b"\n")
    monkeypatch.setenv(KEY, f"@{tmp_path / 'key'}")
    handle, found = PrefillServer.handle_request, list[Any]()

    def serve_twice(server: Any) -> None:
        if found and not broken:
            os.kill(os.getpid(), signal.SIGTERM)
        asking = threading.Thread(target=lambda: found.extend(ask(decoding, server.server_address, text(5))))
        asking.start()
        while asking.is_alive():
            handle(server)
        if broken:
            server._engine.client.thread.stop()

    monkeypatch.setattr(PrefillServer, "handle_request", serve_twice)
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = main(["worker", "tiny", "--role", "prefill", "--prefill-address", "127.0.0.1:0", "--monitor", "off"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, len(found)) == (broken, 1)
    assert decoding.stats().computed_tokens == GREEDY.max_tokens


def test_a_decode_worker_measures_or_has_a_fixed_threshold(prefilling: Engine, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(KEY, SECRET.decode())
    said = list[str]()
    with listening(prefilling) as place, Engine.load("tiny") as engine:
        for port, options in ((place[1], []), (place[1], ["--prefill-threshold", "77"]), (1, [])):
            role = ["worker", "tiny", "--role", "decode", "--prefill-address", f"127.0.0.1:{port}", *options]
            arguments = _parser().parse_args(role)
            roles.remote_prefill(arguments, roles.place_of(arguments), engine)
            said.append(capsys.readouterr().err)
    assert "cannot" not in said[0] and "more than 77 uncached" in said[1]
    assert "cannot be measured" in said[2] and "more than 2048 uncached" in said[2]
