"""Figures of outcomes with given latencies."""

from array import array

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.live.player import ReplayRun
from radixkv_traces.live.requests import TOO_LONG, Answer, Outcome
from radixkv_traces.live.results import compared, parse_goodput, summary


def answered(number, first=0.1, gap=0.01, tokens=3, *, prompt=100, cached=0, due=0.0, sent=0.0, **options):
    arrivals = array("d", [sent + first + gap * at for at in range(tokens)])
    answer = Answer(tokens, prompt, cached, 1)
    return Outcome(number, None, due, sent, arrivals=arrivals, ended=arrivals[-1], answer=answer, **options)


def found(*outcomes, seconds=2.0, goodput=None, whole=True, asap=False):
    return summary(ReplayRun("us", asap, list(outcomes), [], seconds, whole), goodput)


def test_all_figures_of_two_requests():
    figures = found(answered(0), answered(1, first=0.3, gap=0.02, cached=60, sent=1.0, due=0.5))
    assert figures["requests"] == figures["finished"] == 2
    assert figures["requests_per_s"] == 1.0
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_s"] == 3.0
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["hit_rate"]) == (200, 60, 0.3)
    assert figures["preemptions"] == 2
    assert figures["ttft_ms"]["median"] == figures["ttft_ms"]["mean"] == 200.0
    assert figures["ttft_hit_ms"]["mean"] == 300.0
    assert figures["ttft_miss_ms"]["mean"] == 100.0
    assert figures["tpot_ms"]["mean"] == figures["itl_ms"]["mean"] == pytest.approx(15.0)
    assert figures["e2e_ms"]["mean"] == pytest.approx((120 + 340) / 2)
    assert figures["late_ms"]["p99"] == pytest.approx(495.0)
    assert figures["goodput"] is None


def test_what_did_not_come_out_well_is_counted_apart():
    outcomes = [
        answered(0),
        Outcome(1, None, 0.0, 0.0, ended=1.0, error="RequestFailed: it broke"),
        Outcome(2, None, 0.0, 0.0, ended=1.0, error=TOO_LONG),
        Outcome(3, None, 0.0, 0.0, arrivals=array("d", [0.1])),
        answered(4, first=9.0, warmup=True),
    ]
    figures = found(*outcomes, whole=False)
    counts = ("requests", "finished", "failed", "too_long", "unfinished", "warmup_requests")
    assert [figures[name] for name in counts] == [4, 1, 1, 1, 1, 1]
    assert figures["errors"] == {"RequestFailed: it broke": 1}
    assert figures["ttft_ms"]["p99"] == 100.0
    assert figures["prompt_tokens"] == 100
    assert not figures["whole"]


def test_missing_facts_are_not_made_up():
    outcome = answered(0)
    outcome.answer = Answer(3)
    figures = found(outcome)
    names = ("prompt_tokens", "cached_tokens", "hit_rate", "preemptions", "ttft_hit_ms", "ttft_miss_ms")
    assert [figures[name] for name in names] == [None] * 6
    assert found()["ttft_ms"] is None
    assert found(seconds=0.0)["requests_per_s"] == 0.0
    assert found(answered(0), asap=True)["late_ms"] is None


def test_goodput_counts_the_requests_that_keep_every_bar():
    outcomes = [
        answered(0, first=0.1),
        answered(1, first=0.5),
        answered(2, first=0.1, gap=0.2),
        answered(3, first=0.1, tokens=1),
        Outcome(4, None, 0.0, 0.0, ended=1.0, error="lost"),
    ]
    figures = found(*outcomes, goodput={"ttft": 400.0, "tpot": 50.0})
    assert figures["goodput"] == {
        "bars_ms": {"ttft": 400.0, "tpot": 50.0},
        "met": 2,
        "share": 0.4,
        "requests_per_s": 1.0,
    }
    assert found(*outcomes, goodput={"e2e": 505.0})["goodput"]["met"] == 3


def test_bars_are_read_and_what_is_none_is_refused():
    assert parse_goodput(["ttft:500", "e2e:1.5"]) == {"ttft": 500.0, "e2e": 1.5}
    for bad in ("ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "speed:5", "ttft:five"):
        with pytest.raises(InvalidInput, match="NAME:MILLISECONDS"):
            parse_goodput([bad])


def test_a_comparison_is_above_one_where_the_cache_helps():
    with_cache, without = found(answered(0, first=0.1)), found(answered(0, first=0.4), seconds=4.0)
    worth = compared(with_cache, without)
    assert worth["ttft_ms"] == 4.0
    assert worth["requests_per_s"] == 2.0
    assert compared(found(), found())["ttft_ms"] is None
