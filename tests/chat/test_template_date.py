"""A conversation keeps the date and the tools of its beginning."""

from __future__ import annotations

import datetime

import pytest

from radixkv.chat.template import ChatTemplate
from radixkv.engine.chat_prompts import check_date, today
from radixkv.errors import ChatError, InvalidInput
from tests.chat.styles import STYLES
from tests.chat.worlds import CHATML, byte_tokenizer, chat_engine

STOPS = frozenset(byte_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
HI = [{"role": "user", "content": "Hi"}]
CLOCK = "{{ strftime_now('%A, %d %B %Y') }}|" + CHATML


def seen(template: str, date: str | None = None) -> str:
    chat = ChatTemplate(byte_tokenizer(template), STOPS, date=date)
    return chat.said_text(chat.opening(HI))


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "31 Dec 2025"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2025-12-31"),
        ("{{ strftime_now('%B %-d, %Y, a %A: day %j') }}", "December 31, 2025, a Wednesday: day 365"),
        ("{{ strftime_now('%H:%M:%S') }}", "00:00:00"),  # the clock stands at the day's beginning
        ("{{ strftime_now('100%% of %%d in %Y') }}", "100% of %d in 2025"),
        ("{%- if strftime_now is defined %}{{ strftime_now('%y') }}{% endif %}", "25"),
        ("{%- set date = strftime_now('%d') %}<{{ date | length }}>", "<2>"),
        ("{%- macro front(form) %}{{ strftime_now(form) }}{% endmacro %}{{ front('%Y') }}", "2025"),
        ("{%- for form in ['%d', '%m'] %}{{ strftime_now(form) }}.{% endfor %}", "31.12."),
        ("{{ date_string }}", "31 Dec 2025"),
    ],
)
def test_a_template_is_told_the_day_on_which_the_conversation_began(asked: str, written: str) -> None:
    assert seen(asked + "|" + CHATML, "31 Dec 2025").split("|<|im_start|>")[0] == written


def test_today_is_the_day_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2031, 2, 3)

    assert check_date(today()) == today()
    monkeypatch.setattr(datetime, "date", Tomorrow)
    assert today() == "03 Feb 2031"
    assert seen(CLOCK).startswith("Monday, 03 February 2031|")
    for wrong in ("2025-12-31", "yesterday", "", 5):
        with pytest.raises(InvalidInput, match="date is written as '03 Feb 2031'"):
            check_date(wrong)


@pytest.mark.parametrize("history", ["append", "template"])
def test_a_conversation_that_goes_on_after_midnight_keeps_its_prefix(history: str, monkeypatch, tmp_path) -> None:
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2031, 2, 3)

    with chat_engine(template=CLOCK) as engine, engine.chat(history=history) as chat:  # type: ignore[arg-type]
        chat.send("one")
        before = chat.token_ids
        chat.save(tmp_path / "chat.json")
        monkeypatch.setattr(datetime, "date", Tomorrow)
        again = engine.resume(tmp_path / "chat.json")
        for each in (chat, *chat.fork(), again):
            assert each.send("two").usage.cached_tokens >= len(before) - 1
        with engine.chat() as later:
            assert later.send("one").usage.cached_tokens < 10
            assert engine.model.tokenizer.decode(later.token_ids).startswith("Monday, 03 February 2031|")


# Llama 3.1's: another day unless one is given. And Llama 3.2's, which asks the clock, here for the microsecond, too.
TOLD = "{{ date_string if date_string is defined else '26 Jul 2024' }}|" + CHATML
ASKED = "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}|" + CHATML


@pytest.mark.parametrize("template", [TOLD, ASKED, CLOCK])
def test_what_is_warmed_asked_once_and_said_in_a_conversation_is_the_same(template: str) -> None:
    opening = [{"role": "system", "content": "You are Mira, and nobody else is. " * 4}]
    with chat_engine(template=template) as engine:
        warm = engine.warm(opening, pin=True)
        with engine.chat(opening[0]["content"]) as chat:
            said = chat.send("Hi").usage
            assert said.cached_tokens >= warm.pinned_tokens > 128
            asked = engine.submit([*opening, *HI]).result().usage
            assert asked.cached_tokens == asked.prompt_tokens - 1 == said.prompt_tokens - 1
            assert engine.probe(chat.history).matched == len(chat.token_ids) - 1


def test_tools_and_messages_that_change_outside_change_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    examples = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with chat_engine() as engine, engine.chat("Be brief.", messages=examples, tools=tools, history="template") as chat:
        chat.send("one")
        before = chat.token_ids
        tools[0]["function"]["name"] = "other"  # type: ignore[index]
        tools.append({"type": "function"})
        examples[0]["content"] = "c"
        reply = chat.send("two")
        assert reply.usage.cached_tokens == len(before) - 1
        assert "other" not in engine.model.tokenizer.decode(chat.token_ids)
        chat.history[0]["content"] = "d"
        assert chat._template.tools == [
            {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        ]


def test_what_one_conversation_holds_is_never_found_in_another() -> None:
    """How a template writes replies is known once for all: nothing of a caller's may get into that."""
    for style in STYLES.values():
        style.tokenizer.cache_clear()  # type: ignore[attr-defined]
        words = " ".join(f"radixkv.{word}." for word in ("user", "answer", "thinking", "call", "result", "before"))
        tools = [{"type": "function", "function": {"name": "look", "description": words, "parameters": {}}}]
        poisoned = ChatTemplate(style.tokenizer(), style.stop_ids, tools).form
        style.tokenizer.cache_clear()  # type: ignore[attr-defined]
        assert poisoned == ChatTemplate(style.tokenizer(), style.stop_ids).form


def test_of_several_templates_the_one_for_tools_is_taken_with_tools() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = {"default": "D" + CHATML, "tool_use": "T{{ strftime_now('%Y') }}" + CHATML}
    tools = [{"type": "function", "function": {"name": "look"}}]
    for given, front in ((None, "D"), (tools, "T2025")):
        chat = ChatTemplate(tokenizer, STOPS, given, "31 Dec 2025")
        ids = chat.opening([{"role": "system", "content": "s"}, *HI])
        assert chat.said_text(ids).startswith(front + "<|im_start|>system")
        assert chat.said_text(chat.continued(ids, HI)).endswith(
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(ChatError, match="cannot be read"):
        ChatTemplate(tokenizer, STOPS).opening(HI)
