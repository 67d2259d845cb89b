"""Find the first part of a prompt that breaks a cached one, and the rule that it breaks.

A part is a tool, a system message or another message. Parts hold hashes of their texts and no text, so that a server
may keep them. The rules are a table: the first one in it whose test holds names the break. Another conversation, a
branch and another question at the end break no rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from marshal import dumps
from typing import Any

Prompt = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""The messages and the tools of a request."""

_TAIL = 256  # characters at the end of a text; fewer may be equal by chance
_ORDER = ("template", "tool", "system", "message")  # of kinds in a prompt
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec)[a-z]*\.?"
_VOLATILE = re.compile(
    rf"""(?ix)
    \b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b,?
    | \b{_MONTH}\ \d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\ \d{{4}})? | \b\d{{1,2}}\.?\ {_MONTH}\ \d{{4}}
    | \b\d{{1,4}}[-/.]\d{{1,2}}[-/.]\d{{1,4}}(?!\.?\d)(?:T(?=\d))?
    | \d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\ ?[ap]m\b)?(?:\ ?(?:z|utc|gmt)\b|[+-]\d{{2}}:?\d{{2}})?
    | \b[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}\b | \b(?=[a-f]*\d)[0-9a-f]{{8,}}\b | \b\d{{9,}}(?:\.\d+)?\b
    | \b[a-z]+[_-](?=[a-z]*\d)[a-z0-9]{{6,}}\b | \b(?=[a-z]*\d)[a-z0-9]{{16,}}\b
    | \b(?:id|request|session|trace|run)\ ?(?:id|number|no\.)?\ ?[:=#]?\ ?[\w-]*\d[\w-]*
    """
)
"""Dates, times, UUIDs, hashes, Unix times and ids of requests."""
_THINKING = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt as 64-bit hashes. `name` counts in the list as sent: "system", "tools[3]", "messages[7]"."""

    name: str
    kind: str  # "system", "tool", "message" or "template"
    digest: int  # of the text as sent
    form: int  # of the text without dates, times and ids, its keys sorted
    role: str = ""
    words: int = 0  # of a tool with its keys sorted; of a message without thinking and calls
    calls: int = 0  # of the calls as sent; 0: none
    thought: int = 0  # of the thinking; 0: none
    tail: int = 0  # of the last 256 characters; 0: the text has less than twice as many


@dataclass(frozen=True, slots=True)
class Break:
    """The place where a prompt leaves an earlier one: the number of equal parts, the part's name, and the rule's."""

    at: int
    part: str
    rule: str


def parts_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    known: Mapping[int, Part] | None = None,
) -> list[Part]:
    """Return the parts of a prompt in its order: tools, system messages, other messages.

    `known` are parts of earlier prompts by their digests; only other texts are masked. O(bytes).
    """
    known, parts, head = known or {}, list[Part](), True
    for at, tool in enumerate(tools):
        digest, name = hash(dumps(tool, 2)), f"tools[{at}]"  # version 2 writes equal objects alike
        part = known.get(digest) or _tool(tool, digest)
        parts.append(part if part.name == name else replace(part, name=name))
    for at, message in enumerate(messages):
        role, text, calls = message["role"], message.get("content"), message.get("tool_calls")
        text = text if isinstance(text, str) else _text(text)
        head = head and role in ("system", "developer")
        thought = message.get("reasoning_content") or ""
        digest = hash((head, role, text, thought, dumps(calls, 2) if calls else 0))
        part = known.get(digest) or _message(head, digest, role, text, thought, calls)
        name = f"messages[{at}]" if not head else f"system[{at}]" if at else "system"
        parts.append(part if part.name == name else replace(part, name=name))
    return parts


def break_between(before: Sequence[Part], now: Sequence[Part], same: bool = False) -> Break | None:
    """Return the first part of `before` that `now` does not repeat; None if it extends `before`, or breaks no rule.

    `same` states that both belong to one session. Without it, a reply that both have shows that they do. O(parts).
    """
    at = first_difference(before, now)
    if at is None:
        return None
    change = Change(before, now, at, same)
    return next((Break(at, change.first.name, name) for name, rule in RULES.items() if rule.test(change)), None)


def first_difference(before: Sequence[Part], now: Sequence[Part]) -> int | None:
    """Return the index of the first part that differs; None if one prompt begins with the other. O(parts)."""
    return next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old.digest != new.digest), None)


@dataclass(frozen=True)
class Change:
    """Two prompts that differ from part `at` on."""

    before: Sequence[Part]
    now: Sequence[Part]
    at: int
    same: bool = False

    @property
    def old(self) -> Part:
        """The first part that differs, as it was."""
        return self.before[self.at]

    @property
    def new(self) -> Part:
        """The first part that differs, as it is."""
        return self.now[self.at]

    @property
    def first(self) -> Part:
        """The one of both parts whose kind is first in a prompt."""
        return min(self.old, self.new, key=lambda part: _ORDER.index(part.kind))

    @cached_property
    def kept(self) -> tuple[int, int]:
        """The number of later parts at the end of `before` that `now` has in a row, and the row's end in `now`."""
        old, new = ([part.digest for part in each] for each in (self.before[self.at + 1 :], self.now[self.at :]))
        most = 0, 0
        for end in (end for end, digest in enumerate(new, 1) if old and digest == old[-1]):
            row = next((n for n in range(min(len(old), end)) if old[-1 - n] != new[end - 1 - n]), min(len(old), end))
            most = max(most, (row, self.at + end))
        return most

    @cached_property
    def continues(self) -> bool:
        """Whether `now` goes on with the conversation of `before`."""
        kept = self.before[len(self.before) - self.kept[0] :]
        return bool(kept) and (self.same or (len(kept) > 1 and any(part.role == "assistant" for part in kept)))

    @cached_property
    def remaining(self) -> set[int]:
        """The digests of later parts of `before` that `now` has."""
        return {part.digest for part in self.before[self.at + 1 :]} & {part.digest for part in self.now[self.at :]}

    def undone(self, rule: str) -> list[Part]:
        """Return the later prompt with the parts that break the rule as they were in the earlier one. O(parts)."""
        if RULES[rule].undo == "kind":
            rank = _ORDER.index(self.first.kind)
            ranked = [(_ORDER.index(part.kind), part) for part in self.now]
            old = [part for part in self.before if part.kind == self.first.kind]
            return [part for at, part in ranked if at < rank] + old + [part for at, part in ranked if at > rank]
        if RULES[rule].undo == "all":
            return [*self.before, *self.now[self.kept[1] or self.at + len(self.remaining) :]]
        parts = list(self.now)
        for at in range(self.at, min(len(self.before), len(parts))):
            if self.before[at].digest == parts[at].digest:
                continue
            if not RULES[rule].test(Change(self.before, self.now, at, self.same)):
                break
            parts[at] = self.before[at]
        return parts


def _asked(*parts: Part) -> bool:
    """Whether no model or tool wrote any of these parts, which may be tools."""
    return all(part.role in ("", "system", "developer", "user") for part in parts)


def _volatile(it: Change) -> bool:
    last = it.new.kind == "message" and it.at + 1 == len(it.now)  # another question, unless it ends alike
    return (it.old.kind, it.old.form) == (it.new.kind, it.new.form) and (not last or 0 != it.old.tail == it.new.tail)


def _tools_order(it: Change) -> bool:
    old, new = (sorted(part.digest for part in each if part.kind == "tool") for each in (it.before, it.now))
    return it.old.kind == it.new.kind == "tool" and old == new


def _call_rewritten(it: Change) -> bool:
    alike = (it.old.role, it.old.words, it.old.thought) == (it.new.role, it.new.words, it.new.thought)
    return alike and 0 not in (it.old.calls, it.new.calls) and (it.old.form == it.new.form or it.continues)


def _thinking_dropped(it: Change) -> bool:
    alike = (it.old.role, it.old.words, it.old.calls) == (it.new.role, it.new.words, it.new.calls)
    return alike and it.old.thought != 0 == it.new.thought


def _summarised(it: Change) -> bool:
    """Fewer messages stand in the place of several, or after the few that remain."""
    kept, end = it.kept
    gone, new = len(it.before) - it.at - kept, end - it.at - kept
    if it.continues:
        return new < gone > 1
    return len(it.now) < len(it.before) and it.new.digest in it.remaining and (it.same or len(it.remaining) > 1)


def _message_changed(it: Change) -> bool:
    cut = it.old.role == "tool" and it.at + 1 < len(it.now) and not _asked(*it.before[: it.at])
    return it.old.kind == "message" and it.old.role == it.new.role and (it.continues or cut)


def _private_first(it: Change) -> bool:
    head = not it.same and (it.old.kind, it.old.role) == (it.new.kind, it.new.role) and it.old.kind != "tool"
    old, new = it.before[it.at + 1 : it.at + 2], it.now[it.at + 1 : it.at + 2]
    shared = bool(old and new) and old[0].digest == new[0].digest and old[0].kind == it.old.kind and _asked(*old)
    return head and _asked(*it.before[: it.at + 1]) and (shared or 0 != it.old.tail == it.new.tail)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its test, a remedy, and two prompts that break it.

    `undo` names the parts that an undone break has as they were: "each" that breaks the rule, all of its "kind", "all".
    `in_text` states that a character of the text locates the break.
    """

    test: Callable[[Change], bool]
    undo: str
    in_text: bool
    remedy: str
    example: tuple[Prompt, Prompt]


def _call(text: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "read", "arguments": text}}]}


def _systems(*texts: str) -> Prompt:
    return [{"role": "system", "content": text} for text in texts], []


_READ, _GREP = {"name": "read", "parameters": {"path": 1, "limit": 2}}, {"name": "grep"}
_TURNED = {"name": "read", "parameters": {"limit": 2, "path": 1}}
_ASK, _GO = {"role": "user", "content": "Read it."}, {"role": "user", "content": "Go on."}
_RESULT, _END = {"role": "tool", "content": "No lines."}, {"role": "assistant", "content": "It is empty."}
_NOTE, _THINKS = {"role": "user", "content": "A file was read."}, {**_END, "reasoning_content": "Hm."}
_TALK = [_ASK, _call('{"path": "a"}'), _RESULT, _END, _GO]
_BEFORE = _TALK, [_READ, _GREP]

RULES: dict[str, Rule] = {
    "template-changed": Rule(
        lambda it: it.first.kind == "template", "kind", False,
        "Keep the chat template and its arguments within a conversation.",
        (([{"role": "template", "content": "a"}, _ASK], []), ([{"role": "template", "content": "b"}, _ASK], []))),
    "schema-order": Rule(
        lambda it: it.old.kind == it.new.kind == "tool" and it.old.words == it.new.words, "kind", False,
        "Write the keys of each schema in one order, such as sorted.", (_BEFORE, (_TALK, [_TURNED, _GREP]))),
    "tools-order": Rule(
        _tools_order, "kind", False,
        "Send the tools in one order, such as sorted by name.", (_BEFORE, (_TALK, [_GREP, _READ]))),
    "call-rewritten": Rule(
        _call_rewritten, "each", False, "Send calls back as the model wrote them: the same ids, spaces and keys.",
        (_BEFORE, ([_ASK, _call('{"path":"a"}'), *_TALK[2:]], _BEFORE[1]))),
    "thinking-dropped": Rule(
        _thinking_dropped, "each", False, "Send thinking back, or drop it before the reply is first sent back.",
        (([_ASK, _THINKS, _GO], []), ([_ASK, _END, _GO], []))),
    "volatile-text": Rule(
        _volatile, "each", True, "Move dates, times and ids to the end of the prompt, or leave them out.",
        (_systems("It is 12:01:07."), _systems("It is 12:02:30."))),
    "tools-changed": Rule(
        lambda it: it.first.kind == "tool" and it.continues, "kind", False,
        "Define all tools from the start, and keep their definitions.", (_BEFORE, (_TALK, [_READ]))),
    "system-changed": Rule(
        lambda it: it.first.kind == "system" and it.continues, "kind", True,
        "Keep the system prompt within a conversation, and append news as messages.",
        ((_systems("Be brief.")[0] + _TALK, []), (_systems("Be polite.")[0] + _TALK, []))),
    "message-dropped": Rule(
        lambda it: it.continues and it.new.digest in it.remaining, "all", False,
        "Keep messages while the context has room, or drop many at a time.", (_BEFORE, (_TALK[2:], _BEFORE[1]))),
    "history-summarised": Rule(
        _summarised, "all", False, "Summarise seldom, and keep tools and system prompt as they were.",
        (_BEFORE, ([_NOTE, *_TALK[3:]], _BEFORE[1]))),
    "message-changed": Rule(
        _message_changed, "each", True, "Append corrections, and cut results of tools before they are first sent.",
        (_BEFORE, ([_NOTE, *_TALK[1:]], _BEFORE[1]))),
    "private-first": Rule(
        _private_first, "each", False, "Move text of one user or session after the text that all share.",
        (_systems("Moss garden.", "Be brief."), _systems("Fern valley.", "Be brief."))),
}  # fmt: skip
"""The rules by name, in the order in which they are tried."""


def _text(content: Any) -> str:
    parts = content or ()
    return "".join(part["text"] if isinstance(part.get("text"), str) else _sorted(part) for part in parts)


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _form(text: str) -> str:
    return _VOLATILE.sub("#", text)


def _tool(tool: Mapping[str, Any], digest: int) -> Part:
    text = _sorted(tool)
    return Part("", "tool", digest, hash((_form(text), "tool")), words=hash(text))


def _message(head: bool, digest: int, role: str, text: str, thought: str, calls: Any) -> Part:
    words = _THINKING.sub("", text, 1) if role == "assistant" else text
    form = hash((role, _form(words), *(_form(_sorted(_values(call))) for call in calls or ())))
    thinks = hash((thought, text)) if thought or len(words) < len(text) else 0
    tail = hash(words[-_TAIL:]) if len(words) >= 2 * _TAIL else 0
    kind = "system" if head else "template" if role == "template" else "message"
    return Part("", kind, digest, form, role, hash(words), hash(dumps(calls, 2)) if calls else 0, thinks, tail)


def _values(call: Mapping[str, Any]) -> list[Any]:
    """Return the name and the arguments of a call as values, without its id."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    with suppress(TypeError, ValueError):  # values already, or no JSON
        arguments = json.loads(arguments)
    return [function.get("name"), arguments]
