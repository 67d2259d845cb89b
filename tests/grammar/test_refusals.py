"""Constraints that cannot be compiled, or are too expensive, are refused before the engine has the request.

docs/results/constrained.md has the time that a refusal takes.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.errors import InvalidConstraint, InvalidInput, RequestFailed
from tests.engine.fakes import check, make_engine
from tests.grammar.engines import random_engine
from tests.grammar.hostile import HOSTILE


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with random_engine() as engine:
        yield engine
        check(engine)


INFINITE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"grammar": 'start: "a"\nx: %json {'}, "line 2: no JSON after %json"),
        ({"grammar": f'start: %json {{"maximum": {"9" * 5000}}}'}, "line 1: .* more than 4300 digits"),
        ({"grammar": 'start: %json {"not": {}}'}, "at #/not: not cannot be enforced"),
        ({"grammar": "start: "}, "allows no text"),
        ({"grammar": 'root ::= ("a"'}, "grammar: "),
        ({"json_schema": {"enum": []}}, "json_schema"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema"),
        ({"json_schema": {"type": "number", "minimum": -1e300, "maximum": 1e300}}, "json_schema"),
        (
            {"json_schema": {"$ref": "#"}},
            "json_schema .* no text can follow, since rules or references lead only to them",
        ),
        ({"grammar": "start: x\nx: y\ny: x"}, "no text can follow, since rules or references lead only to themselves"),
        ({"json_schema": INFINITE}, "json_schema .* refers to itself without an end"),
        ({"choice": ["a<|pad|>"]}, "choice .* it requires the name of a control token, which no reply has as text"),
    ],
)
def test_a_constraint_that_cannot_be_compiled_is_refused(engine: Engine, constraint: Any, message: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidConstraint, match=message) as refused:
            engine.submit([5, 6], SamplingParams(**constraint))
        assert refused.value.parameter in constraint or "json_schema" in str(refused.value)


BAD = {"type": "string", "pattern": "(", "description": "no regular expression"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (BAD, ""),
        ({"type": "array", "items": BAD}, "/items"),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b/c": {"anyOf": [{"type": "null"}, BAD]}}},
            "/properties/b~1c/anyOf/1",
        ),
        ({"$defs": {"x": BAD}, "type": "array", "items": {"$ref": "#/$defs/x"}}, "/$defs/x"),
        ({"allOf": [{"type": "string", "pattern": "a"}, {"type": "integer"}]}, ""),
    ],
)
def test_a_refusal_of_the_compiler_has_the_place_too(engine: Engine, schema: Any, place: str) -> None:
    with pytest.raises(InvalidConstraint, match="json_schema, at #") as refused:
        engine.submit([5, 6], SamplingParams(json_schema=schema))
    assert refused.value.place == place


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidInput):
        engine.submit([5, 6], SamplingParams(**HOSTILE[name]))


DEEP: dict[str, dict[str, Any]] = {
    "rules": {"grammar": "".join(f'r{at}: r{at + 1} "b"\n' for at in range(11_000)) + 'start: r0\nr11000: "a"'},
    "terminals": {"grammar": "".join(f"T{at}: T{at + 1}\n" for at in range(12_000)) + 'start: T0\nT12000: "a"'},
}
"""Constraints within all limits, over which the compiler recurses further than a usual stack allows."""


@pytest.mark.long
def test_deep_constraints_never_overflow_the_stack() -> None:
    program = """
import json, sys
from radixkv import SamplingParams
from radixkv.grammar.compiler import GrammarCompiler
from tests.grammar.engines import STOP, tokenizer

compiler = GrammarCompiler(tokenizer(), len(tokenizer()), {STOP})
print([compiler.matcher(SamplingParams(**params)).accepts for params in json.load(sys.stdin)])
"""
    deep = json.dumps([*DEEP.values()])
    done = subprocess.run([sys.executable, "-c", program], input=deep, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[False, False]\n"), done.stderr


def test_asyncio_callers_get_the_refusal() -> None:
    async def main() -> None:
        with random_engine() as plain:
            engine = AsyncEngine(plain)
            with pytest.raises(InvalidConstraint):
                await engine.submit([5, 6], SamplingParams(regex="("))
            with pytest.raises(InvalidConstraint):
                await engine.generate([[5, 6]] * 2, [SamplingParams(max_tokens=2), SamplingParams(regex="(")])
            done = await engine.generate([[5, 6]], SamplingParams(choice=["yes"]))
            assert done[0].text == "yes"

    asyncio.run(main())


def test_without_a_tokenizer_constraints_are_refused() -> None:
    engine, _ = make_engine()
    with engine, pytest.raises(InvalidConstraint, match="need a tokenizer"):
        engine.submit([5, 6], SamplingParams(choice=["yes"]))


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refusing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with random_engine() as engine, pytest.raises(InvalidConstraint, match=r"pip install 'radixkv\[grammar\]'"):
        engine.submit([5, 6], SamplingParams(choice=["yes"]))


def test_a_grammar_that_becomes_too_expensive_fails_its_own_request(engine: Engine) -> None:
    late = 'start: /[a-y]{40}/ "z" r0\n'
    late += "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "a"'
    other = engine.submit([7, 8], SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    with pytest.raises(RequestFailed, match="grammar cannot be followed any further") as failed:
        engine.generate([[5, 6]], SamplingParams(grammar=late, max_tokens=100))
    assert isinstance(failed.value.__cause__, InvalidConstraint)
    grammars = engine.client.inputs.grammars
    first = grammars.begin(SamplingParams(grammar=late))
    assert first is not None and not first.result().worn, "the grammar that failed was compiled again"
    assert grammars.begin(SamplingParams(grammar=late)) is first
    assert other.result().usage.output_tokens == 30
