"""The rules of breaks, each on its own example, and prompts that break none."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.prompt_breaks import RULES, Break, break_between, name_of, parts_of, undone

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL: dict[str, Any] = {"name": "read", "parameters": {"path": 1}}


def talk(*texts: str) -> list[dict[str, Any]]:
    """Return questions and answers in turn."""
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


def found(before: list[dict[str, Any]], now: list[dict[str, Any]], same: bool = False) -> Break | None:
    return break_between(parts_of(before), parts_of(now), same)


@pytest.mark.parametrize("name", RULES)
def test_an_example_breaks_its_rule_and_no_other(name: str) -> None:
    before, now = (parts_of(*prompt) for prompt in RULES[name].example)
    broken = break_between(before, now)
    assert broken is not None
    assert broken.rule == name
    mended = undone(before, now, broken)
    assert break_between(before, mended) is None
    assert mended[broken.at].digest == before[broken.at].digest


def said(role: str, *texts: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for text in texts]


PLAN, NOTES = *said("system", "Plan."), *said("user", "Notes.")
GOES_ON, LETTERS, LONG = talk("a", "b", "Go on.", "c", "Go on."), talk(*"abcdefg"), "moss " * 200
CASES: dict[str, tuple[list[Any], list[Any], bool, tuple[str, str] | None]] = {
    "other conversations": (talk("hi", "Hello!", "a"), talk("hello", "Hello!", "b"), False, None),

    "another agent": ([SYSTEM, *talk("a", "b", "c")], [PLAN, *talk("a", "x", "y")], False, None),
    "a title": ([SYSTEM, NOTES, *talk("a")], [PLAN, *talk("a")], True, None),
    "a sub-agent": ([SYSTEM, NOTES, *talk("a")], [SYSTEM, NOTES, *talk("b")], True, None),

    "no reply in common, one session": (
        [SYSTEM, *talk("a")], [PLAN, *talk("a", "b", "c")], True, ("system", "system-changed")),

    "an id before a long text": (
        talk(f"id=41 {LONG}"), talk(f"id=42 {LONG}"), False, ("messages[0]", "volatile-text")),
    "a compacted conversation": (
        LETTERS[:6], [*LETTERS[:5:2], NOTES], False, ("messages[1]", "history-summarised")),
    "results that were cut together": (
        talk("a", "b") + said("tool", "xy", "xyxy"), talk("a", "b") + said("tool", "x", "xx") + talk("c"), False,
        ("messages[2]", "message-changed")),
    "thinking in tags": (
        talk("a", "<think>\nHm.\n</think>\n\nb", "c"), talk("a", "b", "c"), False, ("messages[1]", "thinking-dropped")),
    "thinking in a list": (
        [{"role": "assistant", "content": "b", "reasoning_content": ["Hm."]}, *talk("c")], said("assistant", "b")
        + talk("c"), False, ("messages[0]", "thinking-dropped")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_breaks_one_rule_or_none(name: str) -> None:
    before, now, same, expected = CASES[name]
    broken = found(before, now, same)
    assert (broken and (broken.part, broken.rule)) == expected


VOLATILE = {
    "2026-11-28T10:00:01.5Z": "2026-11-29T11:20:01.75Z", "28.11.2026, 9:05 am": "1.12.2026, 10:15 pm",
     "Sat 28 Nov 2026": "Mon 1 Dec 2026",
    "1732788001": "1732788222.25", "0b9a4c1e-1f1e-4f3b-9c63-0d5a9a0c1c11": "ad1f4c1e-2f1e-4a3b-8c63-ad5a9a0c1c22",
    "req_011CVabc9XYZ": "req_7700Kdef1ABC",  "moss": None, "Mayor": None,
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), VOLATILE.items())
def test_dates_times_and_ids_are_volatile_and_words_are_not(one: str, other: str | None) -> None:
    before, now = ([{"role": "system", "content": f"It is {text}."}] for text in (one, other or "Sun"))
    assert found(before, now) == (Break(0, "system", "volatile-text") if other else None)


def test_known_parts_are_used_again_under_their_new_names() -> None:
    tools = [TOOL, {"name": "grep"}]
    known = {part.digest: part for part in parts_of([SYSTEM, *talk("a", "b")], tools)}
    parts = parts_of([SYSTEM, {**SYSTEM, "role": "developer"}, *talk("a", "b")], tools[::-1], known)
    names = " ".join(name_of(part, parts[:at]) for at, part in enumerate(parts))
    assert names == "tools[0] tools[1] system system[1] messages[2] messages[3]"
    assert parts == parts_of([SYSTEM, {**SYSTEM, "role": "developer"}, *talk("a", "b")], tools[::-1])
    assert all(part is known[part.digest] for at, part in enumerate(parts) if at != 3)


ARGUMENTS = ["[" * 100_000, '{"path": {}, "path": 1}']


@pytest.mark.parametrize("function", [*({"name": "read", "arguments": each} for each in ARGUMENTS), "read", None])
def test_a_call_of_another_form_is_a_text(function: Any) -> None:
    before, now = ([{"role": "assistant", "tool_calls": [{"id": it, "function": function}]}, *talk("a")] for it in "bc")
    assert found(before, now) == Break(0, "messages[0]", "call-rewritten")


def test_parts_hold_no_text_and_ignore_the_form_of_content() -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "secret", "cache_control": {"type": "ephemeral"}}]}
    parts = parts_of([said])
    assert "secret" not in repr(parts)
    assert parts == parts_of([{"role": "user", "content": "secret"}])
