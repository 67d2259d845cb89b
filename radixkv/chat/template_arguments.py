"""Additional arguments of a chat template, such as `enable_thinking`: find the ones that a template reads.

Each model family has its own variable for the same purpose: Qwen's templates read `enable_thinking`, DeepSeek's
`thinking`, and gpt-oss's `reasoning_effort`. A client's option therefore sets several variables, and a template takes
the ones that it reads. The arguments change the prompt, so replies are remembered for each set of arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateSyntaxError

from radixkv.engine.template_renderer import ENVIRONMENT

Scalar: TypeAlias = bool | int | float | str
Arguments: TypeAlias = Mapping[str, Scalar]

# Values that the renderer or transformers passes to each template.
_RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "date_string"),
        *("documents", "max_length", "messages", "padding", "raise_exception", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "strftime_now", "tokenize", "tokenizer_kwargs"),
        *("tools", "truncation"),
    }
)


@dataclass(frozen=True, slots=True)
class TemplateOption:
    """A client's option: the name of its field, and the value for each variable that a template may read.

    A `hint` is no request: a template that does not read it fulfils it as well.
    """

    name: str
    values: tuple[tuple[str, Scalar], ...]
    hint: bool = False


def thinking_option(name: str, *, enabled: bool, hint: bool = False) -> TemplateOption:
    """Return the option that enables or disables thinking."""
    return TemplateOption(name, (("enable_thinking", enabled), ("thinking", enabled)), hint)


def effort_option(name: str, effort: str) -> TemplateOption:
    """Return the option for the effort of thinking; "none" disables it, and other values enable it."""
    return TemplateOption(name, (("reasoning_effort", effort), *thinking_option(name, enabled=effort != "none").values))


def template_arguments(source: str, options: Iterable[TemplateOption]) -> tuple[dict[str, Scalar], list[str]]:
    """Return the arguments for a template with this source, and the names of options that it does not read.

    Later options take precedence. Hints are not named.

    >>> options = [effort_option("reasoning_effort", "none"), TemplateOption("tone", (("tone", "kind"),))]
    >>> template_arguments("{% if enable_thinking is defined and not enable_thinking %}...{% endif %}", options)
    ({'enable_thinking': False}, ['tone'])
    """
    arguments: dict[str, Scalar] = {}
    unread = []
    for option in options:
        values = {variable: value for variable, value in option.values if variable in variables(source)}
        arguments |= values
        if not values and not option.hint:
            unread.append(option.name)
    return arguments, unread


@lru_cache(maxsize=64)
def variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads and a client may set; none for a source that is not valid.

    Parsing takes some milliseconds; the result is memoized.
    """
    try:
        parsed = ENVIRONMENT.parse(source)
        found = meta.find_undeclared_variables(parsed)
    except (TemplateSyntaxError, RecursionError):  # rendering raises an error that describes it
        return frozenset()
    # jinja2 counts names that a conditional sets, even where each of its branches does.
    found &= set(_read_unset(parsed.body, set()))
    return frozenset(name for name in found - _RESERVED if not name.endswith(("_token", "_tokens")))


def _read_unset(body: Iterable[nodes.Node], names: set[str]) -> Iterator[str]:
    """Yield the names that statements may read before they set them; add to `names` the ones that they always set."""
    for node in body:
        match node:
            case nodes.Name(ctx="load"):
                if node.name not in names:
                    yield node.name
            case nodes.Name():
                names.add(node.name)
            case nodes.Assign():
                yield from _read_unset((node.node, node.target), names)
            case nodes.If():
                yield from _read_unset([node.test], names)
                branches = [names.copy()]
                yield from _read_unset(node.body, branches[0])
                for other in node.elif_:
                    yield from _read_unset([other.test], names)
                    branches.append(names.copy())
                    yield from _read_unset(other.body, branches[-1])
                branches.append(names.copy())
                yield from _read_unset(node.else_, branches[-1])
                names |= set.intersection(*branches)
            case nodes.For():
                yield from _read_unset([node.iter], names)
                inside = {*names, "loop"}
                tests = [] if node.test is None else [node.test]
                yield from _read_unset([node.target, *tests, *node.body], inside)
                yield from _read_unset(node.else_, names.copy())
            case nodes.AssignBlock():
                yield from _read_unset(node.body, names.copy())
                yield from _read_unset([node.target], names)
            case nodes.With():
                yield from _read_unset(node.values, names)
                yield from _read_unset([*node.targets, *node.body], names.copy())
            case nodes.Macro() | nodes.CallBlock() | nodes.FilterBlock():  # scopes of their own
                yield from _read_unset(node.iter_child_nodes(), names.copy())
            case _:
                yield from _read_unset(node.iter_child_nodes(), names)


def arguments_key(arguments: Arguments) -> str:
    """Return a text that is equal for equal arguments only; empty without arguments."""
    return json.dumps(arguments, sort_keys=True) if arguments else ""
