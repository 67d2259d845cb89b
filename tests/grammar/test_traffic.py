"""Constrained requests beside free ones from many threads, cancelled, slow and preempted: each whole reply is valid."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidConstraint, RequestCancelled
from tests.engine.fakes import check
from tests.grammar.engines import random_engine
from tests.grammar.schemas import CAT, DIGIT, DOG
from tests.grammar.test_replies import assert_valid
from tests.selection import mostly_long, sampled

LIST = {"type": "array", "items": {"anyOf": [CAT, DOG, DIGIT]}, "minItems": 2, "maxItems": 5}


def serve(engine: Engine, number: int) -> str:
    """Make one request, and check its end; returns its kind."""
    rng = random.Random(number)
    kind = rng.choice(("free", "schema", "schema", "new schema", "bad", "cancel"))
    schema = {"anyOf": [LIST, {"const": number}]} if kind == "new schema" else LIST
    params = SamplingParams(max_tokens=rng.randint(5, 120), n=rng.choice((1, 1, 2)), seed=number)
    if kind == "bad":
        with pytest.raises(InvalidConstraint):
            engine.submit([5, number], params.but(json_schema={"not": {"const": number}}))
        return kind
    prompt = [rng.randrange(3, 50) for _ in range(rng.randint(1, 30))]
    handle = engine.submit(prompt, params if kind == "free" else params.but(json_schema=schema))
    if kind == "cancel":
        for _, chunk in zip(range(rng.randint(1, 9)), handle, strict=False):
            assert chunk.token_ids
        handle.cancel()
        try:
            handle.result()
        except RequestCancelled:
            return kind
    done = handle.result(300)
    if kind != "free":
        assert_valid(kind, json.loads(json.dumps(schema)), done)
    return kind


@pytest.mark.parametrize("requests", mostly_long(sampled([30, 150, 600], 30, 150), 30))
def test_constrained_and_free_requests_of_many_threads(requests: int) -> None:
    with random_engine(160, max_sequences=12, max_batch_tokens=48, prefill_chunk=16) as engine:
        with ThreadPoolExecutor(12) as pool:
            kinds = list(pool.map(lambda number: serve(engine, number), range(requests)))
        assert set(kinds) == {"free", "schema", "new schema", "bad", "cancel"}
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.failed) == (0, 0, 0) and stats.forced_tokens
        check(engine)
