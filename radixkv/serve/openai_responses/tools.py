"""Declare the tools of a Responses request: functions, and namespaces of functions.

A chat template writes a flat list of functions. So a function of a namespace is offered under a qualified name,
`namespace__name`, and a call of it is mapped back to the two names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.serve.bodies import (
    Anything,
    Body,
    ByField,
    Prefer,
    Several,
    Unread,
    optional,
    other_values,
    refuse,
    taking,
)
from radixkv.serve.fields import JsonObject, shown
from radixkv.serve.message_schemas import NAME_RULE, TOOL_NAME, ToolName

_RUNS_NONE = "this server runs no tools itself"


@taking("defer_loading", "allowed_callers", "output_schema")
class ResponseFunction(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema.")
    strict: Anything = None
    async_: Anything = Field(default=None, alias="async")

    def neutral(self) -> JsonObject:
        """Return the function as a chat template reads it."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in fields.items() if value is not None}

    def shown(self) -> JsonObject:
        """Return the function in the form of the Responses API, for the response object."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", **fields, "strict": bool(self.strict)}


_NOT_FUNCTION = other_values("type", ResponseFunction)[0], {"const": "namespace"}


class NotInNamespace(Unread):
    """A tool of a namespace that has no effect."""

    type: Annotated[Any, Prefer("namespace", why=_RUNS_NONE, schemas=_NOT_FUNCTION)]


class Namespace(Body):
    """Functions with a common prefix."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, pattern=f"^{TOOL_NAME}$")]
    description: str | None = None
    tools: Several[Annotated[ResponseFunction | NotInNamespace, ByField("type")]] | None = None

    def functions(self) -> list[tuple[int, ResponseFunction]]:
        """Return the functions with their places in the list."""
        return [(at, tool) for at, tool in enumerate(self.tools or ()) if isinstance(tool, ResponseFunction)]


_SEARCH = "web_search"
_NEITHER = other_values("type", ResponseFunction, Namespace)[0]


class OtherTool(Unread):
    """A tool that the server would have to run itself, which has no effect; Codex always sends a web search."""

    type: Annotated[Any, Prefer(_SEARCH, why=_RUNS_NONE, schemas=(_NEITHER, {"const": _SEARCH}))]


AnyTool = ResponseFunction | Namespace | OtherTool
ToolList = Several[Annotated[AnyTool, ByField("type")]]


@dataclass(slots=True)
class Tools:
    """The tools of one request.

    `functions` are in the form of chat completions, for the template, by their qualified names. `names` maps a
    qualified name to a namespace and a name. `strict` has the qualified names of strict functions. `shown` has the
    accepted tools in the form of the Responses API.
    """

    functions: dict[str, JsonObject] = field(default_factory=dict)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    shown: list[JsonObject] = field(default_factory=list)
    strict: set[str] = field(default_factory=set)

    def add(self, function: ResponseFunction, path: str, namespace: str | None = None) -> None:
        """Add the function at `path`; raise ApiError if its qualified name is taken or too long."""
        name = qualified(namespace, function.name)
        if not re.fullmatch(TOOL_NAME, name):
            raise refuse(f"{path}.name", NAME_RULE)
        if name in self.functions:
            raise refuse(f"{path}.name", f"is the name of two tools: {shown(name)}")
        self.functions[name] = {"type": "function", "function": {**function.neutral(), "name": name}}
        if function.strict is True:
            self.strict.add(name)
        if namespace is not None:
            self.names[name] = namespace, function.name


def read_tools(given: Sequence[AnyTool] | None) -> Tools:
    """Return the tools of a request; raise ApiError for two functions of the same name."""
    tools = Tools()
    for at, tool in enumerate(given or ()):
        if isinstance(tool, ResponseFunction):
            tools.add(tool, f"tools[{at}]")
            tools.shown.append(tool.shown())
        elif isinstance(tool, Namespace):
            for number, function in tool.functions():
                tools.add(function, f"tools[{at}].tools[{number}]", tool.name)
            kept = [function.shown() for _, function in tool.functions()]
            about = {"name": tool.name, "description": tool.description or "", "tools": kept}
            tools.shown.append({"type": "namespace", **about})
    return tools


def qualified(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function.

    >>> qualified(None, "read"), qualified("files", "read")
    ('read', 'files__read')
    """
    return f"{namespace}__{name}" if namespace else name
