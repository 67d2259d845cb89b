"""The curve of pool sizes, compared with an exact stack and with replays through the real cache."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import count, islice, takewhile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.telemetry.what_if import SIZES, Ids, WhatIf, WhatIfCurve, WhatIfReport, mixed, prefix_ids
from radixkv_traces.formats import read, sample
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.simulate import replay
from radixkv_traces.simulate_detail import curve
from radixkv_traces.workload import Workload, prepare

Prompt = tuple[int, list[int], int]  # a namespace, tokens of a prompt and its reply, and the length of the prompt
NOTHING = WhatIfCurve(0, 0, 0, (0,) * len(SIZES))

# Two namespaces and two symbols, so that paths branch and come back.
TEXTS = st.lists(st.integers(0, 1), max_size=12)
PROMPTS = st.tuples(st.integers(0, 1), TEXTS, TEXTS).map(lambda drawn: (drawn[0], drawn[1] + drawn[2], len(drawn[1])))
REQUESTS = st.lists(st.lists(PROMPTS, min_size=1, max_size=3), max_size=15)  # a prompt with each of its replies


def path_of(prompt: Prompt, block_size: int) -> list[tuple[int, ...]]:
    """The blocks of a prompt and its reply, as texts."""
    namespace, tokens, _ = prompt
    return [(namespace, *tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)]


def ids_of(prompt: Prompt, block_size: int) -> Ids:
    namespace, tokens, _ = prompt
    return prefix_ids(np.array(tokens, np.int32), block_size, b"key of %d" % namespace)


@example([[(0, [1, 1], 2)]] * 15, 4, 1, 59)  # a request in each minute, longer than the window
@given(REQUESTS, st.integers(1, 12), st.integers(1, 3), st.sampled_from((0, 59, 500)))
@settings(max_examples=25, deadline=None)
def test_the_curve_below_the_limit_is_exact(
    requests: list[list[Prompt]], pool_blocks: int, block_size: int, seconds: int
) -> None:
    what_if, rows = WhatIf(pool_blocks, block_size), list[tuple[int, list[int]]]()
    stack: list[tuple[int, ...]] = []  # the block that was used last comes first, so that a pool holds the beginning
    for moment, (prompt, *others) in zip(count(0, seconds), requests):
        path, most = path_of(prompt, block_size), max(0, prompt[2] - 1)
        pools = [stack[: int(min(max(1, size * pool_blocks), len(stack)))] for size in SIZES]
        cached = [len(list(takewhile(pool.__contains__, path))) for pool in pools]
        rows.append((moment, [1, prompt[2], 7, *(min(blocks * block_size, most) for blocks in cached)]))
        for path in (path_of(each, block_size) for each in (prompt, *others)):
            stack = [*path, *(block for block in stack if block not in path)]
        what_if.add(ids_of(prompt, block_size), prompt[2], 7, moment)
        for each in others:
            what_if.touch(ids_of(each, block_size))
        what_if.check()
        for later in (moment, moment + 300):
            report = what_if.report(later)
            assert report.since_load == curve_of([row for _, row in rows])
            assert report.recent == curve_of([row for at, row in rows if at // 60 > later // 60 - 10])


def curve_of(rows: list[list[int]]) -> WhatIfCurve:
    requests, prompt_tokens, cached_tokens, *hit_tokens = map(sum, zip([0] * (3 + len(SIZES)), *rows, strict=True))
    return WhatIfCurve(requests, prompt_tokens, cached_tokens, tuple(hit_tokens))


@given(st.lists(PROMPTS, max_size=20), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_a_small_sample_stays_within_its_limit(prompts: list[Prompt], sampled_blocks: int) -> None:
    what_if = WhatIf(4, 1, sampled_blocks)
    for prompt in prompts:
        what_if.add(ids_of(prompt, 1), prompt[2], 0, 0.0)
        what_if.check()
    assert what_if.report(0.0).since_load.requests == len(prompts)


def errors(workload: Workload, pool_blocks: int) -> list[float]:
    """The differences from replays at the sizes with a limit, in points."""
    rates = curve(workload, pool_blocks).values()
    exact = [replay(workload, max(1, int(size * pool_blocks)), "lru").token_hit_rate for size in SIZES[:-1]]
    return [100 * abs(rate - other) for rate, other in zip(rates, exact, strict=False)]


@pytest.mark.parametrize("name", ["conversation", *KINDS])
def test_the_curve_of_a_trace_is_the_one_of_the_simulator(name: str) -> None:
    requests = islice(generate(KINDS[name], sessions=60, seed=1), 250) if name in KINDS else read(sample(name))
    workload = prepare(requests, 512 if name == "conversation" else 64)
    pool_blocks = max(1, workload.unique_blocks // 10)
    assert max(errors(workload, pool_blocks)) <= (0.1 if workload.unique_blocks <= 8192 else 2.0)
    part = prepare(islice(workload.requests, 60), workload.block_tokens)
    assert part.unique_blocks <= 8192 and max(errors(part, pool_blocks)) < 1e-9


def sampled_and_exact(pool_blocks: int, sampled_blocks: int, paths: Iterable[Ids]) -> list[WhatIfCurve]:
    curves = [WhatIf(pool_blocks, 1, most) for most in (sampled_blocks, 80_000)]
    for path in paths:
        for each in curves:
            each.add(path, len(path), 0, 0.0)
    for each in curves:
        each.check()
    return [each.report(0.0).since_load for each in curves]


def test_a_sample_estimates_the_exact_curve() -> None:
    """A popular prefix, which the sample may leave out, has a third of all tokens; the correction makes up for it."""
    draw, paths = random.Random(4), np.arange(20 * 4000, dtype=np.uint64).reshape(4000, 20)
    popular = np.arange(10, dtype=np.uint64) + np.uint64(10**6)
    used = (mixed(np.concatenate((popular, draw.choice(paths)))) for _ in range(4000))
    found, true = (each.hit_rates for each in sampled_and_exact(8000, 1024, used))
    assert found == pytest.approx(true, abs=0.04) and found != true


def test_small_pools_stay_exact_while_ever_more_blocks_are_met() -> None:
    draw, ages = random.Random(0), (0, 1, 2, 5, 9, 20, 50)
    paths = ([draw.randrange(3), at - draw.choice(ages), draw.randrange(2), 1, 2, 3, 4, 5] for at in range(2000))
    found, true = sampled_and_exact(16, 512, (ids_of((0, path, 8), 1) for path in paths))
    assert found.hit_tokens[:-1] == true.hit_tokens[:-1] and len(set(true.hit_tokens)) == len(SIZES)
    assert found.hit_rates[-1] == pytest.approx(true.hit_rates[-1], abs=0.05)


def test_ids_stand_for_a_block_and_all_tokens_before_it() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 1000).astype(np.int32)
    ids = prefix_ids(tokens, 16, b"a")
    assert ids.dtype == np.uint64 and len({*ids.tolist(), *prefix_ids(tokens, 16, b"b").tolist()}) == 2 * 62
    assert prefix_ids(tokens[:100], 16, b"a").tolist() == ids[:6].tolist()
    changed = tokens.copy()
    changed[[40, 41]] = changed[[41, 40]]
    assert (prefix_ids(changed, 16, b"a") == ids).tolist() == [True] * 2 + [False] * 60
    assert prefix_ids([], 16, b"a").tolist() == prefix_ids(tokens[:15], 16, b"a").tolist() == []
    assert prefix_ids([5, 3], 2, b"a") != prefix_ids([4, 4], 2, b"a")  # equal sums of tokens and positions
    assert abs((prefix_ids(tokens, 1, b"a") < np.uint64(2**63)).mean() - 0.5) < 0.05


def report_of(*rates: float) -> WhatIfReport:
    """A report since load; pools beyond the last rate have the last one."""
    hits = WhatIfCurve(5, 10_000, 4_000, tuple(round(10_000 * rate) for rate in [*rates, *rates[-1:] * 7][:7]))
    return WhatIfReport(100, NOTHING, hits, dropped=1, reasons=("pins",))


def test_a_report_survives_json_and_later_fields() -> None:
    report = report_of(0.1, 0.57, 0.61, 0.83, 0.9)
    fields = json.loads(json.dumps(report.as_fields()))
    assert fields == report.as_fields() and isinstance(fields["since_load"]["hit_tokens"], list)
    later = fields | {"new": 1, "recent": fields["recent"] | {"new": 2}}
    assert WhatIfReport.from_fields(later) == report
    del later["reasons"]
    assert WhatIfReport.from_fields(later) == replace(report, reasons=())


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ((0.3, 0.57, 0.61, 0.83, 0.91), "Twice the pool would raise hits from 61% to 83%; half of it would cost 4 "
         "points; no pool could hit more than 91%."),
        ((0.6, 0.607, 0.61, 0.61, 0.613), "Twice the pool would not raise hits (61%)."),
        ((0.6, 0.6, 0.61, 0.614), "Twice the pool would not raise hits (61.0%); half of it would cost 1.0 points."),
        ((0, 0, 0, 0.006), "Twice the pool would raise hits from 0.0% to 0.6%."),
        ((0.2, 0.2, 0.2, 0.2, 0.9), "Twice the pool would not raise hits (20%); no pool could hit more than 90%."),
    ],
)  # fmt: skip
def test_the_sentence_leaves_out_clauses_that_say_nothing(rates: tuple[float, ...], sentence: str) -> None:
    assert report_of(*rates).sentence == sentence
    recent = replace(report_of(*rates), recent=report_of(0, 0, 0.1).since_load)
    assert recent.sentence.startswith("Twice the pool would not raise hits (10%); half of it would cost 10 points")
    assert WhatIf(10, 16).report(0.0).sentence == "No request has ended yet."
