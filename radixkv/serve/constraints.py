"""Read the fields that constrain a reply: formats of each API, vLLM's names for constraints, and the choice of tools.

A request has at most one constraint on its text. The choice of tools becomes a rule for calls. Without the extra
`radixkv[grammar]`, rules for voluntary calls have no effect; constraints and required calls are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.chat.constrained import CallRule
from radixkv.errors import InvalidInput
from radixkv.grammar.constraint import installed
from radixkv.sampling.params import SamplingParams, parameters
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, shown

FORMATS = ("text", "json_object", "json_schema")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, and the names of the same constraints in its field `structured_outputs`."""

OPTIONS_OF_OUTPUTS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_ANY_OBJECT = {"type": "object"}
_PARAMETERS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_NEEDS_EXTRA = "needs llguidance on the server: pip install 'radixkv[grammar]'"


@dataclass(frozen=True, slots=True)
class ReplyConstraint:
    """A sampling parameter that constrains the reply, its checked value, and the field that gave it."""

    parameter: str
    value: Any
    field: str


# ---- constraints


def read_constraint(fields: Fields, own: ReplyConstraint | None) -> ReplyConstraint | None:
    """Read vLLM's fields; `own` is the constraint that a field of the API gives. Raise ApiError for two constraints."""
    found = [] if own is None else [own]
    for name, kind in GUIDED.items():
        found += _constraint(fields, name, kind)
    if (given := fields.take("structured_outputs")) is not None:
        outputs = fields.nested(given, fields.path("structured_outputs"))
        for kind in _PARAMETERS:
            found += _constraint(outputs, kind, kind)
        if outputs.flag("json_object"):
            found.append(ReplyConstraint("json_schema", _ANY_OBJECT, outputs.path("json_object")))
        outputs.only("structural_tag", (), "use tools, whose calls are constrained, or a grammar")
        outputs.ignore(*OPTIONS_OF_OUTPUTS)
        outputs.close()
    if len(found) > 1:
        message = f"{found[0].field} and {found[1].field} are given: a reply has at most one constraint"
        raise bad_request(message, found[1].field, "invalid_value")
    return found[0] if found else None


def read_response_format(fields: Fields, name: str) -> ReplyConstraint | None:
    """Read OpenAI's `response_format`, whose schema is in a field of its own; None for text."""
    given = fields.take(name)
    if given is None:
        return None
    form = fields.nested(given, fields.path(name))
    kind = _kind(form, FORMATS)
    if kind == "json_schema":
        inner = form.nested(form.need("json_schema"), form.path("json_schema"))
        form.close()
        return _of_schema(inner, needed=True)
    return _of_schema(form) if kind == "json_object" else None


def read_text_format(fields: Fields, name: str, kinds: Sequence[str] = FORMATS) -> ReplyConstraint | None:
    """Read a format whose schema is a field of it, as in the Responses and Messages APIs; None for text."""
    given = fields.take(name)
    if given is None:
        return None
    form = fields.nested(given, fields.path(name))
    kind = _kind(form, kinds)
    return _of_schema(form, needed=kind == "json_schema") if kind != "text" else None


def _kind(form: Fields, kinds: Sequence[str]) -> str:
    kind = form.need("type")
    if kind not in kinds:
        form.refuse("type", f"must be {' or '.join(kinds)}, not {shown(kind)}")
    return str(kind)


def _of_schema(form: Fields, *, needed: bool = False) -> ReplyConstraint:
    """Return the constraint of the field `schema`; without one, the reply is any JSON object."""
    schema = form.need("schema") if needed else form.take("schema")
    if schema is not None and not isinstance(schema, dict):
        form.wrong("schema", "a JSON schema (an object)", schema)
    form.text("name")
    form.text("description")
    form.flag("strict")  # without effect: every schema is enforced
    form.close()
    return _checked("json_schema", _ANY_OBJECT if schema is None else schema, form.path("schema"))


def _constraint(fields: Fields, name: str, kind: str) -> list[ReplyConstraint]:
    """Read one of vLLM's constraints, empty if it is absent; a schema may be its JSON text."""
    given = fields.take(name)
    if given is None:
        return []
    if kind == "choice":
        if not isinstance(given, list) or not given:
            fields.refuse(name, "must be an array of strings that is not empty")
    elif not isinstance(given, str) and not (kind == "json" and isinstance(given, dict)):
        fields.wrong(name, "a JSON schema (an object, or its text)" if kind == "json" else "a string", given)
    return [_checked(_PARAMETERS[kind], given, fields.path(name))]


def _checked(parameter: str, value: Any, field: str) -> ReplyConstraint:
    try:
        return ReplyConstraint(parameter, parameters(SamplingParams)[parameter].checked(parameter, value), field)
    except InvalidInput as error:
        raise bad_request(f"{field}{str(error).removeprefix(parameter)}", field, "invalid_value") from error


# ---- calls


def read_call_rule(
    fields: Fields, names: Collection[str], strict: Collection[str], *, nested: bool
) -> tuple[CallRule, bool]:
    """Read OpenAI's `tool_choice` and `parallel_tool_calls`; also return whether calls are taken out of the reply.

    `names` are those of the tools, and `strict` those of the strict ones. In a `nested` choice the name of a function
    is in an object of its own, as in chat completions.
    """
    choice, parallel = fields.take("tool_choice"), fields.flag("parallel_tool_calls", True)
    required, only = choice == "required", None
    if isinstance(choice, dict):
        required, only = _chosen(fields.nested(choice, fields.path("tool_choice")), nested)
        parallel = parallel and choice["type"] != "function"
    elif choice not in (None, "auto", "none", "required"):
        fields.refuse("tool_choice", 'must be "auto", "none", "required", or an object that names a function')
    rule = CallRule(required, parallel, only, frozenset(strict))
    return checked_rule(rule, fields, names, parallel="parallel_tool_calls"), bool(names) and choice != "none"


def checked_rule(rule: CallRule, fields: Fields, names: Collection[str], *, parallel: str) -> CallRule:
    """Return a rule as it can be kept. Raise ApiError for a required call of a tool that is missing.

    Without llguidance only required calls are kept, which are refused later; the field `parallel` is ignored then.
    """
    if rule.required and not names:
        fields.refuse("tool_choice", "requires a call, so it needs tools")
    if missing := sorted((rule.only or frozenset()) - {*names}):
        fields.refuse("tool_choice", f"names a tool that is not in tools: {shown(missing[0])}")
    if rule.required or installed():
        return rule
    if not rule.parallel and names:
        fields.has_no_effect(parallel, _NEEDS_EXTRA)
    return CallRule()


def _chosen(choice: Fields, nested: bool) -> tuple[bool, frozenset[str]]:
    """Return whether a call is required, and the tools that may be called."""
    kind = choice.need("type")
    if kind == "function":
        names, required = [_function_name(choice, nested)], True
    elif kind == "allowed_tools":
        allowed = choice.nested(choice.need("allowed_tools"), choice.path("allowed_tools")) if nested else choice
        mode = allowed.need("mode")
        if mode not in ("auto", "required"):
            allowed.refuse("mode", f"must be auto or required, not {shown(mode)}")
        path, tools = allowed.path("tools"), allowed.list("tools")
        if not tools:
            allowed.refuse("tools", "must be an array of at least one tool")
        names = [_allowed_name(choice.nested(tool, f"{path}[{at}]"), nested) for at, tool in enumerate(tools)]
        required = mode == "required"
        if nested:
            allowed.close()
    else:
        choice.refuse("type", f"must be function or allowed_tools, not {shown(kind)}: there are no other tools")
    choice.close()
    return required, frozenset(names)


def _allowed_name(tool: Fields, nested: bool) -> str:
    tool.only("type", ("function",), "there are no other tools")
    name = _function_name(tool, nested)
    tool.close()
    return name


def _function_name(choice: Fields, nested: bool) -> str:
    if not nested:
        return choice.needed_text("name")
    function = choice.nested(choice.need("function"), choice.path("function"))
    name = function.needed_text("name")
    function.close()
    return name
