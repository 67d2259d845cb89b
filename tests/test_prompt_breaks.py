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


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (talk("a", "b", "c"), talk("a", "b", "c", "d", "e")),  # it goes on
        (talk("a", "b", "c"), talk("a", "b", "c")),  # a retry
        (talk("a", "b", "c"), talk("a", "b", "x")),  # another last question
        (talk("a", "b", "On 2026-01-02?"), talk("a", "b", "On 2026-01-03?")),
        (talk("a", "b", "c", "d", "e"), talk("a", "x", "y")),  # a branch
        (talk("hi", "Hello!", "a"), talk("hello", "Hello!", "b")),  # other conversations
        (talk("a", "b", "more"), talk("x", "y", "more")),
        ([SYSTEM, *talk("a", "b", "c")], [{**SYSTEM, "content": "Plan."}, *talk("a", "x", "y")]),  # another agent
    ],
)
def test_other_prompts_break_no_rule(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    assert found(before, now) is None


@pytest.mark.parametrize("tools", [[TOOL], []])
def test_other_requests_of_a_session_break_no_rule(tools: list[dict[str, Any]]) -> None:
    """Coding agents ask for titles and start sub-agents within a session."""
    reminder, (asked, other) = {"role": "user", "content": "Notes."}, (talk("a"), talk("b"))
    main = parts_of([SYSTEM, reminder, *asked], [TOOL, {"name": "grep"}])
    title, sub_agent = [{**SYSTEM, "content": "Write a title."}, *asked], [SYSTEM, reminder, *other]
    for same, each in ((True, title), (True, sub_agent), (False, sub_agent)):
        now = parts_of(each, tools)
        assert break_between(main, now, same) is None
        assert break_between(now, main, same) is None


VOLATILE = {
    "2026-11-28T10:00:01.5Z": "2026-11-29T11:20:01.75Z", "28.11.2026, 9:05 am": "1.12.2026, 10:15 pm",
    "Saturday, November 28th, 2026": "Sunday, December 1st, 2026", "Sat 28 Nov 2026": "Mon 1 Dec 2026",
    "1732788001": "1732788222.25", "0b9a4c1e-1f1e-4f3b-9c63-0d5a9a0c1c11": "ad1f4c1e-2f1e-4a3b-8c63-ad5a9a0c1c22",
    "req_011CVabc9XYZ": "req_7700Kdef1ABC", "session 4711": "session 4712", "moss": None, "Mayor": None,
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), VOLATILE.items())
def test_dates_times_and_ids_are_volatile_and_words_are_not(one: str, other: str | None) -> None:
    before, now = ([{"role": "system", "content": f"It is {text}."}] for text in (one, other or "Sun"))
    assert found(before, now) == (Break(0, "system", "volatile-text") if other else None)


def test_an_id_before_a_long_text_is_volatile_in_the_last_message_too() -> None:
    before, now = (talk(f"id={number} {'moss ' * 200}") for number in (41, 42))
    assert found(before, now) == Break(0, "messages[0]", "volatile-text")


def test_what_remains_of_a_compacted_conversation_is_found() -> None:
    asked = talk("a", "b", "c", "d", "e", "f", "g")
    compacted = [*asked[:3:2], asked[4], {"role": "user", "content": "They talked."}]
    assert found(asked[:6], compacted) == Break(1, "messages[1]", "history-summarised")


def test_results_that_were_cut_together_are_changed() -> None:
    before, now = (
        [*talk("a", "b"), *({"role": "tool", "content": text * at} for at in (1, 2))] for text in ("xy", "x")
    )
    assert found(before, [*now, *talk("c")]) == Break(2, "messages[2]", "message-changed")


def test_a_repeated_question_hides_no_change() -> None:
    asked = talk("a", "b", "Go on.", "c", "Go on.")
    before, now = [SYSTEM, *asked[:3]], [{**SYSTEM, "content": "Plan."}, *asked]
    assert found(before, now) == Break(0, "system", "system-changed")


def test_a_session_that_goes_on_needs_no_reply_in_common() -> None:
    before, now = [SYSTEM, *talk("a")], [{**SYSTEM, "content": "Be polite."}, *talk("a", "b", "c")]
    assert found(before, now) is None
    assert found(before, now, same=True) == Break(0, "system", "system-changed")


def test_thinking_in_tags_is_thinking() -> None:
    before, now = talk("a", "<think>\nHm.\n</think>\n\nb", "c"), talk("a", "b", "c")
    assert found(before, now) == Break(1, "messages[1]", "thinking-dropped")
    before[1] |= {"content": "b", "reasoning_content": ["Hm."]}
    assert found(before, now) == Break(1, "messages[1]", "thinking-dropped")


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
