"""A queue before the simulated cache: waits, service times, orders, and the bound on overtaking."""

from __future__ import annotations

import json
from array import array

import pytest

from radixkv.cache import POLICIES
from radixkv_traces import cli
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.simulate_queue import Service, replay_queue
from radixkv_traces.workload import Workload, prepare

SERVICE = Service(prefill_rate=10.0, decode_rate=2.0, max_sequences=8)


def request(
    seconds: float, blocks: list[int], output: int = 0, session: str | None = None, namespace: str | None = None
) -> TraceRequest:
    return TraceRequest(seconds * 1000, 10 * len(blocks), output, array("q", blocks), session, namespace=namespace)


def workload(*requests: TraceRequest) -> Workload:
    return prepare(requests, 10)


def test_prefills_run_one_at_a_time_and_hits_take_no_time() -> None:
    made = workload(request(0, [1, 2]), request(0, [1, 2, 3]), request(9, [1]))
    result = replay_queue(made, 100, "lru", "fcfs", SERVICE)
    assert list(result.waits) == [0.0, 2.0, 0.0]  # 20 tokens at 10 a second
    assert list(result.ttfts) == [2.0, 3.0, 0.0]
    assert (result.input_tokens, result.hit_tokens, result.finished) == (60, 30, True)


def test_running_answers_take_places_and_a_session_waits_for_its_answer() -> None:
    one_place = Service(prefill_rate=10.0, decode_rate=2.0, max_sequences=1)
    made = workload(request(0, [1], output=10), request(0, [2], output=10))
    assert list(replay_queue(made, 100, "lru", "fcfs", one_place).waits) == [0.0, 6.0]  # 1 s prefill, 5 s answer
    assert list(replay_queue(made, 100, "lru", "fcfs", SERVICE).waits) == [0.0, 1.0]
    session = workload(request(0, [1], output=10, session="s"), request(2, [1, 3], output=4, session="s"))
    result = replay_queue(session, 100, "lru", "fcfs", SERVICE)
    assert list(result.waits) == [0.0, 0.0]  # it arrives with the answer, after 6 s
    assert result.duration == 6 + 1 + 2


def test_the_longest_cached_prefix_goes_first() -> None:
    made = workload(request(0, [1, 2]), request(1, [5, 6]), request(1, [1, 2, 3]), request(1, [7]))
    served = {order: replay_queue(made, 4, "lru", order, SERVICE).hit_tokens for order in ("fcfs", "longest-prefix")}
    assert served == {"fcfs": 20, "longest-prefix": 20}
    small = {order: replay_queue(made, 3, "lru", order, SERVICE).hit_tokens for order in served}
    assert small == {"fcfs": 10, "longest-prefix": 20}  # in arrival order, a block of the prefix is evicted first


def test_an_overdue_request_goes_before_longer_prefixes_and_older_ones_first() -> None:
    cold = [request(0.25, [each]) for each in (8, 9)]
    made = workload(request(0, [1]), *cold, *(request(0.5, [1, each]) for each in (2, 3, 4)))
    service = Service(10.0, 2.0, 8, max_delay=1.4)
    waits = list(replay_queue(made, 100, "lru", "longest-prefix", service).waits)
    assert waits == [0.0, 0.5, 1.5, 2.75, 3.75, 4.5]  # [1, 2] overtakes both at 1.0 s, so they are overdue at 3.0 s
    alone = replay_queue(made, 100, "lru", "longest-prefix", SERVICE)
    assert list(alone.waits) == [0.0, 0.5, 1.5, 2.5, 3.75, 4.75]


@pytest.mark.parametrize("order", ["fcfs", "longest-prefix"])
def test_namespaces_take_turns(order: str) -> None:
    many = [request(0, [each] * 300, namespace="busy") for each in range(9)]
    made = workload(*many, request(1, [50], namespace="quiet"), request(1, [51], namespace="quiet"))
    ttfts = list(replay_queue(made, 9000, "lru", order, SERVICE).ttfts)
    assert ttfts[:4] == [300.0, 600.0, 600.0, 601.0]  # counts are equal after one of the nine, so the oldest goes


def test_only_requests_of_the_same_namespace_overtake() -> None:
    """Two later ones of b take their turns before those of a, of which the one with a hit goes first."""
    b = [request(at, [20 + number], namespace="b") for number, at in enumerate((0, 0.6, 0.7))]
    a = [request(at, blocks, namespace="a") for at, blocks in ((0, [1, 2, 3]), (0.25, [9]), (0.5, [1, 2, 3, 4]))]
    made = workload(a[0], b[0], *a[1:], *b[1:])
    waits = replay_queue(made, 90, "lru", "longest-prefix", Service(10.0, 2.0, 8, max_delay=1.5)).waits
    assert list(waits) == pytest.approx([0.0, 3.0, 3.4, 4.3, 5.5, 6.75])


@pytest.mark.parametrize("order", ["fcfs", "longest-prefix"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_spares_the_prefixes_of_waiting_requests(policy: str, order: str) -> None:
    cold = [request(0.1, [10 + each] * 3) for each in range(3)]
    made = workload(request(0, [1, 2, 3]), *cold, request(0.2, [1, 2, 3, 4]))
    hits = replay_queue(made, 6, policy, order, Service(10.0, 2.0, 8, max_delay=1e-9)).hit_tokens
    assert hits == 30, "a cold request evicted the prefix of the last one, although it is announced"


@pytest.mark.parametrize("name", ["conversation", "cc_agent"])
def test_an_engine_that_is_fast_enough_hits_what_a_serial_replay_hits(name: str) -> None:
    made = prepare(read(sample(name)), 512 if name == "conversation" else 64)
    serial = replay(made, made.unique_blocks // 10).token_hit_rate
    fast = Service(prefill_rate=1e15, decode_rate=1e15, max_sequences=10**6)
    assert replay_queue(made, made.unique_blocks // 10, "lru", "fcfs", fast).token_hit_rate == serial


def test_the_command_prints_hits_and_waits_of_each_order(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "sample:cc_agent", "--capacity", "10%", "--order", "fcfs,longest-prefix"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "20,000 prompt tokens per second" in said and "longest-prefix" in said and "clairvoyant" not in said
    assert cli.main([*command, "--policy", "lru,fifo", "--prefill-rate", "30000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["service"]["prefill_rate"] == 30000.0 and all(row["max_delay"] == 10.0 for row in found["rows"])
    assert [(row["policy"], row["order"]) for row in found["rows"]] == [
        ("lru", "fcfs"), ("lru", "longest-prefix"), ("fifo", "fcfs"), ("fifo", "longest-prefix"),
    ]  # fmt: skip
    made = prepare(read(sample("cc_agent")), 64)
    result = replay_queue(made, made.unique_blocks // 10, "lru", "longest-prefix", Service(30000.0))
    assert found["rows"][1]["token_hit_rate"] == result.token_hit_rate
    assert found["rows"][1]["wait_s"]["max"] == round(max(result.waits), 4)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--order", "random"], "order 'random': allowed are fcfs, longest-prefix"),
        (["--order", "fcfs", "--policy", "clairvoyant"], "policy 'clairvoyant' with --order"),
        (["--order", "fcfs", "--prefill-rate", "0"], "prefill_rate=0.0"),
        (["--order", "fcfs", "--max-delay", "0"], "max_delay=0.0: allowed are seconds > 0"),
        (["--max-delay", "9"], "--max-sequences and --max-delay need --order"),
        (["--order", "fcfs", "--by", "session"], "--by needs a replay without a queue"),
    ],
)
def test_wrong_options_are_refused(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "sample:chat", *options]) == 2
    assert complaint in capsys.readouterr().err
