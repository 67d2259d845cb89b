"""Render chat templates in jinja2's sandbox, with limits of their steps, their texts and their time.

A template is code that comes with a model, and a thread cannot be killed, so a template counts its own work. Statements
that count are added to the bodies of its loops and macros. Calls, filters, operators and outputs check sizes. The
limits grow with the conversation. Texts equal those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from inspect import unwrap
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from radixkv.errors import ChatError

_LONGEST_SOURCE = 200_000  # characters, which compile in two seconds
# Limits: of any conversation, and for each character in it; another value counts as 16 characters.
_STEPS = 2_000_000, 1000  # nodes of bodies that run
_CHARACTERS = 1 << 24, 64  # of all texts together, and of one value
_SECONDS = 3.0, 1e-5  # of the thread's CPU time
_WIDEST = 1 << 14  # bits of a number
# Methods of texts, and filters: these may make a value many times as large as what they get.
_GROWING = frozenset(
    {
        *("*", "batch", "center", "format", "indent", "join", "ljust", "replace", "rjust", "round", "slice", "tojson"),
        "zfill",
    }
)
_REFUSED = frozenset(
    {
        *("encode", "expandtabs", "format_map", "from_bytes", "pprint", "to_bytes", "translate", "urlize", "wordwrap"),
        "xmlattr",
    }
)
# Filters that do not read the inside of values.
_SHALLOW = frozenset(
    {
        *("count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"),
        *("reverse", "select", "selectattr"),
    }
)
_PADDED = re.compile(r"%[-+ #.\d]*(\d{3}|\*)|\{[^{}:]*:[^{}]*?(\d{3}|\{)")  # formats with wide fields
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first two


def render(source: str, messages: Iterable[Mapping[str, Any]], tools: Any, values: Mapping[str, Any]) -> str:
    """Render a template with messages, tools and other variables.

    Raises ChatError for a template that exceeds a limit, and the errors of jinja2 and of the template.
    """
    given = [_message(message) for message in messages]
    token = _BUDGET.set(_Budget([given, tools]))
    try:
        return _compiled(source).render({"messages": given, "tools": _plain(tools), "documents": None, **values})
    finally:
        _BUDGET.reset(token)


def check_source(source: str) -> str:
    """Return the source of a template; raises ChatError if it is too long for one."""
    if len(source) > _LONGEST_SOURCE:
        raise ChatError(f"the chat template has {len(source)} characters, more than {_LONGEST_SOURCE}")
    return source


class _Budget:
    """The work that one rendering may still do."""

    def __init__(self, conversation: Any) -> None:
        weight = _weight(conversation)
        self._steps, self._characters, seconds = (
            base + each * weight for base, each in (_STEPS, _CHARACTERS, _SECONDS)
        )
        self._end = time.thread_time() + seconds

    def spend(self, steps: int = 1, characters: int = 0) -> None:
        """Count work; raises ChatError when a limit is exceeded, and from then on."""
        self._steps -= steps
        self._characters -= characters
        if min(self._steps, self._characters) < 0 or time.thread_time() > self._end:
            raise ChatError("the template takes too many steps, too much text or too long")

    def check(self, value: Any) -> None:
        """Raise ChatError for a value that is too large, by all the elements and characters in it."""
        self.spend()
        self.check_size(len(value) if type(value) is str else _weight(value, self._characters))

    def check_size(self, size: float) -> None:
        """Raise ChatError for a size that is too large for one value."""
        if size > self._characters:
            raise ChatError("the template makes too large a value")


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


def _weight(value: Any, most: float = math.inf) -> int:
    """Return the number of characters inside a value, where each element counts as 16; stops above `most`."""
    weight, left = 0, [value]
    while left and weight <= most:
        each = left.pop()
        weight += 16
        if isinstance(each, str | bytes):
            weight += len(each)
        elif isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each
        elif isinstance(each, Namespace):
            left.append(object.__getattribute__(each, "_Namespace__attrs"))
    return weight


def _sized(value: Any) -> Any:
    """Return the value; raises ChatError if it is too large."""
    _BUDGET.get().check(value)
    return value


def _check_growth(name: str, given: tuple[Any, ...]) -> None:
    """Raise ChatError if a function, given these arguments, would make too large a value."""
    if name == "format" and isinstance(given[0], str):
        if _PADDED.search(given[0]):
            raise ChatError("the template formats text with wide fields")
        given = given[0].count("%") + given[0].count("{"), given[1:]
    if name == "sum" and any(isinstance(each, list | tuple) for each in given[1:]):
        raise ChatError("the template adds lists")
    if name in _GROWING:
        factors = [abs(each) if isinstance(each, int) else _weight(each) for each in given]
        if name == "replace":
            del factors[1]  # the text that goes
        _BUDGET.get().check_size(math.prod(sorted(factors)[-2:]))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the sizes of its arguments and of its result."""

    @wraps(function)
    def filtered(*given: Any, **named: Any) -> Any:
        if name not in _SHALLOW:
            given = tuple(list(each) if isinstance(each, Iterator) else each for each in given)
            of_jinja = Environment, EvalContext, Context
            values = tuple(each for each in (*given, *named.values()) if not isinstance(each, of_jinja))
            _sized(values)
            _check_growth(name, values)
        return _sized(function(*given, **named))

    return filtered


class Generation(Extension):
    """Parse transformers' `{% generation %}` block, which marks the replies in a template."""

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements inside the block, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Checks(NodeTransformer):
    """Wraps the expressions of a template that make large values."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Let the environment join texts."""
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        """Check the size of a literal that holds variables."""
        self.generic_visit(node)
        is_constant = all(isinstance(each, nodes.Const) for each in node.iter_child_nodes())
        return node if is_constant else _call("sized", [node])

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """Check the size of a literal, which is no target of an assignment."""
        return node if node.ctx == "store" else self.visit_List(node)


def _call(name: str, given: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    sized = staticmethod(_sized)

    def __init__(self) -> None:
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_sized)
        filters = {**self.filters, "tojson": _to_json}
        self.filters = {name: _limited(name, each) for name, each in filters.items() if name not in _REFUSED}
        self.globals |= {
            "raise_exception": _raise,
            "dict": lambda *given, **named: dict(*given, **named),
        }  # without methods
        del self.globals["lipsum"]

    def step(self, weight: int) -> bool:
        """Count the nodes of a body that runs."""
        _BUDGET.get().spend(weight)
        return True

    def concat(self, texts: Iterable[str]) -> str:
        """Join texts that count as output."""
        pieces = list(texts)
        _BUDGET.get().spend(characters=sum(map(len, pieces)))
        return "".join(pieces)

    def joined(self, *values: Any) -> str:
        """Join values as the operator `~` does."""
        return self.concat(map(str, _sized(values)))

    def _generate(self, source: nodes.Template, *given: Any, **named: Any) -> str:
        """Add counts and checks to a template that was parsed, and compile it."""
        _Checks().visit(source)
        found: Iterable[Any] = source.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        for node in list(found):
            counted = _call("step", [nodes.Const(sum(1 for _ in node.find_all(nodes.Node)))])
            node.body.insert(0, nodes.ExprStmt(counted))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(counted, node.test)
        source.set_environment(self)
        return super()._generate(source, *given, **named)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse methods that make text of any size."""
        return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __function: Any, *given: Any, **named: Any) -> Any:  # noqa: N805
        if __function in (__self.step, __self.joined, __self.sized):
            return __function(*given)
        method = unwrap(__function)  # the sandbox wraps `format`
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
            given = tuple(list(each) if isinstance(each, Iterator) else each for each in given)
            _check_growth(method.__name__, (method.__self__, *given, *named.values()))
        values = (*given, *named.values())
        if sum(isinstance(each, list | tuple | dict | Namespace) for each in values) > 1:
            _sized(values)
        return _sized(super().call(__context, __function, *given, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of a sum, a product, a power and a formatted text before they are made."""
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
            if bits.get(operator, 0) > _WIDEST:
                raise ChatError("the template makes too large a number")
        elif isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            _sized((left, right))
            _check_growth("format" if operator == "%" else operator, (left, right))
        return _sized(super().call_binop(context, operator, left, right))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write a value as JSON, without the escapes for HTML of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


ENVIRONMENT = _Environment()
"""Parses chat templates; `render` compiles and runs them."""

_AS: dict[type, Callable[..., Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return ENVIRONMENT.from_string(check_source(source))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates get it: without fields that are None, and with thinking in the fields they read."""
    given = {name: _plain(value) for name, value in message.items() if value is not None}
    thinking = next((given[name] for name in _REASONING if name in given), None)
    return given if thinking is None else {"thinking": thinking, **given, "reasoning_content": thinking}


def _plain(value: Any) -> Any:
    """Return a copy of JSON's types; another object may have methods that the sandbox does not know."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value)) if isinstance(value, tuple) else [*map(_plain, value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    kind = next((kind for kind in _AS if isinstance(value, kind)), None)
    return f"<{type(value).__name__}>" if kind is None else _AS[kind](value)
