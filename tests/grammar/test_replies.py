"""Replies of a random model follow their constraint: each whole reply is valid, by jsonschema or by Python's re."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pytest
from jsonschema.validators import validator_for

from radixkv import Completion, Engine, SamplingParams
from tests.engine.fakes import check
from tests.grammar.engines import random_engine
from tests.grammar.schemas import schemas

SCHEMAS = dict(schemas())
QUICK = sorted(SCHEMAS)[::13]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with random_engine(2000) as engine:
        yield engine


def exact(text: str) -> Any:
    """Parse JSON with exact decimals: 0.3 is a multiple of 0.1 then."""
    return json.loads(text, parse_float=Decimal)


def streams(done: Completion) -> list[Completion]:
    return [done, *done.alternatives]


def assert_valid(name: str, schema: Any, done: Completion) -> int:
    """Check all whole replies of a request; returns their number."""
    decimal = exact(json.dumps(schema))
    kind = validator_for(decimal)
    validator = kind(decimal, format_checker=kind.FORMAT_CHECKER)
    for each in streams(done):
        assert each.finish_reason in ("stop", "length"), name
        if each.finish_reason == "stop":
            errors = [error.message for error in validator.iter_errors(exact(each.text))]
            assert not errors, f"{name}: {each.text!r} of {schema}: {errors}"
    return sum(each.finish_reason == "stop" for each in streams(done))


def complete(engine: Engine, names: list[str], **changes: Any) -> None:
    """Complete a prompt for each schema, all in one batch, and check the replies."""
    prompts = [[3 + number % 50, 5, 7] for number in range(len(names))]
    params = [SamplingParams(json_schema=SCHEMAS[name], max_tokens=200, **changes) for name in names]
    done = engine.generate(prompts, params)
    whole = sum(assert_valid(name, SCHEMAS[name], each) for name, each in zip(names, done, strict=True))
    assert whole > 0.8 * sum(len(streams(each)) for each in done), f"only {whole} replies are whole"
    check(engine)


def test_there_are_a_few_hundred_schemas() -> None:
    assert len(SCHEMAS) > 300


def test_replies_are_valid(engine: Engine) -> None:
    complete(engine, QUICK, temperature=1, n=2)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 1, "n": 4}])
def test_replies_to_all_schemas_are_valid(engine: Engine, changes: dict[str, Any]) -> None:
    complete(engine, list(SCHEMAS), **changes)


def test_dates_and_times_exist(engine: Engine) -> None:
    """Python reads them all: 29 February comes in leap years only."""
    readers = {"date": date.fromisoformat, "time": time.fromisoformat, "date-time": datetime.fromisoformat}
    for name, read in readers.items():
        schema = {"type": "string", "format": name}
        for each in streams(engine.generate([[5, 6]], SamplingParams(json_schema=schema, n=6, seed=3))[0]):
            assert read(json.loads(each.text))
    february = {"allOf": [{"type": "string", "format": "date"}, {"pattern": "-02-29$"}]}
    for each in streams(engine.generate([[5, 6]], SamplingParams(json_schema=february, n=6, seed=4))[0]):
        assert date.fromisoformat(json.loads(each.text)).month == 2


@pytest.mark.parametrize(
    "regex",
    [
        "[a-c]{3,5}",
        r"\d{4}-\d{2}",
        "a/b|c/d",
        r"a\/b",
        r"[/\\]{2}",
        "line\nbreak",
        r"tab\tor\n",
        "#no comment|//",
        "(?i)yes|no",
        "ä|日本|🙂",
        r"[^\x00-\x1f]{1,4}",
        '"quoted"',
    ],
)
def test_a_reply_matches_a_regex(engine: Engine, regex: str) -> None:
    done = engine.generate([[5, 6]], SamplingParams(regex=regex, n=4, seed=1, max_tokens=40))[0]
    for each in streams(done):
        assert each.finish_reason == "stop" and re.fullmatch(regex, each.text), each.text


CHOICES = ["yes", "no", "yes and no", 'a "quote"', "back\\slash", "a\nb", "日本", "{}", "/", " ", "\x7f"]


def test_a_reply_is_one_of_the_choices(engine: Engine) -> None:
    seen = set()
    for seed in range(6):
        done = engine.generate([[5, 6]], SamplingParams(choice=CHOICES, n=4, seed=seed))[0]
        seen |= {(each.text, each.finish_reason) for each in streams(done)}
    assert {text for text, _ in seen} <= set(CHOICES) and {reason for _, reason in seen} == {"stop"}
    assert len(seen) > 4


def test_a_reply_follows_a_grammar(engine: Engine) -> None:
    grammar = 'start: sum\nsum: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,2}/\n'
    done = engine.generate([[5, 6]], SamplingParams(grammar=grammar, n=4, seed=2, max_tokens=60))[0]
    for each in streams(done):
        assert re.match(r"[0-9]{1,2}( \+ [0-9]{1,2})*", each.text)
        assert each.finish_reason == "length" or re.fullmatch(r"[0-9]{1,2}( \+ [0-9]{1,2})*", each.text)


def test_a_grammar_may_be_in_gbnf(engine: Engine) -> None:
    grammar = 'root ::= verb " " noun\nverb ::= "SELECT" | "DELETE"\nnoun ::= [a-c]{2,3}\n'
    done = engine.generate([[5, 6]], SamplingParams(grammar=grammar, n=4, seed=2))[0]
    assert all(re.fullmatch("(SELECT|DELETE) [a-c]{2,3}", each.text) for each in streams(done))


def test_max_tokens_ends_a_reply_with_length(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 50}
    done = engine.generate([[5, 6]], SamplingParams(json_schema=schema, max_tokens=20))[0]
    assert (done.finish_reason, len(done.token_ids)) == ("length", 20)
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.text)


def test_a_value_that_is_whole_with_its_last_token_ends_with_stop(engine: Engine) -> None:
    whole = engine.generate([[5, 6]], SamplingParams(choice=["several tokens in a row"]))[0]
    exactly = SamplingParams(choice=["several tokens in a row"], max_tokens=len(whole.token_ids))
    done = engine.generate([[5, 6]], exactly)[0]
    assert (done.text, done.finish_reason) == ("several tokens in a row", "stop")
    shorter = engine.generate([[5, 6]], exactly.but(max_tokens=len(whole.token_ids) - 1))[0]
    assert (shorter.finish_reason, len(shorter.token_ids)) == ("length", len(whole.token_ids) - 1)
