"""Write the grammar of tool calls in the format of a model: required calls, and calls that follow the schema of a tool.

Tags that are tokens are named by their ids, since text never contains them. JSON and Python calls enforce each schema
that replies can have. Arguments in tags, or with quotes of their own, are written member by member: a schema with other
keywords is refused with the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.calls.source import Source, first_literal
from radixkv.chat.calls.values import parts_of, typed, types_of
from radixkv.chat.template import ChatTemplate
from radixkv.errors import InvalidConstraint
from radixkv.grammar.constraint import quoted, schema_with_separators

_NAMED = "[ARGS]"  # in templates whose calls are a name and arguments, instead of an array
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
_WORDS = re.compile(r"(\{\w+\}|INDEX)")
_OPTIONAL = re.compile(r"\(([^()]*)\)")
_PATTERNS = {"{index}": "/[0-9]{1,3}/", "INDEX": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/", "{any}": r"/[\w-]+/"}
_CONSTANTS = {"boolean": '("True" | "False")', "null": '"None"'}
_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "$schema", "$defs", "definitions", "$comment"}
)
_KEY = re.compile(r"[^\s<>\[\]{}()\"'=:]{1,300}")  # of a member that is no JSON
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
Tool = tuple[str, Mapping[str, Any]]


class CallGrammar:
    """Rules for calls in the format of a model. The schemas of the `enforced` tools are."""

    def __init__(
        self,
        template: ChatTemplate,
        form: CallFormat,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        enforced: Collection[str],
    ) -> None:
        """Write calls of `tools`; `parallel` allows several calls, in formats that have them."""
        self._template, self._form, self._tools, self._enforced = template, form, tools, enforced
        self._named = form.short_ids and _NAMED in template.rendering.template
        self._channels = len(form.starts) > 1
        self._parallel = parallel and form.bare != "{" and not self._channels
        self._rules: list[str] = []

    def required(self) -> list[str]:
        """Return the rules by which `calls` is one call or more."""
        start = "" if self._form.bare or self._channels else self._literal(self._form.start)
        return [f"calls: {start} {self._rest()}", *self._of_tools()]

    def voluntary(self, final: str) -> list[str]:
        """Return the rules by which the reply is text, after which calls may follow; `final` stands before the text."""
        form = self._form
        if self._channels:
            return [f"reply: {final}TEXT | calls", *self.required()]
        if form.bare:  # text that begins like a call is one
            words = rf"WORDS: /(\s*[^{re.escape(form.bare)}\s](.|\n)*)?/"
            return [f"reply: {final}(WORDS | calls)", words, *self.required()]
        before = until(self._template, "before", form.start)
        return [f"reply: {final}(TEXT | before calls)", *before, f"calls: {self._rest()}", *self._of_tools()]

    # ---- inside: the calls of a block

    def _rest(self) -> str:
        """Return the expression for all calls, after the tag of the first one."""
        form = self._form
        start, end = ("", "") if form.bare else (self._literal(form.start), self._literal(form.end))
        if form.array or (form.short_ids and not self._named):
            space = '" "? ' if form.short_ids else ""
            return f'{space}"[" {self._several("call", quoted(", "))} "]" {end}'
        if form.section:
            return f"{self._several('call', quoted(chr(10)) if form.shape == 'python' else '')} {end}"
        return self._several(f"call {end}", f"{quoted(chr(10)) if end else ''} {start}")

    def _several(self, call: str, between: str) -> str:
        return f"{call} ({between} {call})*" if self._parallel else call

    def _of_tools(self) -> list[str]:
        names = [f"call_{at}" for at in range(len(self._tools))]
        rules = [f"call: {' | '.join(names)}"]
        for rule, (name, function) in zip(names, self._tools, strict=True):
            try:
                rules.append(f"{rule}: {self._call(rule, name, self._schema(name, function))}")
            except InvalidConstraint as error:
                reason = str(error).removeprefix("json_schema, ")
                message = f"tools: the parameters of {name!r}, {reason}"
                raise InvalidConstraint(message, parameter=f"tools.{name}", place=error.place) from error
        return [*rules, *self._rules]

    def _call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """Return the expression for a call of one tool."""
        form, enforced = self._form, name in self._enforced
        if self._channels:  # as the model writes a call after its thinking
            head, tail = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
        elif form.shape == "python":
            head, tail = "{name}(", ")"
        elif form.shape == "json" and not self._named:
            head, _, tail = form.entry.replace("NAME", quoted(name)).partition("ARGUMENTS")
        else:
            template = self._template.rendering.template
            head = _OPTIONAL.sub(lambda found: found[1] if first_literal(found[1]) in template else "", form.head)
            tail = form.tail
        before, after = self._literal(head.replace("{name}", name)), self._literal(tail)
        if form.shape == "own quotes" and not enforced:
            return f"{before} {self._text(rule, tail)}"
        if form.shape == "own quotes":
            arguments = self._quoted(rule, schema, "")
        else:
            arguments = _json(schema) if form.shape in ("json", "header") else self._members(rule, schema, enforced)
        return f"{before} {arguments} {after}"

    # ---- inside: arguments that are no JSON object

    def _members(self, rule: str, schema: Mapping[str, Any], enforced: bool) -> str:
        """Return the expression for arguments in tags or of a Python call: in order, optional ones may be missing."""
        form = self._form
        if not enforced and form.shape == "tags":
            key = self._literal(form.argument.replace("{key}", "{any}"))
            return f"({key} {self._text(f'{rule}_any', form.close)})*"
        if not enforced:
            member = r'/[a-zA-Z_]\w*/ "=" %json {}'
            return f'({member} (", " {member})*)?'
        members = []
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for at, (key, given, needed) in enumerate(self._properties(schema, "")):
            whole = {**definitions, **given}
            if form.shape == "tags":
                text = self._argument(f"{rule}_{at}", key, whole)
            else:
                constant = _CONSTANTS.get(str(given.get("type"))) if given.keys() <= _NOTES else None
                text = f"{self._literal(f'{key}=')} {constant or _json(whole)}"
            members.append((text, needed))
        return self._separated(rule, members, "" if form.shape == "tags" else '", "')

    def _argument(self, rule: str, key: str, schema: Mapping[str, Any]) -> str:
        """Return the expression for an argument in tags, of the types that a reader takes from its schema or tag."""
        form, place, close = self._form, f"/properties/{key}", self._literal(self._form.close)
        parts, types = parts_of(schema, schema), types_of(schema, schema)
        kinds = {kind.replace("integer", "number") for kind in types}
        text = "string" in types
        if len(kinds) != 1 and ("{type}" in form.argument or (text and "{string}" in form.argument)):
            raise _refused("the tag of an argument names one type", place)
        argument = form.argument.replace("{key}", key).replace("{string}", str(text).lower())
        head = self._literal(_OPTIONAL.sub("", argument.replace("{type}", "".join(kinds))))
        if not text:
            return f"{head} {_json(schema)} {close}"
        lists = [_listed(each) for each in parts]
        ways = ("$ref", "anyOf") if None in lists else ("$ref", "anyOf", "const", "enum")
        for each in parts:
            _refuse_others(each, _NOTES | {next((way for way in ways if way in each), "type")}, place)
        if None in lists:
            return f"{head} {self._text(rule, form.close)}"
        values = [self._choice(each, types, place) for listed in lists for each in listed or ()]
        return f"{head} ({' | '.join(values)}) {close}"

    def _choice(self, value: Any, types: frozenset[str], place: str) -> str:
        """Return the expression for a listed value in tags or quotes, if it is read back."""
        form, read = self._form, list[str]()
        text = value if isinstance(value, str) else json.dumps(value)
        end, ends = (form.quote, (form.quote,)) if form.quote else (form.close, form.closings)
        list(Source(text + end, final=True).until(ends, read.append))
        if isinstance(value, dict | list) or json.loads(typed("".join(read), types)) != value:
            raise _refused(f"the model's format of calls cannot write {value!r}", place)
        quote = self._literal(form.quote) if isinstance(value, str) else ""
        return f"{quote} {quoted(text)} {quote}"

    def _quoted(self, rule: str, schema: Any, place: str) -> str:
        """Return the expression for a value with bare keys and quotes of the format."""
        quote = self._literal(self._form.quote)
        match schema:
            case {"enum": _} | {"const": _}:
                _refuse_others(schema, _NOTES | {"enum", "const"}, place)
                values = [self._choice(each, types_of({"const": each}, {}), place) for each in _listed(schema) or ()]
                return f"({' | '.join(values)})"
            case {"type": "string"}:
                _refuse_others(schema, _NOTES, place)
                return f"{quote} {self._text(rule, self._form.quote)}"
            case {"type": "array"}:
                _refuse_others(schema, _NOTES | {"items"}, place)
                item = self._quoted(f"{rule}_i", schema.get("items"), f"{place}/items")
                return f'"[" ({item} ("," {item})*)? "]"'
            case {"type": "object"}:
                members = [
                    (f"{quoted(f'{key}:')} {self._quoted(f'{rule}_{at}', given, f'{place}/properties/{key}')}", needed)
                    for at, (key, given, needed) in enumerate(self._properties(schema, place))
                ]
                return f'"{{" {self._separated(rule, members, quoted(","))} "}}"'
            case {"type": "integer" | "number" | "boolean" | "null"}:
                return _json(schema)
        raise _refused("the format of calls has no other types than string, array, object and JSON's scalars", place)

    def _properties(self, schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
        """Yield name, schema and necessity of each member of an object."""
        _refuse_others(schema, _NOTES | _OF_OBJECTS, place)
        if isinstance(schema.get("additionalProperties"), Mapping):
            raise _refused("members must be named in this format of calls", f"{place}/additionalProperties")
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if missing := [name for name in required if name not in properties]:
            raise _refused(f"{missing[0]!r} must be named in properties in this format of calls", f"{place}/required")
        for key, given in properties.items():
            if not isinstance(given, Mapping) or not _KEY.fullmatch(key):
                raise _refused("the model's format of calls cannot write this member", f"{place}/properties/{key}")
            yield key, given, key in required

    def _separated(self, rule: str, members: Sequence[tuple[str, bool]], comma: str) -> str:
        """Return the expression for members in order with separators: `first` before any member, `next` after one."""
        for state, before in (("first", ""), ("next", comma)):
            for at, (text, needed) in enumerate(members):
                without = "" if needed else f" | {rule}_{state}_{at + 1}"
                self._rules.append(f"{rule}_{state}_{at}: {before} {text} {rule}_next_{at + 1}{without}")
            self._rules.append(f'{rule}_{state}_{len(members)}: ""')
        return f"{rule}_first_0"

    # ---- inside: text

    def _split(self, text: str) -> list[str]:
        """Split a text into the tags of the format, and the text between."""
        tags = [*sorted(map(re.escape, self._form.tags), key=len, reverse=True), r"<\|[^<>|]*\|>"]
        return [piece for piece in re.split(f"({'|'.join(tags)})", text) if piece]

    def _literal(self, text: str) -> str:
        """Return the expression for a text of a row, with its tags as tokens, and its words as patterns.

        Text between tokens is one string: a lexer that has read a line break cannot go back to another string.
        """
        parts: list[str] = []
        for is_token, pieces in groupby(self._split(text), lambda each: self._template.token_of(each) is not None):
            if is_token:
                parts += [tag(self._template, each) for each in pieces]
            else:
                parts += [_PATTERNS.get(word) or quoted(word) for word in _WORDS.split("".join(pieces)) if word]
        return " ".join(parts)

    def _text(self, rule: str, end: str) -> str:
        """Return the expression for any text up to and including `end`."""
        if self._template.token_of(self._split(end.lstrip())[0]) is not None:
            return f"TEXT {self._literal(end.lstrip())}"
        self._rules.append(f"{rule}_text[lazy]: /(.|\\n)*{escaped(end.strip())}/")
        return f"{rule}_text {self._literal(end[len(end.rstrip()) :])}"

    def _schema(self, name: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema of a call's arguments, which are an object in any case."""
        if name not in self._enforced:
            return _ANY_OBJECT
        given = function.get("parameters")
        schema = {"type": "object", **(given if isinstance(given, Mapping) else _NO_ARGUMENTS)}
        schema_with_separators(schema)
        if schema["type"] != "object":
            raise _refused("the arguments of a tool are an object", "/type")
        return schema


def _refused(why: str, place: str) -> InvalidConstraint:
    return InvalidConstraint(f"at #{place}: {why}", place=place)


def _refuse_others(schema: Mapping[str, Any], allowed: frozenset[str], place: str) -> None:
    """Raise InvalidConstraint for a schema that has other keywords."""
    if keyword := next((keyword for keyword in schema if keyword not in allowed), ""):
        raise _refused(f"the model's format of calls cannot enforce {keyword!r}", f"{place}/{keyword}")


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists itself; None if it allows values that are not listed."""
    match schema:
        case {"const": value}:
            return [value]
        case {"enum": [*values]}:
            return values
        case {"type": "null"}:
            return [None]
    return [] if schema.keys() & {"anyOf", "$ref"} else None


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def tag(template: ChatTemplate, tag: str) -> str:
    """Return the expression for a tag."""
    token = template.token_of(tag)
    return quoted(tag) if token is None else f"<[{token}]>"


def until(template: ChatTemplate, rule: str, tag: str) -> Iterator[str]:
    """Yield the rules for text up to and including a tag."""
    token = template.token_of(tag)
    lazy = f"/(.|\\n)*{escaped(tag)}/"
    if token is None:
        yield f"{rule}[lazy]: {lazy}"
    else:
        yield f"{rule}: TEXT <[{token}]> | {rule}_spelled"
        yield f"{rule}_spelled[lazy]: {lazy}"  # the tag's text can also be sampled in pieces


def escaped(text: str) -> str:
    """Return a regular expression for a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
