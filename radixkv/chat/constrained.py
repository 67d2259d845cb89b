"""Write the grammar of a constrained reply: thinking first, then the answer, or tool calls in the model's format.

A constraint on a conversation's reply is about its answer: the thinking of a model stays free. A call is constrained to
the schema of its tool, inside the tags with which the model writes calls. Tags that are tokens are named by their ids,
since text never contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixkv.chat.call_grammars import CallGrammar, escaped, tag, until
from radixkv.chat.calls.formats import HERMES
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.template import ChatTemplate, Thinking
from radixkv.chat.thinking import BODY, CHANNEL
from radixkv.grammar.constraint import embedded
from radixkv.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class CallRule:
    """The calls that a reply must or may make.

    `required`: the reply consists of calls. `parallel`: there may be several calls, except in formats without tags,
    whose templates take one. `only` has the names of the tools that may be called, None for all of them. `strict` has
    the names of the tools to whose schemas voluntary calls are constrained; required ones always are.
    """

    required: bool = False
    parallel: bool = True
    only: frozenset[str] | None = None
    strict: frozenset[str] = frozenset()

    def constrains(self, params: SamplingParams) -> bool:
        """Whether a reply with these parameters needs a grammar; `constrained` changes no others."""
        return params.constraint is not None or self.required or self.limits_voluntary_calls

    @property
    def limits_voluntary_calls(self) -> bool:
        """Whether calls are constrained that a reply need not make."""
        return bool(self.strict) or not self.parallel or self.only is not None


FREE_CALLS = CallRule()


def strict_tools(tools: Sequence[Any] | None) -> frozenset[str]:
    """Return the names of the tools with `strict: true`."""
    return frozenset(name for name, function in tools_by_name(tools).items() if function.get("strict") is True)


def constrained(
    params: SamplingParams, template: ChatTemplate, rule: CallRule, thinking: Thinking, *, reads_calls: bool = True
) -> SamplingParams:
    """Return the parameters whose constraint covers the whole reply; `params` itself if that has none.

    The constraint of `params` is about the answer. With tools, the reply is such an answer or consists of calls, unless
    `rule` requires calls. `reads_calls` is false if the tools of the template are not to be called. O(bytes of the
    tools). Raises InvalidConstraint for the schema of a tool.
    """
    form = template.call_format or (HERMES if rule.required else None)
    calls = None
    if form is not None and reads_calls and template.tools:
        allowed = [tool for tool in tools_by_name(template.tools).items() if rule.only is None or tool[0] in rule.only]
        enforced = frozenset(name for name, _ in allowed if rule.required or name in rule.strict)
        calls = CallGrammar(template, form, allowed, parallel=rule.parallel, enforced=enforced)
    answer = None if params.constraint is None else embedded(params.constraint)
    final = "final " if template.has_channels else ""  # calls in channels have channels of their own
    called = "calls" if form is not None and len(form.starts) > 1 else f"{final}calls"
    if rule.required:
        assert calls is not None, "a call is required, so there are tools"
        body = [f"reply: {called}", *calls.required()]
    elif answer is not None:
        body = [f"answer: {answer}", f"reply: {final}answer" + (f" | {called}" if calls else "")]
        body += calls.required() if calls else []
    elif calls is not None and rule.limits_voluntary_calls:
        body = calls.voluntary(final)
    else:
        return params
    opening = _opening(template, thinking)
    if answer is not None and calls is None and not opening:
        return params
    none: dict[str, Any] = {"json_schema": None, "regex": None, "choice": ()}
    start = "start: opening reply" if opening else "start: reply"
    return params.but(**none, grammar="\n".join([start, *opening, *body, _TEXT]))


_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"/[ \n]{0,2}/"


def _opening(template: ChatTemplate, thinking: Thinking) -> list[str]:
    """Return the rules of `opening`: the thinking and the tags before an answer; none if there is nothing before it."""
    if template.has_channels:
        named = partial(tag, template)
        thought = f'{named(CHANNEL)} "analysis" {named(BODY)} TEXT {named("<|end|>")} {named("<|start|>")} "assistant"'
        return [f"opening: ({thought})*", f'final: {named(CHANNEL)} "final" {named(BODY)}']
    if thinking == "over":
        return []
    start, end = template.form.thinking_tags
    if thinking == "begun":
        return [f"opening: thinking {_SPACE}", *until(template, "thinking", end)]
    # Both tags are tokens, or a lexeme ends with the second one.
    ids = [template.token_of(tag) for tag in (start, end)]
    if None not in ids:
        return [f"opening: (<[{ids[0]}]> TEXT <[{ids[1]}]> {_SPACE})?"]
    return [f"opening: (thinking {_SPACE})?", f"thinking[lazy]: /{escaped(start)}(.|\\n)*{escaped(end)}/"]
