"""What clients see when processes of a fleet die, hang, come and go."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fleet.processes import Fleet, Process, Reply, until

STORY = "Tell me a story about boats and kites."
LONG = STORY * 5
BREAKS = (
    "import sys; from radixkv.cli import main; from radixkv.engine.core import Core; Core.step = lambda self: 1 / 0; "
    "sys.exit(main(sys.argv[1:]))"
)
DETAILS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": ["never in it"]}


def by_instance(fleet: Fleet, number: int | None) -> Process:
    return next(each for each in fleet.processes if each.instance == number)


def killer(fleet: Fleet, after: int, killed: list[Process]) -> Any:
    """Return a callback that kills the worker of a stream after some chunks."""

    def on_chunk(reply: Reply) -> None:
        if len(reply.chunks) == after:
            (busy,) = [each for each in fleet.processes if each.instance and _serves(fleet, each)]
            busy.signal(signal.SIGKILL)
            killed.append(busy)

    return on_chunk


def _serves(fleet: Fleet, worker: Process) -> bool:
    """Whether a worker has received a request that it has not completed."""
    received, completed = worker.output.count("request received"), worker.output.count("request completed")
    return received > completed


def test_a_stream_goes_on_at_another_worker_byte_for_byte(two: Fleet) -> None:
    calm, killed = two.stream(STORY, 300, **DETAILS), list[Process]()
    moved = two.stream(STORY, 300, killer(two, 60, killed), **DETAILS)
    assert killed
    assert moved.error is None
    assert moved.text == calm.text
    assert moved.finish == "length"
    assert moved.usage["completion_tokens"] == 300
    assert [each["token"] for each in moved.logprobs] == [each["token"] for each in calm.logprobs]
    pairs = zip(moved.logprobs, calm.logprobs, strict=True)
    assert all(one["logprob"] == pytest.approx(other["logprob"], abs=1e-3) for one, other in pairs)


@pytest.mark.parametrize("more", [{"guided_regex": "[a-z ]{900}"}, {"n": 2, "temperature": 0.5}])
def test_a_stream_that_cannot_move_ends_with_an_error(two: Fleet, more: dict[str, Any]) -> None:
    """Another worker would begin the constraint again, or only one of two replies."""
    killed: list[Process] = []
    cut = two.stream(STORY, 300, killer(two, 15, killed), **more)
    assert killed
    assert cut.error["error"]["code"] == 503
    assert two.stream(STORY, 5).error is None


def test_sigterm_under_load_fails_no_request(two: Fleet) -> None:
    leaving = next(each for each in two.processes if each.instance)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(two.stream, f"Story {number}: {STORY}", 300) for number in range(8)]
        until(lambda: _serves(two, leaving), "the worker serves")
        leaving.signal(signal.SIGTERM)
        running += [pool.submit(two.stream, f"Later {number}: {STORY}", 20) for number in range(8)]
        replies = [each.result() for each in running]
    assert [each.error for each in replies] == [None] * 16
    assert [each.usage["completion_tokens"] for each in replies] == [300] * 8 + [20] * 8
    assert leaving.ended() == 0


def test_a_second_sigterm_ends_the_drain(empty: Fleet) -> None:
    empty.frontend()
    only = empty.worker("--drain", "600", DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0.1")
    empty.joined(only)

    def leave(reply: Reply) -> None:
        if len(reply.chunks) in (20, 150):
            only.signal(signal.SIGTERM)

    cut = empty.stream(STORY, 3000, leave)
    assert cut.error["error"]["code"] == 503
    assert only.ended(20) == 0


def test_a_worker_whose_engine_breaks_ends(empty: Fleet) -> None:
    empty.frontend()
    broken = empty.run("worker", "-c", BREAKS, "worker", "tiny", "--discovery-backend", "file", "--monitor", "off")
    empty.joined(broken)
    assert empty.stream(STORY, 5).error is not None
    assert broken.ended() == 1
    empty.joined(empty.worker())
    assert empty.stream(STORY, 5).error is None


def test_ctrl_c_ends_a_worker(two: Fleet) -> None:
    leaving = next(each for each in two.processes if each.instance)
    leaving.signal(signal.SIGINT)
    assert leaving.ended() == 0
    assert two.stream(STORY, 5).error is None


def until_hit(fleet: Fleet) -> list[Reply]:
    """Send a prompt until the router expects it to hit four of five blocks: events come every 0.1 s."""
    replies: list[Reply] = []

    def expected() -> bool:
        replies.append(fleet.stream(LONG, 5))
        return replies[-1].overlap == pytest.approx(0.8)

    until(expected, "the router knows what is cached")
    return replies


def test_a_new_frontend_knows_the_trees_and_a_new_worker_is_empty(two: Fleet) -> None:
    """Neither needs a request for that: `overlap` is what the router believed before it routed."""
    workers = [each for each in two.processes if each.instance]
    replies = [two.stream(LONG, 5)]
    assert replies[0].overlap == 0
    replies += until_hit(two)
    again = replies[-1]
    front = two.processes[0]
    front.signal(signal.SIGKILL)
    front.ended()
    two.frontend()
    two.joined(*workers)
    known = two.stream(LONG, 5)
    assert (known.worker, known.overlap) == (again.worker, again.overlap)
    by_instance(two, known.worker).signal(signal.SIGKILL)
    added = two.worker()
    two.joined(added)
    until(lambda: known.worker not in two.instances(), "the dead worker is forgotten")
    fresh = two.stream(LONG, 5)
    assert fresh.worker != known.worker and (fresh.worker in {each.worker for each in replies} or fresh.overlap == 0)
    until_hit(two)
    numbers = iter(range(1000))
    until(lambda: two.stream(f"{next(numbers)} kites", 3).worker == added.instance, "the new worker serves")


def test_a_client_that_leaves_ends_its_request(two: Fleet) -> None:
    class Left(Exception):
        pass

    def leave(reply: Reply) -> None:
        if len(reply.chunks) == 20:
            raise Left

    with pytest.raises(Left):
        two.stream(STORY, 3000, leave)
    workers = [each for each in two.processes if each.instance]
    until(lambda: not any(_serves(two, each) for each in workers), "the worker serves nothing")


def test_requests_beyond_the_queue_and_wrong_requests(empty: Fleet) -> None:
    empty.frontend()
    empty.joined(empty.worker("--max-sequences", "1", "--max-waiting", "1"))
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda number: empty.stream(f"Story {number}", 200), range(6)))
    refused = [each.error["error"]["code"] for each in replies if each.error]
    assert len(refused) < 6
    assert set(refused) == {503}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "(["}, "regex"),
        ({"guided_json": {"type": 5}}, "json_schema"),
        ({"guided_grammar": "root ::="}, "grammar"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "10008 tokens"),
        ({"nvext": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
    ]
    for change, named in wrong:
        response = empty.post("/v1/chat/completions", **(chat | change))
        assert response.status_code == 400, change
        assert named in response.json()["message"]


def test_discovery_that_cannot_be_used_and_a_used_port_are_named(empty: Fleet) -> None:
    place = empty.folder / "discovery"
    place.write_text("a file")
    worker = empty.worker()
    assert worker.ended() == 1
    assert f"{place}: File exists" in worker.output
    place.unlink()
    empty.frontend()
    empty.joined(empty.worker())
    second = empty.frontend()
    assert second.ended()
    assert f"port {empty.port} already in use" in second.output


def test_a_deleted_folder_of_discovery_is_named(two: Fleet) -> None:
    shutil.rmtree(two.folder / "discovery")
    workers = [each for each in two.processes if each.instance]
    until(lambda: all("No such file" in each.output for each in workers), "the log says so")
    assert str(two.folder / "discovery") in workers[0].output
