"""The times of sent requests, their outcomes, and the result of a replay that was stopped."""

import asyncio
from array import array
from itertools import pairwise

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.formats import TraceRequest
from radixkv_traces.live.player import Pace, Player
from radixkv_traces.live.requests import TOO_LONG, PromptMaker, plan_requests
from tests.traces.live.targets import FakeTarget

PROMPT_MAKER = PromptMaker(100, 4)


def recorded(*turns, output=2):
    """(session, milliseconds) pairs as requests."""
    return plan_requests(
        [TraceRequest(float(at), 4, output, array("q", [number]), name) for number, (name, at) in enumerate(turns)],
        PROMPT_MAKER,
    )


def play(target, todo, on_outcome=lambda _: None, **pace):
    return asyncio.run(Player(target, PROMPT_MAKER, Pace(**pace), on_outcome).play(todo))


def test_open_loop_sends_at_the_recorded_times_whether_answers_come_or_not():
    target = FakeTarget(pause=0.05)
    played = play(target, recorded(("a", 0), ("a", 40), ("b", 20)), loop="open")
    assert target.sent == [0, 1, 2]
    assert target.most == 3  # the first was not answered when the last was sent
    outcomes = sorted(played.outcomes, key=lambda outcome: outcome.number)
    assert [outcome.due for outcome in outcomes] == [0.0, 0.02, 0.04]
    assert all(outcome.sent >= outcome.due for outcome in outcomes)
    assert played.whole


def test_closed_loop_waits_for_the_answer_before():
    target = FakeTarget(pause=0.02)
    played = play(target, recorded(("a", 0), ("a", 1), ("a", 2), ("b", 1)), loop="closed")
    mine = [outcome for outcome in played.outcomes if outcome.session == "a"]
    assert [outcome.number for outcome in mine] == [0, 1, 3]  # by time: b's request is between them
    assert all(before.ended <= after.sent for before, after in pairwise(mine))
    assert target.most == 2


def test_closed_loop_takes_requests_without_a_session_as_sessions_of_their_own():
    target = FakeTarget(pause=0.02)
    play(target, recorded((None, 0), (None, 0), (None, 0)), loop="closed")
    assert target.most == 3


@pytest.mark.parametrize("loop", ["open", "closed"])
@pytest.mark.parametrize("most", [1, 3])
def test_concurrency_is_never_exceeded_and_the_wait_shows_as_lateness(loop, most):
    target = FakeTarget(pause=0.005)
    played = play(target, recorded(*[(None, 0)] * 9), loop=loop, concurrency=most)
    assert target.most == most
    assert sorted(target.ended) == list(range(9))
    assert sorted(target.sent) == list(range(9))
    if most == 1:  # prompts are made on threads: requests of one moment may overtake each other
        assert target.sent == list(range(9))
    assert max(outcome.late for outcome in played.outcomes) >= 0.005 * (9 - most) / most


def test_an_outcome_says_what_the_client_saw():
    (outcome,) = play(FakeTarget(pause=0.01), recorded((None, 0), output=4)).outcomes
    assert len(outcome.arrivals) == 4
    assert outcome.answer.output_tokens == 4
    assert outcome.answer.prompt_tokens == 4
    assert outcome.answer.cached_tokens == 2
    assert outcome.ttft == outcome.arrivals[0] - outcome.sent
    assert outcome.total == outcome.arrivals[3] - outcome.sent
    assert outcome.tpot == pytest.approx((outcome.total - outcome.ttft) / 3)
    assert outcome.ended >= outcome.arrivals[3]


def test_a_failure_and_a_prompt_that_is_too_long_leave_the_others_alone():
    told = []
    target = FakeTarget(broken=frozenset({1}), too_long=frozenset({2}))
    played = play(target, recorded(*[("a", 0)] * 4), told.append, loop="closed")
    by_number = {outcome.number: outcome for outcome in played.outcomes}
    assert by_number[1].error == "RequestFailed: it broke"
    assert by_number[2].error == TOO_LONG
    assert by_number[0].error is by_number[3].error is None
    assert by_number[1].ttft is by_number[1].total is by_number[1].tpot is None
    assert [outcome.number for outcome in told] == [0, 1, 2, 3]
    assert played.whole


def test_warming_up_sends_in_order_and_marks():
    target = FakeTarget()
    player = Player(target, PROMPT_MAKER, Pace())

    async def both():
        await player.warm(recorded((None, 0), (None, 90_000)))
        await player.play(recorded((None, 0)))

    asyncio.run(both())
    assert [outcome.warmup for outcome in player.result.outcomes] == [True, True, False]
    assert target.most == 1


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_a_replay_that_is_stopped_keeps_what_it_saw_and_leaves_nothing_running(loop):
    target = FakeTarget(pause=0.01, moments=100)
    player = Player(target, PROMPT_MAKER, Pace(loop))
    todo = recorded(("a", 0), ("b", 0), ("c", 60_000), output=30)

    async def stopped():
        task = asyncio.create_task(player.play(todo))
        while len(player.result.outcomes) < 2 or not all(outcome.arrivals for outcome in player.result.outcomes):
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(stopped())
    assert not target.running
    assert not player.result.whole
    assert player.result.seconds > 0
    assert [outcome.ended for outcome in player.result.outcomes] == [None, None]
    assert [outcome.ttft for outcome in player.result.outcomes] == [None, None]
    assert player.result.moments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": "round"}, "'open' and 'closed'"),
        ({"speedup": 0}, "above 0"),
        ({"speedup": float("nan")}, "above 0"),
        ({"speedup": float("inf")}, "above 0"),
        ({"concurrency": 0}, "at least 1"),
    ],
)
def test_a_pace_that_is_none_is_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        Pace(**options)
