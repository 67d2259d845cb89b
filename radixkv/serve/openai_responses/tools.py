"""Read the tools of a Responses request: functions, and namespaces of functions.

A chat template writes a flat list of functions. So a function of a namespace is offered under a qualified name,
`namespace__name`, and a call of it is mapped back to the two names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.serve.fields import Fields, JsonObject, shown
from radixkv.serve.message_schemas import check_function

_FUNCTION = ("name", "description", "parameters")
_HINTS = ("strict", "defer_loading", "allowed_callers", "output_schema", "async")  # not written by templates


@dataclass(slots=True)
class Tools:
    """The tools of one request.

    `functions` are in the form of chat completions, for the template. `names` maps a qualified name to a namespace and
    a name. `strict` has the qualified names of strict functions. `shown` has the accepted tools in the form of the
    Responses API.
    """

    functions: list[JsonObject] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    shown: list[JsonObject] = field(default_factory=list)
    strict: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)

    @property
    def taken(self) -> set[str]:
        """The qualified names of all functions."""
        return self._taken

    def add(self, function: JsonObject, fields: Fields, *, strict: bool) -> None:
        """Add a function; raise ApiError if its name is taken."""
        if function["name"] in self._taken:
            fields.refuse("name", f"is the name of two tools: {shown(function['name'])}")
        self._taken.add(function["name"])
        if strict:
            self.strict.add(function["name"])
        self.functions.append({"type": "function", "function": function})


def read_tools(fields: Fields) -> Tools:
    """Read the field `tools`; raise ApiError for a wrong function.

    A tool that the server would have to run itself, such as a web search, is an ignored field.
    """
    tools = Tools()
    for at, each in enumerate(fields.list("tools") or ()):
        tool = fields.nested(each, f"{fields.path('tools')}[{at}]")
        if each.get("type") == "namespace":
            _read_namespace(tool, tools)
        elif _is_function(tool, each):
            function = _read_function(tool)
            tools.add(function, tool, strict=each.get("strict") is True)
            tools.shown.append(_shown(function, each))
    return tools


def qualified(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function.

    >>> qualified(None, "read"), qualified("files", "read")
    ('read', 'files__read')
    """
    return f"{namespace}__{name}" if namespace else name


def _read_namespace(fields: Fields, tools: Tools) -> None:
    """Add the functions of a namespace."""
    fields.ignore("type")
    namespace = fields.needed_text("name", empty=False)
    check_function(fields.nested({"name": namespace}, fields.path("").removesuffix(".")))
    description = fields.text("description") or ""
    kept: list[JsonObject] = []
    for at, each in enumerate(fields.list("tools") or ()):
        tool = fields.nested(each, f"{fields.path('tools')}[{at}]")
        if _is_function(tool, each):
            function = _read_function(tool)
            name = function["name"]
            kept.append(_shown(function, each))
            function = {**function, "name": qualified(namespace, name)}
            check_function(Fields(function, fields.path(f"tools[{at}]")))
            tools.add(function, tool, strict=each.get("strict") is True)
            tools.names[function["name"]] = namespace, name
    fields.close()
    tools.shown.append({"type": "namespace", "name": namespace, "description": description, "tools": kept})


def _is_function(fields: Fields, given: JsonObject) -> bool:
    """Whether a tool is a function; tools of other types are ignored fields, or refused by a strict server."""
    if given.get("type") is None:
        fields.need("type")
    fields.prefer("type", ("function", "namespace"), "this server runs no tools itself")
    return given.get("type") == "function"


def _read_function(fields: Fields) -> JsonObject:
    """Return a function as a chat template reads it; raise ApiError for a wrong field."""
    function = {name: value for name in _FUNCTION if (value := fields.take(name)) is not None}
    check_function(fields.nested(function, fields.path("").removesuffix(".")))
    fields.ignore(*_HINTS)
    fields.close()
    return function


def _shown(function: JsonObject, given: JsonObject) -> JsonObject:
    """Return a function in the form of the Responses API, for the response object."""
    described = {name: function.get(name) for name in _FUNCTION}
    return {"type": "function", **described, "strict": bool(given.get("strict"))}
