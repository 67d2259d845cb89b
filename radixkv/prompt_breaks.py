"""Find the first part of a prompt that breaks a cached one, and the rule that it breaks.

A part is a tool, a system message or another message. Parts hold 64-bit hashes of their texts and no text, so that a
server may keep them. The rules are a table: the first one in it whose test holds names the break. A change that begins
another conversation, or a branch, breaks no rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from marshal import dumps
from typing import Any

_TAIL = 256  # characters; a shorter end of two texts may be equal by chance
_HEAD_KINDS = ("template", "tool", "system", "message")  # in the order of a prompt
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec)[a-z]*\.?"
_VOLATILE = re.compile(
    rf"""(?ix)
    \b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b,?
    | \b{_MONTH}\ \d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\ \d{{4}})? | \b\d{{1,2}}\.?\ {_MONTH}\ \d{{4}}
    | \b\d{{1,4}}[-/.]\d{{1,2}}[-/.]\d{{1,4}}(?![\d.])(?:(?=T\d)T)?
    | \d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\ ?[ap]m\b)?(?:\ ?(?:z|utc|gmt)\b|[+-]\d{{2}}:?\d{{2}})?
    | \b[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}\b
    | \b(?=[a-f]*\d)[0-9a-f]{{8,}}\b | \b\d{{9,}}(?:\.\d+)?\b
    | \b[a-z]+[_-](?=[a-z]*\d)[a-z0-9]{{6,}}\b | \b(?=[a-z]*\d)[a-z0-9]{{16,}}\b
    | (?<=\bid[:=#\ ])\ ?\w*\d\w* | \b(?:request|session|trace|run)\ ?(?:id|number|no\.)?\ ?[:=#]?\ ?\w*\d\w*
    """
)
"""Dates, times, UUIDs, hashes, Unix times and ids of requests."""
_THINKING = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt, as hashes. `name` counts in the list as sent: "system", "tools[3]", "messages[7]"."""

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
    known, parts, head, at = known or {}, [], True, 0
    for tool in tools:
        digest = hash(dumps(tool, 2))  # version 2 writes equal objects alike
        part = known.get(digest) or _tool(tool, digest)
        name = f"tools[{at}]"
        parts.append(part if part.name == name else replace(part, name=name))
        at += 1
    at = 0
    for message in messages:
        role, calls = message["role"], message.get("tool_calls")
        text, thought = _text(message.get("content")), message.get("reasoning_content")
        head = head and role in ("system", "developer")
        digest = hash((head, role, text, thought or None, dumps(calls, 2) if calls else None))
        part = known.get(digest) or _message(head, digest, role, text, thought, calls)
        name = f"messages[{at}]" if not head else f"system[{at}]" if at else "system"
        parts.append(part if part.name == name else replace(part, name=name))
        at += 1
    return parts


def break_between(before: Sequence[Part], now: Sequence[Part], same: bool = False) -> Break | None:
    """Return the first part of `before` that `now` does not repeat; None if it extends `before`, or breaks no rule.

    `same` states that both belong to one session. Without it, a reply that both have shows that they do. O(parts).
    """
    at = next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old.digest != new.digest), -1)
    if at < 0:
        return None
    change = Change(before, now, at, same)
    for name, rule in RULES.items():
        if rule.test(change):
            part = min(change.old, change.new, key=lambda part: _HEAD_KINDS.index(part.kind))
            return Break(at, part.name, name)
    return None


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

    @cached_property
    def kept(self) -> int:
        """The number of later parts at the end of `before` that `now` has in a row."""
        old, new = ([part.digest for part in each[self.at :]] for each in (self.before[1:], self.now))
        ends = [end for end, digest in enumerate(new, 1) if old and digest == old[-1]]
        return max(
            (
                sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(old), reversed(new[:end]))))
                for end in ends
            ),
            default=0,
        )

    @cached_property
    def gone(self) -> tuple[Sequence[Part], Sequence[Part]]:
        """The parts of `before` from `at` up to the kept ones, and the parts of `now` in their place."""
        gone = self.before[self.at : len(self.before) - self.kept]
        first = self.before[len(gone) + self.at].digest if self.kept else None
        return gone, [*takewhile(lambda part: part.digest != first, self.now[self.at :])]

    @cached_property
    def continues(self) -> bool:
        """Whether `now` goes on with the conversation of `before`."""
        kept = self.before[len(self.before) - self.kept :]
        return self.kept > 0 and (self.same or (len(kept) > 1 and any(part.role == "assistant" for part in kept)))

    def of(self, *kinds: str) -> bool:
        """Whether both parts are of one of these kinds."""
        return self.old.kind in kinds and self.new.kind in kinds

    def later(self) -> set[int]:
        """Return the digests of the parts of `before` after the first that differs."""
        return {part.digest for part in self.before[self.at + 1 :]}

    def tools(self) -> tuple[list[int], list[int]]:
        """Return the sorted digests of both lists of tools."""
        old, new = (sorted(part.digest for part in each if part.kind == "tool") for each in (self.before, self.now))
        return old, new


def _template(change: Change) -> bool:
    return "template" in (change.old.kind, change.new.kind)


def _schema_order(change: Change) -> bool:
    return change.of("tool") and change.old.words == change.new.words


def _tools_order(change: Change) -> bool:
    old, new = change.tools()
    return change.of("tool") and old == new


def _call_rewritten(change: Change) -> bool:
    old, new = change.old, change.new
    alike = old.role == new.role and old.words == new.words and old.thought == new.thought
    return alike and 0 not in (old.calls, new.calls) and (old.form == new.form or change.continues)


def _thinking_dropped(change: Change) -> bool:
    old, new = change.old, change.new
    alike = old.role == new.role == "assistant" and (old.words, old.calls) == (new.words, new.calls)
    return alike and old.thought != 0 and new.thought == 0


def _volatile(change: Change) -> bool:
    return (change.old.kind, change.old.form) == (change.new.kind, change.new.form)


def _tools_changed(change: Change) -> bool:
    return "tool" in (change.old.kind, change.new.kind) and change.continues


def _system_changed(change: Change) -> bool:
    return "system" in (change.old.kind, change.new.kind) and change.continues


def _dropped(change: Change) -> bool:
    return change.continues and change.new.digest in change.later()


def _summarised(change: Change) -> bool:
    """Fewer messages stand in the place of several, or after the few that remain."""
    if change.continues:
        gone, new = change.gone
        return len(gone) > 1 and len(new) < len(gone)
    remain = change.later().intersection(part.digest for part in change.now[change.at :])
    shorter = len(change.now) < len(change.before)
    return shorter and change.new.digest in remain and (change.same or len(remain) > 1)


def _message_changed(change: Change) -> bool:
    old, new, more = change.old, change.new, len(change.now) > change.at + 1
    if not change.of("message") or old.role != new.role:
        return False
    asked = any(part.role == "assistant" for part in change.before[: change.at])
    return change.continues or (old.role == "tool" and more and asked)


def _private_first(change: Change) -> bool:
    old, new, after = change.old, change.new, change.at + 1
    head = {part.role for part in (*change.before[:after], new)} <= {"", "system", "developer", "user"}
    if change.same or not head or old.kind != new.kind or old.role != new.role:
        return False
    rest = [*change.before[after : after + 1], *change.now[after : after + 1]]
    both = (
        len(rest) == 2 and rest[0].digest == rest[1].digest and rest[0].kind == old.kind and rest[0].role != "assistant"
    )
    return both or 0 != old.tail == new.tail


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its remedy, its test, and two prompts (messages, tools) that break it.

    `undo` names the parts of the earlier prompt that replace those of the later one: each that breaks the rule ("each"),
    all of the kind ("kind"), or all of the earlier prompt ("all"). `in_text` states that a character locates the break.
    """

    remedy: str
    test: Callable[[Change], bool]
    undo: str
    example: tuple[Prompt, Prompt]
    in_text: bool = False


Prompt = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _called(arguments: str) -> dict[str, Any]:
    return _said("assistant", "", tool_calls=[{"id": "a", "function": {"name": "read", "arguments": arguments}}])


_READ, _GREP = {"name": "read", "parameters": {"path": 1, "limit": 2}}, {"name": "grep", "parameters": {}}
_SYSTEM, _ASK, _GO = _said("system", "Be brief."), _said("user", "Read it."), _said("user", "Go on.")
_CALL, _RESULT, _END = _called('{"path": "a"}'), _said("tool", "It is empty."), _said("assistant", "It has no lines.")
_TALK = [_ASK, _CALL, _RESULT, _END, _GO]
_TOOLS = [_READ, _GREP]
_BEFORE: Prompt = ([_SYSTEM, *_TALK], _TOOLS)

RULES: dict[str, Rule] = {
    "template-changed": Rule(
        "Keep the template and its arguments, such as a switch for thinking, within a conversation.",
        _template, "all", (([_said("template", "a"), _ASK], []), ([_said("template", "b"), _ASK], [])),
    ),
    "schema-order": Rule(
        "Write the keys of each schema in one order, for example sorted.",
        _schema_order, "kind",
        (_BEFORE, ([_SYSTEM, *_TALK], [{"name": "read", "parameters": {"limit": 2, "path": 1}}, _GREP])),
    ),
    "tools-order": Rule(
        "Send the tools in one order, for example sorted by name.",
        _tools_order, "kind", (_BEFORE, ([_SYSTEM, *_TALK], [_GREP, _READ])),
    ),
    "call-rewritten": Rule(
        "Send each call back as the model wrote it: keep its ids and the text of its arguments.",
        _call_rewritten, "each", (_BEFORE, ([_SYSTEM, _ASK, _called('{"path":"a"}'), *_TALK[2:]], _TOOLS)),
    ),
    "thinking-dropped": Rule(
        "Send thinking back until the task ends, or never let the model's later prompts contain it.",
        _thinking_dropped, "each",
        (([_ASK, _END | {"reasoning_content": "Hm."}, _GO], []), ([_ASK, _END, _GO], [])),
    ),
    "volatile-text": Rule(
        "Move dates, times and ids to the end of the prompt, or leave them out.",
        _volatile, "each",
        (([_said("system", "It is 12:01:07.")], []), ([_said("system", "It is 12:02:30.")], [])), in_text=True,
    ),
    "tools-changed": Rule(
        "Define all tools from the start, and keep their definitions within a conversation.",
        _tools_changed, "kind", (_BEFORE, ([_SYSTEM, *_TALK], [_READ])),
    ),
    "system-changed": Rule(
        "Keep the system prompt within a conversation, and put news into later messages.",
        _system_changed, "kind", (_BEFORE, ([_said("system", "Be polite."), *_TALK], _TOOLS)), in_text=True,
    ),
    "message-dropped": Rule(
        "Keep all messages while the context has room, or drop many at a time.",
        _dropped, "all", (_BEFORE, ([_SYSTEM, _ASK, *_TALK[3:]], _TOOLS)),
    ),
    "history-summarised": Rule(
        "Summarise rarely, and keep the tools and the system prompt in front of the summary.",
        _summarised, "all", (_BEFORE, ([_SYSTEM, _said("user", "A file was read."), *_TALK[3:]], _TOOLS)),
    ),
    "message-changed": Rule(
        "Append corrections as new messages, and cut results of tools before they are first sent.",
        _message_changed, "each", (_BEFORE, ([_SYSTEM, _said("user", "Please read it."), *_TALK[1:]], _TOOLS)), in_text=True,
    ),
    "private-first": Rule(
        "Move text of one user or session after the text that all share.",
        _private_first, "each",
        (([_said("system", "Moss garden."), _SYSTEM, _ASK], []), ([_said("system", "Fern valley."), _SYSTEM, _GO], [])),
    ),
}  # fmt: skip
"""The rules by name, in the order in which they are tried."""


# ---- texts as hashes


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] if isinstance(part.get("text"), str) else _sorted(part) for part in content)
    return content or ""


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _form(text: str) -> str:
    return _VOLATILE.sub("#", text)


def _tool(tool: Mapping[str, Any], digest: int) -> Part:
    text = _sorted(tool)
    return Part("", "tool", digest, hash(("tool", _form(text))), words=hash(text))


def _message(head: bool, digest: int, role: str, text: str, thought: str | None, calls: Any) -> Part:
    words = _THINKING.sub("", text, 1) if role == "assistant" else text
    form = hash((role, _form(words), _form(_sorted([_without_id(call) for call in calls])) if calls else ""))
    kind = "system" if head else "template" if role == "template" else "message"
    inline = text if len(words) < len(text) else ""
    thought_digest = hash((thought or "", inline)) if thought or inline else 0
    tail = hash(words[-_TAIL:]) if len(words) >= 2 * _TAIL else 0
    return Part("", kind, digest, form, role, hash(words), hash(dumps(calls, 2)) if calls else 0, thought_digest, tail)


def _without_id(call: Mapping[str, Any]) -> list[Any]:
    """Return the name and the arguments of a call, as values."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments)
    except (TypeError, ValueError):
        pass  # values already, or no JSON
    return [function.get("name"), arguments]
