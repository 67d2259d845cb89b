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
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from marshal import dumps
from operator import eq
from typing import Any, NamedTuple

Objects = Sequence[dict[str, Any]]
Prompt = tuple[Objects, Objects]
"""The messages and the tools of a request."""

_TAIL = 256  # characters at the end of a text; fewer may be equal by chance
_MOST_ENDS = 64  # places where an earlier prompt may end in a later one; a last message may be repeated often
_LISTS = {"tool": "tools", "system": "system"}  # names of lists, by kind
_ORDER = ("template", "tool", "system", "message")  # of kinds in a prompt
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
_MONTH += "|Sep(?:t|tember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
_NAME = rf"(?=[ADFJMNOSTW])(?:{_DAY}|{_MONTH})"
_VOLATILE = re.compile(rf"\b(?:[A-Za-z_-]{{0,40}}+\d[\w:.,/+-]*(?: ?[AaPp][Mm]\b)?|{_NAME}\b)")
"""Words with digits, such as dates, times, ids and counts, and the names of days and months."""
_masked = partial(_VOLATILE.sub, "#")
_FLAT = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)
"""A mask for the long texts of tools and models: ten times as fast, for dates, times and ids of equal length."""
_sorted = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
_pairs = json.JSONDecoder(object_pairs_hook=sorted).decode


class Part(NamedTuple):
    """A part of a prompt as 64-bit hashes."""

    kind: str  # "system", "tool", "message" or "template"
    digest: int  # of the text as sent
    form: int  # of the text without dates, times, ids and counts, its keys sorted
    role: str = ""
    words: int = 0  # of a tool with its keys sorted; of a message without thinking and calls
    calls: int = 0  # of the calls as sent; 0: none
    thought: int = 0  # of the thinking; 0: none
    tail: int = 0  # of the last 256 characters; 0: the text has less than twice as many


@dataclass(frozen=True, slots=True)
class Break:
    """The place where a prompt leaves an earlier one: the number of equal parts, the part's name, and the rule's.

    A name counts in the list as sent: "system", "tools[3]", "messages[7]".
    """

    at: int
    part: str
    rule: str


def parts_of(messages: Objects, tools: Objects = (), known: Mapping[int, Part] | None = None) -> list[Part]:
    """Return the parts of a prompt in its order: tools, system messages, other messages.

    `known` are parts of earlier prompts by their digests; only other texts are masked. O(bytes).
    """
    known, parts, head = known or {}, list[Part](), True
    for tool in tools:
        digest = hash(dumps(tool, 2))  # version 2 writes equal objects alike
        parts.append(known.get(digest) or _tool(digest, tool))
    for message in messages:
        role, text, calls = message["role"], message.get("content"), message.get("tool_calls")
        text = text if isinstance(text, str) else _text(text)
        head = head and role in ("system", "developer")
        thought = message.get("reasoning_content") or ""
        thought = _sorted(thought) if thought and not isinstance(thought, str) else thought
        written = hash(dumps(calls, 2)) if calls else 0
        digest = hash((head, role, text, thought, written))
        parts.append(known.get(digest) or _message(head, digest, role, text, thought, calls, written))
    return parts


def break_between(before: Sequence[Part], now: Sequence[Part], same: bool = False) -> Break | None:
    """Return the first part of `before` that `now` does not repeat; None if it extends `before`, or breaks no rule.

    `same` states that both belong to one session. Without it, a reply that both have shows that they do. O(parts).
    """
    at = first_difference(before, now)
    if at is None:
        return None
    change = _Change(before, now, at, same)
    return next(
        (Break(at, name_of(change.first, before[:at]), name) for name, rule in RULES.items() if rule.test(change)), None
    )


def name_of(part: Part, before: Sequence[Part]) -> str:
    """Return the name of a part after others. O(parts)."""
    at = sum((each.kind == "tool") == (part.kind == "tool") for each in before)
    return "system" if part.kind == "system" and not at else f"{_LISTS.get(part.kind, 'messages')}[{at}]"


def first_difference(before: Sequence[Part], now: Sequence[Part]) -> int | None:
    """Return the index of the first part that differs; None if one prompt begins with the other. O(parts)."""
    return next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old.digest != new.digest), None)


def undone(before: Sequence[Part], now: Sequence[Part], found: Break, same: bool = False) -> list[Part]:
    """Return `now` with all parts that break the rule as they were in `before`. O(parts)."""
    rule, parts = RULES[found.rule], list(now)
    if rule.whole:
        return [*before, *now[_Change(before, now, found.at, same).end :]]
    for at, (old, new) in enumerate(zip(before, now, strict=False)):
        if old.digest != new.digest:
            if not rule.test(_Change(before, now, at, same)):
                break
            parts[at] = old
    return parts


class _Change:
    """Two prompts that differ from part `at` on, and the later parts that both have."""

    def __init__(self, before: Sequence[Part], now: Sequence[Part], at: int, same: bool) -> None:
        self.before, self.now, self.at, self.same = before, now, at, same
        self.old, self.new = before[at], now[at]
        self.first = min(self.old, self.new, key=lambda part: _ORDER.index(part.kind))
        later, rest = [part.digest for part in before[at + 1 :]], [part.digest for part in now[at:]]
        self.remaining = {*later}.intersection(rest)
        ends = [end for end, digest in enumerate(rest, 1) if later and digest == later[-1]]
        rows: list[tuple[int, int]] = [
            (sum(takewhile(bool, map(eq, reversed(later), reversed(rest[:end])))), at + end)
            for end in ends[-_MOST_ENDS:]
        ]
        # The number of parts at the end of `before` that `now` has in a row, and the end of that row.
        self.kept, self.end = max(rows, default=(0, at + len(self.remaining)))
        replied = self.kept > 1 and any(part.role == "assistant" for part in before[-self.kept :])
        goes_on = self.first.kind == "message" or self.end < len(now)  # a title of the session has the question too
        self.continues = replied or (same and self.kept > 0 and goes_on)


def _asked(*parts: Part) -> bool:
    """Whether no model and no tool wrote any of these parts."""
    return all(part.role in ("", "system", "developer", "user") for part in parts)


def _both(it: _Change, *fields: str) -> bool:
    return all(getattr(it.old, field) == getattr(it.new, field) for field in fields)


def _summarised(it: _Change) -> bool:
    """Fewer messages stand in the place of several, or after the few that remain."""
    gone, new = (size - it.at - it.kept for size in (len(it.before), it.end))
    few = len(it.now) < len(it.before) and it.new.digest in it.remaining and (it.same or len(it.remaining) > 1)
    return new < gone > 1 if it.continues else few and it.first.kind == "message"


def _message_changed(it: _Change) -> bool:
    cut = it.old.role == "tool" and it.at + 1 < len(it.now) and not _asked(*it.before[: it.at])
    return it.old.kind == "message" and _both(it, "kind", "role") and (it.continues or cut)


def _private_first(it: _Change) -> bool:
    old, new = it.before[it.at + 1 : it.at + 2], it.now[it.at + 1 : it.at + 2]
    next_one = bool(old and new) and old[0].digest == new[0].digest and old[0].kind == it.old.kind and _asked(*old)
    head = not it.same and _both(it, "kind", "role") and it.old.role != "" and _asked(*it.before[: it.at + 1])
    return head and (next_one or 0 != it.old.tail == it.new.tail)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its test, a remedy, and two prompts that break it.

    Undone, a prompt has each part that breaks the rule as it was, or the `whole` earlier prompt. A character of the
    text locates a break if it is `in_text`.
    """

    test: Callable[[_Change], bool]
    remedy: str
    example: tuple[Prompt, Prompt]
    whole: bool = False
    in_text: bool = False


def _call(text: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "read", "arguments": text}}]}


def _said(role: str, *texts: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for text in texts]


_ASK, _NOTE, _GO = _said("user", "Read it.", "A file was read.", "Go on.")
_RESULT, _END = *_said("tool", "No lines."), *_said("assistant", "It is empty.")
_TALK = [_ASK, _call('{"path": "a"}'), _RESULT, _END, _GO]
_GREP: dict[str, Any] = {"name": "grep"}
_TOOLS = [{"name": "read", "parameters": {"path": 1, "limit": 2}}, _GREP]
_BEFORE: Prompt = _TALK, _TOOLS

RULES: dict[str, Rule] = {
    "template-changed": Rule(
        lambda it: it.first.kind == "template", "Use one chat template within a conversation, with the same arguments.",
        ((_said("template", "a"), []), (_said("template", "b"), []))),
    "schema-order": Rule(
        lambda it: it.old.kind == "tool" and _both(it, "kind", "words"),
        "Write the keys of each schema in one order, such as sorted.",
        (_BEFORE, (_TALK, [{"name": "read", "parameters": {"limit": 2, "path": 1}}, _GREP]))),
    "tools-order": Rule(
        lambda it: it.old.kind == it.new.kind == "tool" and _tools(it.before) == _tools(it.now),
        "Send the tools in one order, such as sorted by name.", (_BEFORE, (_TALK, _TOOLS[::-1]))),
    "call-rewritten": Rule(
        lambda it: 0 not in (it.old.calls, it.new.calls) and _both(it, "role", "words", "thought")
        and (it.continues or _both(it, "form")),
        "Send calls back as the model wrote them: the same ids, spaces and keys.",
        (_BEFORE, ([_ASK, _call('{"path":"a"}'), *_TALK[2:]], _TOOLS))),
    "thinking-dropped": Rule(
        lambda it: _both(it, "role", "words", "calls") and it.old.thought != 0 == it.new.thought,
        "Send thinking back, or drop it before the reply is first sent back.",
        (([_ASK, {**_END, "reasoning_content": "Hm."}, _GO], []), ([_ASK, _END, _GO], []))),
    "volatile-text": Rule(  # a message at the end is another question, unless both end alike
        lambda it: _both(it, "kind", "form")
        and (it.new.kind != "message" or it.at + 1 < len(it.now) or 0 != it.old.tail == it.new.tail),
        "Move dates, times, ids and counts to the end of the prompt, or leave them out.",
        ((_said("system", "It is 12:01:07."), []), (_said("system", "It is 12:02:30."), [])), in_text=True),
    "tools-changed": Rule(
        lambda it: it.first.kind == "tool" and it.continues,
        "Define all tools from the start, and keep their definitions.", (_BEFORE, (_TALK, _TOOLS[:1])), whole=True),
    "system-changed": Rule(
        lambda it: it.first.kind == "system" and it.continues,
        "Keep one system prompt within a conversation, and append new facts as messages.",
        ((_said("system", "Be brief.") + _TALK, []), (_said("system", "Be polite.") + _TALK, [])),
        whole=True, in_text=True),
    "message-dropped": Rule(
        lambda it: it.continues and it.new.digest in it.remaining,
        "Keep messages while there is room, or drop many at a time.", (_BEFORE, (_TALK[2:], _TOOLS)), whole=True),
    "history-summarised": Rule(
        _summarised, "Summarise seldom, and keep tools and system prompt as they were.",
        (_BEFORE, ([_NOTE, *_TALK[3:]], _TOOLS)), whole=True),
    "message-changed": Rule(
        _message_changed, "Append corrections, and cut results of tools before they are first sent.",
        (_BEFORE, ([_NOTE, *_TALK[1:]], _TOOLS)), in_text=True),
    "private-first": Rule(
        _private_first, "Move text of one user or session after the text that all share.",
        ((_said("system", "Moss garden.", "Be brief."), []), (_said("system", "Fern valley.", "Be brief."), []))),
}  # fmt: skip
"""The rules by name, in the order in which they are tried."""


def _text(content: Any) -> str:
    parts = content or ()
    return "".join(part["text"] if isinstance(part.get("text"), str) else _sorted(part) for part in parts)


def _tools(parts: Sequence[Part]) -> list[int]:
    return sorted(part.digest for part in parts if part.kind == "tool")


def _tool(digest: int, tool: dict[str, Any]) -> Part:
    text = _sorted(tool)
    return Part("tool", digest, hash((_masked(text), "tool")), words=hash(text))


def _message(head: bool, digest: int, role: str, text: str, thought: str, calls: Any, written: int) -> Part:
    kind = "system" if head else "template" if role == "template" else "message"
    inline, tag, answer = text.partition("</think>") if role == "assistant" else (text, "", "")
    words = answer.lstrip() if tag and "<think>" in inline else text
    generated = role in ("assistant", "tool")
    flat = words.encode(errors="surrogatepass").translate(_FLAT) if generated else _masked(words)
    form = hash((role, flat, *map(_values, calls or ())))
    thinks = hash((thought, text)) if thought or len(words) < len(text) else 0
    tail = hash(words[-_TAIL:]) if len(words) >= 2 * _TAIL else 0
    return Part(kind, digest, form, role, hash(words), written, thinks, tail)


def _values(call: dict[str, Any]) -> bytes:
    """Return the name and the arguments of a call with sorted keys, without its id."""
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name, values = function.get("name"), function.get("arguments")
    text = values if isinstance(values, str) else _sorted(values)
    with suppress(ValueError, TypeError, RecursionError):  # no JSON, a key twice, or too deep
        return dumps([name, _pairs(text)], 2)
    return dumps([name, text], 2)
