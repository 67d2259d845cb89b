"""Constraints of several tenants are compiled in turns, and refusals are kept apart from grammars."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from radixkv import AsyncEngine
from radixkv.errors import InvalidConstraint, InvalidInput
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.json_schema import checked_schema
from radixkv.sampling.params import SamplingParams
from radixkv.serve import Settings
from tests.grammar.engines import STOP, random_engine, tokenizer
from tests.serve.served import hosted, until


def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), len(tokenizer()), {STOP})


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], threading.Semaphore]:
    """Return the values of constraints as they are compiled, and a gate that each of them waits for."""
    compiled, gate, compile_one = [], threading.Semaphore(0), GrammarCompiler._compile

    def wait(self: GrammarCompiler, constraint: Any) -> Any:
        compiled.append(constraint.value)
        assert gate.acquire(timeout=120)
        return compile_one(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    return compiled, gate


def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gate = watched(monkeypatch)
    grammars = compiler()
    many = [grammars.begin(SamplingParams(regex="a0"), "ada")]
    until(lambda: compiled == ["a0"])
    many += [grammars.begin(SamplingParams(regex=f"a{number}"), "ada") for number in range(1, 4)]
    shared = grammars.begin(SamplingParams(regex="a3"), "cleo")
    other = [grammars.begin(SamplingParams(regex=f"b{number}"), "bob") for number in range(2)]
    gate.release(6)
    assert shared is many[3]
    for each in (*many, *other):
        assert each is not None
        each.result(20)
    assert compiled == ["a0", "a1", "a3", "b0", "a2", "b1"]


def test_a_constraint_is_compiled_once_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gate = watched(monkeypatch)
    gate.release(100)
    many = [SamplingParams(choice=[f"a{number}"], max_tokens=1) for number in range(40)]
    with hosted(Settings(port=0)) as host:
        engine = AsyncEngine(host.engine)
        asyncio.run(engine.generate([[5, 6]] * 40, many))
    assert len(compiled) == 40


def test_constraints_of_clients_that_left_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gate = watched(monkeypatch)
    begun, begin = [], GrammarCompiler.begin

    def noted(self: GrammarCompiler, params: SamplingParams, owner: Any = None) -> Any:
        begun.append(params.choice)
        return begin(self, params, owner)

    def body(word: str) -> dict[str, Any]:
        return {"model": "fake", "prompt": "Hi", "guided_choice": [word], "max_tokens": 1}

    monkeypatch.setattr(GrammarCompiler, "begin", noted)
    with hosted(Settings(port=0)) as host:
        url = f"{host.url}/v1/completions"
        address = httpx.URL(url)
        for word in map(str, range(60)):  # each client leaves once its constraint waits
            request = httpx.Request("POST", url, json=body(word))
            head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            with socket.create_connection((address.host, address.port)) as connection:
                connection.sendall(f"POST {address.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
                until(lambda word=word: (word,) in begun)
        until(lambda: host.service.gate.limiter.streams == 0)
        gate.release(100)
        assert httpx.post(url, json=body("stays"), timeout=30).status_code == 200
    assert len(compiled) < 40, "the first one, the latest ones that are kept, and the last"


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_a_schema_of_many_alternatives_is_refused_before_it_is_compiled(key: str) -> None:
    each: dict[str, Any] = {"type": "object", "properties": {}}
    with pytest.raises(InvalidConstraint, match=f"at #/items/{key}: 3000 schemas: at most 2000"):
        checked_schema({"items": {key: [each] * 3000}})


def test_the_check_of_many_alternatives_takes_linear_time() -> None:
    def seconds(count: int) -> float:
        schema = {"anyOf": [{"type": "object", "properties": {f"p{at}": {"type": "string"}}} for at in range(count)]}
        began = time.process_time()
        checked_schema(schema)
        return time.process_time() - began

    fewer, more = (min(seconds(count) for _ in range(5)) for count in (250, 2000))
    assert more < 24 * fewer, "8 times as many alternatives"


def test_the_place_of_a_refusal_is_sought_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def slow(schema: Any, shared: Any) -> str:
        tried.append(schema)
        time.sleep(0.1)
        return "" if len(tried) > 1 else "refused"

    monkeypatch.setattr("radixkv.grammar.compiler._alone", slow)
    bad = {"anyOf": [{"type": "object", "properties": {f"p{at}": {"pattern": "("}}} for at in range(50)]}
    with pytest.raises(InvalidConstraint, match="at #: "):
        compiler().matcher(SamplingParams(json_schema=json.dumps(bad)))
    assert len(tried) < 8


def test_a_namespace_that_cannot_be_hashed_is_refused_with_a_constraint_too() -> None:
    with random_engine() as plain, pytest.raises(InvalidInput, match="a namespace must be hashable"):
        asyncio.run(AsyncEngine(plain).generate([[5, 6]], SamplingParams(choice=["yes"]), namespace=["x"]))
