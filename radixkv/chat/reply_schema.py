"""Constrain the answers of a session to a schema of the caller, and parse them.

A schema is a mapping, or a class with `model_json_schema` and `model_validate_json`, as Pydantic's models have.
Pydantic itself is never imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from radixkv.chat.messages import Reply
from radixkv.errors import InvalidInput, UnparsedReply
from radixkv.sampling.params import SamplingParams


@runtime_checkable
class ModelClass(Protocol):
    """A class with a JSON schema, such as a subclass of `pydantic.BaseModel`."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the schema of the class."""
        ...

    def model_validate_json(self, text: str) -> Any:
        """Return the instance in a JSON text; raise ValueError if the class refuses it."""
        ...


Schema: TypeAlias = ModelClass | Mapping[str, Any]


class ReplySchema:
    """The schema of one reply."""

    def __init__(self, schema: object) -> None:
        """Raises InvalidInput unless `schema` is a mapping or a class with a JSON schema."""
        self.schema: Mapping[str, Any]
        self._parse: Callable[[str], Any]
        if isinstance(schema, Mapping):
            self.schema, self._parse = schema, json.loads
        elif isinstance(schema, type) and isinstance(schema, ModelClass):
            self.schema, self._parse = schema.model_json_schema(), schema.model_validate_json
        else:
            raise InvalidInput(
                f"schema must be a JSON schema as a dict, or a class such as a Pydantic model, not {schema!r:.100}"
            )

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the schema. Raises InvalidInput if they have a constraint of their own."""
        if params.constraint is not None:
            name = params.constraint.parameter
            raise InvalidInput(f"schema and {name} are given: a reply has at most one constraint")
        return params.but(json_schema=self.schema)

    def parsed(self, reply: Reply) -> Reply:
        """Return the reply with `parsed` set, unless it consists of tool calls.

        Raises UnparsedReply for a reply that was cut, and for one that the caller's class refuses.
        """
        if reply.finish_reason == "length":
            raise UnparsedReply("the reply reached max_tokens before it was complete: allow more tokens", reply)
        if reply.tool_calls:
            return reply
        try:
            return replace(reply, parsed=self._parse(reply.text))
        except ValueError as error:
            raise UnparsedReply(f"the reply does not parse: {error}", reply) from error
