"""Sessions with a schema: the parsed object, replies that were cut, thinking, and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pydantic
import pytest

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidInput, UnparsedReply
from tests.engine.fakes import check
from tests.grammar.engines import random_engine


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=99)
    model_config = pydantic.ConfigDict(extra="forbid")


class Adult(Person):
    @pydantic.field_validator("age")
    @classmethod
    def _grown(cls, age: int) -> int:
        raise ValueError("too young")


SCHEMA = Person.model_json_schema()
PARAMS = SamplingParams(max_tokens=200)
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with random_engine(2000) as engine:
        yield engine
        check(engine)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_reply_has_the_parsed_object(engine: Engine, temperature: float) -> None:
    with engine.chat("Be brief.") as chat:
        reply = chat.send("Who?", PARAMS.but(temperature=temperature), schema=Person)
        assert isinstance(reply.parsed, Person) and reply.parsed == Person.model_validate_json(reply.text)
        again = chat.send("And who else?", PARAMS.but(temperature=temperature), schema=SCHEMA)
        jsonschema.validate(again.parsed, SCHEMA)
        assert again.parsed == json.loads(again.text)
        edited = chat.edit(1, "Who is that?", PARAMS, schema=Person)
        assert isinstance(edited.parsed, Person) and chat.turns == 1
        assert chat.history[-1] == {"role": "assistant", "content": edited.text}
        assert chat.send("Thanks", SamplingParams(max_tokens=3)).parsed is None


def test_a_reply_that_was_cut_raises_with_its_text(engine: Engine) -> None:
    with engine.chat() as chat:
        chat.send("Hello", SamplingParams(max_tokens=2))
        before = chat.history
        stream = chat.stream("Who?", SamplingParams(max_tokens=4), schema=Person)
        for _ in range(2):
            with pytest.raises(UnparsedReply, match="reached max_tokens") as caught:
                stream.wait()
            assert caught.value.reply.text.startswith('{"name": "') and caught.value.reply.finish_reason == "length"
        with pytest.raises(UnparsedReply, match="does not parse"):
            chat.send("Who?", PARAMS.but(stop=['"age']), schema=Person)
        with pytest.raises(UnparsedReply, match="max_tokens"):
            list(chat.stream_edit(1, "Who?", SamplingParams(max_tokens=4), schema=Person))
        assert chat.history == before and chat.turns == 1
        assert isinstance(chat.send("Who?", PARAMS, schema=Person).parsed, Person)


def test_a_reply_that_the_class_refuses_raises_with_the_reason(engine: Engine) -> None:
    with engine.chat() as chat:
        with pytest.raises(UnparsedReply, match="too young") as caught:
            chat.send("Who?", PARAMS, schema=Adult)
        assert isinstance(caught.value.__cause__, pydantic.ValidationError)
        assert Person.model_validate_json(caught.value.reply.text) and chat.turns == 0


@pytest.mark.parametrize(
    ("schema", "params", "words"),
    [
        ("person", PARAMS, "schema must be a JSON schema as a dict, or a class such as a Pydantic model, not 'person'"),
        (Person(name="Nora", age=3), PARAMS, "schema must be a JSON schema"),
        (dict, PARAMS, "schema must be a JSON schema"),
        (SCHEMA, PARAMS.but(regex="a"), "schema and regex are given"),
        ({"not": {}}, PARAMS, "json_schema, at #/not"),
    ],
)
def test_wrong_schemas_are_refused(engine: Engine, schema: Any, params: SamplingParams, words: str) -> None:
    with engine.chat() as chat, pytest.raises(InvalidInput, match=words):
        chat.send("Who?", params, schema=schema)
