"""Choose the format of a model's tool calls: the row that reads back what the chat template writes.

A tokenizer may bring a row of its own, the `response_template` of transformers. It is read as data: its regular
expressions are translated to patterns of a row, or left out, and never run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from radixkv.chat.calls.formats import FORMATS, CallFormat
from radixkv.chat.calls.reader import split_calls
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.messages import ToolCall
from radixkv.engine.chat_prompts import template_text

_log = logging.getLogger(__name__)
_PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}, "seats": {"type": "integer"}}}
_FUNCTION = {"name": "find_train", "description": "Find a train.", "parameters": _PARAMETERS}
TRIAL_TOOLS = [{"type": "function", "function": _FUNCTION}]
TRIAL_CALL = ToolCall("call00001", "find_train", {"to": "Oslo S", "seats": 2})


def chosen(tokenizer: Any, written: str | None) -> CallFormat | None:
    """Return the format of a model; None if it is unknown, and calls stay text.

    `written` is the trial call as the template writes it, None if the template shows no calls. Of the rows that read it
    back, the one that leaves the least text is taken. Without such a row, a row counts whose tag is in the template or
    in the vocabulary, but not in `written`, where it is the tag of another format.
    """
    own = own_format(tokenizer)
    rows = [*([] if own is None else [own]), *FORMATS]
    if written is not None and (left := [(size, at) for at, row in enumerate(rows) if (size := _left(row, written))]):
        return rows[min(left)[1]]
    if own is not None:
        return own
    template = template_text(tokenizer)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    others = [row for row in FORMATS if row.start not in (written or "")]
    return next((row for where in (template, added) for row in others if row.start in where), None)


def _left(form: CallFormat, written: str) -> int:
    """Count the characters outside the trial call, plus one; 0 if the row does not read the call back."""
    text, calls = split_calls(written, form, tools_by_name(TRIAL_TOOLS), "0")
    read = [(call.name, call.arguments) for call in calls]
    return len(text) + 1 if read == [(TRIAL_CALL.name, TRIAL_CALL.arguments)] else 0


# ---- rows that come with a tokenizer

_PATTERN = re.compile(r"\(\?P<(\w+)>[^()]*\)|(\\s[*+]|\\n\??)|\\([^\w\s])|([^\\()\[\]{}.*+?^$|])")
_WARNED: set[str] = set()


def own_format(tokenizer: Any) -> CallFormat | None:
    """Return the row in the `response_template` of a tokenizer; None, with one warning, if it maps to no shape."""
    given = getattr(tokenizer, "response_template", None)
    if not isinstance(given, Mapping):
        return None
    fields = given.get("fields")
    calls = fields.get("tool_calls") if isinstance(fields, Mapping) else None
    if not isinstance(calls, Mapping):
        return None
    row = _row(calls)
    if row is None and repr(calls) not in _WARNED:
        _WARNED.add(repr(calls))
        _log.warning("the response_template of the tokenizer maps to no shape of tool calls, and is left out")
    return row


def _row(calls: Mapping[str, Any]) -> CallFormat | None:
    opening, closing = _anchor(calls, "open"), _anchor(calls, "close")
    literal = re.match(r"\s*([^{}()\s]+)", opening or "")
    if opening is None or closing is None or literal is None:
        return None
    arguments = calls.get("content_args")
    given: Mapping[str, Any] = arguments if isinstance(arguments, Mapping) else {}
    head = opening[literal.end() :]
    row = CallFormat("json", (literal[1],), closing, name="response_template")
    taken = {*re.findall(r"\{content\.([\w.]+)\}", repr(calls.get("transform")))}
    headed = replace(row, head=head, tail=closing, end="")
    if taken - {"name", "arguments", "parameters"} or (taken if "{name}" in head else head.strip()):
        return None
    match calls.get("content"), "{name}" in head, given:
        case "json", True, {"unquoted_keys": True, "string_delims": [[str(quote), end]]} if quote == end:
            return replace(headed, shape="own quotes", quote=quote)
        case "json", True, _ if not given.get("unquoted_keys"):
            return replace(headed, shape="header")
        case "json", False, _ if not given.get("unquoted_keys"):
            return row
        case "python-call-list", False, _:
            return replace(row, shape="python")
        case "xml-inline", True, {"tag_pattern": pattern}:
            argument, _, close = (_translated(pattern) or "").partition("{value}")
            tail, _, end = closing.partition("\n")
            if "{key}" in argument and close.strip():
                return replace(headed, shape="tags", tail=tail, end=end, argument=argument, close=close)
    return None


def _anchor(field: Mapping[str, Any], key: str) -> str | None:
    """Return a literal of a field as a pattern, or its regular expression if it translates to one."""
    given = field.get(key)
    if isinstance(given, str):
        return None if re.search(r"[{}()]", given) else given
    return _translated(field.get(f"{key}_pattern"))


def _translated(expression: object) -> str | None:
    """Translate a regular expression of literals, white space and named groups; None for any other."""
    if not isinstance(expression, str):
        return None
    parts: list[str] = []
    at = 0
    while at < len(expression):
        found = _PATTERN.match(expression, at)
        if found is None or (found[3] or "") in set("(){}"):
            return None
        name, space, quoted, plain = found.groups()
        parts.append(f"{{{name}}}" if name else "\n" if space else quoted or plain)
        at = found.end()
    return "".join(parts)
