"""Declare OpenAI's choice of tools, and convert a choice to a rule for calls.

Without the extra `radixkv[grammar]`, rules for voluntary calls have no effect; required calls are refused later.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from radixkv.chat.constrained import FREE_CALLS, CallRule
from radixkv.grammar.constraint import installed
from radixkv.serve.bodies import AtLeastOne, Body, ByField, ByType, Several, needs, refuse, without_effect
from radixkv.serve.fields import IgnoredFields, shown

_NEEDS_EXTRA = "needs llguidance on the server: pip install 'radixkv[grammar]'"
_FORMS = ByType('"auto", "none", "required", or an object that names a function', "union_value")
_SOME = AtLeastOne("must be an array of at least one tool")

Word = Literal["auto", "none", "required"]
Mode = Literal["auto", "required"]


# ---- chat completions


class FunctionName(Body):
    """The name of a function in an object of its own."""

    name: str


class NestedFunction(Body):
    """A function that may be called."""

    type: Literal["function"] | None = None
    function: FunctionName


class NestedFunctions(Body):
    """The functions that may be called, and whether one must be."""

    mode: Mode
    tools: Annotated[Several[NestedFunction], _SOME]

    _has_tools = needs("tools", _SOME.why, _SOME.code)


class NestedFunctionChoice(Body):
    """The function that must be called, in chat completions."""

    type: Literal["function"]
    function: FunctionName


class NestedAllowedChoice(Body):
    """The functions that may be called, in chat completions."""

    type: Literal["allowed_tools"]
    allowed_tools: NestedFunctions


NestedChoice = Annotated[Word | Annotated[NestedFunctionChoice | NestedAllowedChoice, ByField("type")], _FORMS]


# ---- responses


class AllowedFunction(Body):
    """A function that may be called."""

    type: Literal["function"] | None = None
    name: str


class FunctionChoice(Body):
    """The function that must be called, in the Responses API."""

    type: Literal["function"]
    name: str


class AllowedChoice(Body):
    """The functions that may be called, in the Responses API."""

    type: Literal["allowed_tools"]
    mode: Mode
    tools: Annotated[Several[AllowedFunction], _SOME]

    _has_tools = needs("tools", _SOME.why, _SOME.code)


Choice = Annotated[Word | Annotated[FunctionChoice | AllowedChoice, ByField("type")], _FORMS]
AnyChoice = str | NestedFunctionChoice | NestedAllowedChoice | FunctionChoice | AllowedChoice | None


# ---- rules


def call_rule(
    choice: AnyChoice,
    parallel: bool | None,
    names: Collection[str],
    strict: Collection[str],
    ignored: IgnoredFields | None,
) -> tuple[CallRule, bool]:
    """Return the rule of `tool_choice` and `parallel_tool_calls`, and whether calls are taken out of the reply.

    `names` are the names of the tools, and `strict` the names of the strict ones. Raises ApiError as `checked_rule`.
    """
    several, only = parallel is not False, None
    required = choice == "required"
    match choice:
        case NestedFunctionChoice():
            required, only, several = True, [choice.function.name], False
        case FunctionChoice():
            required, only, several = True, [choice.name], False
        case NestedAllowedChoice():
            required = choice.allowed_tools.mode == "required"
            only = [each.function.name for each in choice.allowed_tools.tools]
        case AllowedChoice():
            required, only = choice.mode == "required", [each.name for each in choice.tools]
    rule = CallRule(required, several, None if only is None else frozenset(only), frozenset(strict))
    rule = checked_rule(rule, names, ignored, parallel="parallel_tool_calls")
    return rule, bool(names) and choice != "none"


def checked_rule(rule: CallRule, names: Collection[str], ignored: IgnoredFields | None, *, parallel: str) -> CallRule:
    """Return a rule as it can be kept. Raise ApiError for a required call of a tool that is missing.

    Without llguidance only required calls are kept, which are refused later; the field `parallel` is ignored then.
    """
    if rule.required and not names:
        raise refuse("tool_choice", "requires a call, so it needs tools")
    if missing := sorted((rule.only or frozenset()) - {*names}):
        raise refuse("tool_choice", f"names a tool that is not in tools: {shown(missing[0])}")
    if rule.required or rule == FREE_CALLS or installed():
        return rule
    if not rule.parallel and names:
        without_effect(parallel, _NEEDS_EXTRA, ignored)
    return FREE_CALLS
