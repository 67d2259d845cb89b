"""Write the grammar of a constrained reply: thinking first, then the answer, or tool calls in the model's format.

A constraint on a conversation's reply is about its answer: the thinking of a model stays free. A call is constrained to
the schema of its tool, inside the tags with which the model writes calls. Tags that are tokens are named by their ids,
since text never contains them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixkv.chat.template import ChatTemplate, Thinking
from radixkv.chat.thinking import BODY, CHANNEL
from radixkv.chat.tool_call_formats import HERMES, LLAMA, MISTRAL, CallFormat, functions_of
from radixkv.errors import InvalidConstraint
from radixkv.grammar.constraint import embedded, schema_with_separators
from radixkv.sampling.params import SamplingParams

_NAMED = "[ARGS]"  # in templates whose calls are a name and arguments, instead of an array
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_KEYS = {HERMES: "arguments", MISTRAL: "arguments", LLAMA: "parameters"}


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
    return frozenset(name for name, function in functions_of(tools) if function.get("strict") is True)


def constrained(
    params: SamplingParams, template: ChatTemplate, rule: CallRule, thinking: Thinking, *, reads_calls: bool = True
) -> SamplingParams:
    """Return the parameters whose constraint covers the whole reply; `params` itself if that has none.

    The constraint of `params` is about the answer. With tools, the reply is such an answer or consists of calls, unless
    `rule` requires calls. `reads_calls` is false if the tools of the template are not to be called. O(bytes of the
    tools). Raises InvalidConstraint for the schema of a tool.
    """
    tools = template.tools if reads_calls else None
    form = template.call_format
    if rule.required:
        form = form or HERMES
    calls = None if form is None or not tools else _Calls(template, form, rule)
    answer = None if params.constraint is None else embedded(params.constraint)
    if rule.required:
        assert calls is not None, "a call is required, so there are tools"
        body = calls.required()
    elif answer is not None:
        body = [f"reply: {answer}"] if calls is None else [*calls.required("calls"), f"answer: {answer}"]
        body += [] if calls is None else ["reply: calls | answer"]
    elif calls is not None and rule.limits_voluntary_calls:
        body = calls.voluntary()
    else:
        return params
    opening = _Opening(template, thinking).rules()
    if answer is not None and calls is None and not opening:
        return params
    none: dict[str, Any] = {"json_schema": None, "regex": None, "choice": ()}
    start = "start: opening reply" if opening else "start: reply"
    return params.but(**none, grammar="\n".join([start, *opening, *body, _TEXT]))


_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"/[ \n]{0,2}/"


class _Opening:
    """The rule `opening`: the thinking of a reply, and the tags up to its answer."""

    def __init__(self, template: ChatTemplate, thinking: Thinking) -> None:
        self._template, self._thinking = template, thinking

    def rules(self) -> list[str]:
        """Return the rules; none if the answer begins the reply."""
        if self._template.has_channels:
            return self._channels()
        if self._thinking == "over":
            return []
        start, end = self._template.form.thinking_tags
        if self._thinking == "begun":
            return [f"opening: thinking {_SPACE}", *_until(self._template, "thinking", end)]
        # Both tags are tokens, or a lexeme ends with the second one.
        ids = [self._template.token_of(tag) for tag in (start, end)]
        if None not in ids:
            return [f"opening: (<[{ids[0]}]> TEXT <[{ids[1]}]> {_SPACE})?"]
        return [f"opening: (thinking {_SPACE})?", f"thinking[lazy]: /{_escaped(start)}(.|\\n)*{_escaped(end)}/"]

    def _channels(self) -> list[str]:
        tag = partial(_tag, self._template)
        thought = f'{tag(CHANNEL)} "analysis" {tag(BODY)} TEXT {tag("<|end|>")} {tag("<|start|>")} "assistant"'
        return [f'opening: ({thought})* {tag(CHANNEL)} "final" {tag(BODY)}']


class _Calls:
    """Rules for calls in the format of a model."""

    def __init__(self, template: ChatTemplate, form: CallFormat, rule: CallRule) -> None:
        self._template, self._form, self._rule = template, form, rule
        self._tools = [
            (name, function)
            for name, function in functions_of(template.tools)
            if rule.only is None or name in rule.only
        ]
        self._named = form is MISTRAL and _NAMED in template.rendering.template

    def required(self, name: str = "reply") -> list[str]:
        """Return the rules by which `name` is one call or more."""
        return [f"{name}: {self._form_start()} {self._rest()}", *self._of_tools()]

    def voluntary(self) -> list[str]:
        """Return the rules by which the reply is text, after which calls may follow."""
        if self._form.bare:  # text that begins with a brace is a call
            return ["reply: WORDS | calls", r"WORDS: /(\s*[^{\s](.|\n)*)?/", *self.required("calls")]
        before = _until(self._template, "before", self._form.start)
        return ["reply: TEXT | before calls", *before, f"calls: {self._rest()}", *self._of_tools()]

    # ---- inside

    def _form_start(self) -> str:
        return "" if self._form.bare else _tag(self._template, self._form.start)

    def _rest(self) -> str:
        """Return the expression for all calls, after the tag of the first one."""
        several = self._rule.parallel and not self._form.bare
        if self._form is MISTRAL and not self._named:
            return '" "? "[" call (", " call)* "]"' if several else '" "? "[" call "]"'
        between = f'"\\n" {self._form_start()}' if self._form is HERMES else self._form_start()
        return f"call ({between} call)*" if several else "call"

    def _of_tools(self) -> list[str]:
        calls = [f"call_{at}" for at in range(len(self._tools))]
        rules = [f"call: {self._enclosed(' | '.join(calls))}"]
        for rule, (name, function) in zip(calls, self._tools, strict=True):
            schema = json.dumps(self._schema(name, function), ensure_ascii=False)
            end = "" if self._named else ' "}"'
            rules.append(f"{rule}: {self._head(name)} %json {schema}{end}")
        return rules

    def _enclosed(self, call: str) -> str:
        return f'"\\n" ({call}) "\\n" {_tag(self._template, self._form.end)}' if self._form is HERMES else call

    def _head(self, name: str) -> str:
        """Return the expression for a call up to its arguments."""
        if self._named:
            has_id = "[CALL_ID]" in self._template.rendering.template
            own = f"({_tag(self._template, '[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? " if has_id else ""
            return f"{_quoted(name)} {own}{_tag(self._template, _NAMED)}"
        quoted = json.dumps(name, ensure_ascii=False)
        return _quoted(f'{{"name": {quoted}, "{_KEYS[self._form]}": ')

    def _schema(self, name: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema of a call's arguments, which are an object in any case."""
        if not (self._rule.required or name in self._rule.strict):
            return _ANY_OBJECT
        given = function.get("parameters")
        if not isinstance(given, Mapping):
            return _NO_ARGUMENTS
        schema = {"type": "object", **given}
        try:
            schema_with_separators(schema)
            if schema["type"] != "object":
                raise InvalidConstraint("at #/type: the arguments of a tool are an object", place="/type")
        except InvalidConstraint as error:
            reason = str(error).removeprefix("json_schema, ")
            message = f"tools: the parameters of {name!r}, {reason}"
            raise InvalidConstraint(message, parameter=f"tools.{name}", place=error.place) from error
        return schema


def _tag(template: ChatTemplate, tag: str) -> str:
    """Return the expression for a tag."""
    token = template.token_of(tag)
    return _quoted(tag) if token is None else f"<[{token}]>"


def _until(template: ChatTemplate, rule: str, tag: str) -> Iterator[str]:
    """Yield the rules for text up to and including a tag."""
    token = template.token_of(tag)
    lazy = f"/(.|\\n)*{_escaped(tag)}/"
    if token is None:
        yield f"{rule}[lazy]: {lazy}"
    else:
        yield f"{rule}: TEXT <[{token}]> | {rule}_spelled"
        yield f"{rule}_spelled[lazy]: {lazy}"  # the tag's text can also be sampled in pieces


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
