"""Prompts of whole conversations keep the sampled ids of replies; the template renders new messages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.chat.thinking import split_thinking
from radixkv.errors import InvalidInput
from radixkv.serve.conversations import MOST_SESSIONS, ChatPrompt, Conversations, Mode
from radixkv.serve.history import HistoryIndex
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.serve.served import read_messages
from tests.serve.styles import STYLES

TOKENIZERS = {name: byte_tokenizer(template) for name, template in STYLES.items()}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
STOPS = frozenset(byte_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
END = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
TEXT = st.text("helou \n€", max_size=8)


def conversations(style: str = "ChatML", mode: Mode = "auto", capacity: int = 1 << 20) -> Conversations:
    return Conversations(TOKENIZERS[style], STOPS, HistoryIndex(capacity), mode)


def rendered(style: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return str(TOKENIZERS[style].apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False))


def decoded(prompt: ChatPrompt) -> str:
    return str(byte_tokenizer().decode(list(prompt.ids), skip_special_tokens=False))


def spelled(text: str, seed: int) -> list[int]:
    """Return ids of a text, split into other tokens than an encoder may choose."""
    chooses, ids = random.Random(seed), []
    while text:
        piece, text = text[: (size := chooses.randint(1, 4))], text[size:]
        ids += byte_tokenizer().encode(piece, add_special_tokens=False)
    return ids


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("style", ["ChatML", "thinking", "Mistral"])
@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT, st.integers(0, 9)), min_size=1, max_size=4))
def test_what_is_rendered_is_what_the_template_renders(style: str, turns: list[Any]) -> None:
    """In mode "template", each reply is in the prompt as it was sampled, with any ids.

    The template for thinking removes the thinking before an answer.
    """
    told, messages, replies = conversations(style, "template"), [{"role": "system", "content": "Be brief."}], []
    for asked, words, seed in turns:
        answer = words.lstrip() if style == "thinking" else words
        messages = [*messages, user(asked)]
        prompt = told.prompt("x", messages)
        assert decoded(prompt) == rendered(style, messages)
        assert prompt.known == (len(messages) - 1 if replies else 0)
        for reply in replies:
            assert within(reply, list(prompt.ids))
        ids = spelled(answer, seed)
        told.remember(prompt, assistant(answer), [*ids, END])
        replies.append(ids)
        messages = [*messages, assistant(answer)]


def within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


@pytest.mark.parametrize("style", ["ChatML", "Mistral"])
@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT, st.integers(0, 9), st.booleans()), min_size=2, max_size=4))
def test_a_prompt_begins_with_all_that_was_computed(style: str, turns: list[Any]) -> None:
    """Appending keeps all ids, those of a cut reply, too, even if the template renders earlier turns differently."""
    told, messages, computed = conversations(style), [{"role": "system", "content": "Be brief."}], []
    for asked, answer, seed, is_cut in turns:
        messages = [*messages, user(asked)]
        prompt = told.prompt("x", messages)
        assert list(prompt.ids[: len(computed)]) == computed
        emitted = [*spelled(answer, seed), *([] if is_cut else [END])]
        told.remember(prompt, assistant(answer), emitted)
        computed = [*prompt.ids, *emitted]
        messages = [*messages, assistant(answer)]
        if style == "ChatML":
            assert decoded(prompt) == rendered(style, messages[:-1])


def test_thinking_that_the_template_drops_is_dropped_and_the_answer_stays_as_it_was_sampled():
    told, asked = conversations("thinking"), [user("hello")]
    ids = [*spelled("<think>\nhello\n</think>\n\nhello you", 3), END]
    thinking, answer = split_thinking("<think>\nhello\n</think>\n\nhello you")
    first = told.prompt("x", asked)
    told.remember(first, assistant(answer, reasoning_content=thinking), ids)
    for reply in (assistant(answer), assistant(answer, reasoning_content=thinking)):
        messages = [*asked, reply, user("more")]
        prompt = told.prompt("x", messages)
        assert prompt.known == 2
        assert decoded(prompt) == rendered("thinking", messages)
        assert list(prompt.ids[: len(first.ids)]) == list(first.ids)


@pytest.mark.parametrize("style", ["thinking", "ChatML"])
@pytest.mark.parametrize("sent", ["hello", None])
def test_thinking_that_is_dropped_breaks_the_prompt(style: str, sent: str | None) -> None:
    """Unless the ids of the reply are reused, as they are without a template that drops thinking."""
    told, asked = conversations(style), [user("hello")]
    first = told.compared(told.prompt("x", asked), None)
    ids = [*spelled("<think>\nhello\n</think>\n\nhello you", 3), END]
    told.remember(first, assistant("hello you", reasoning_content="hello"), ids)
    reply = assistant("hello you", **({"reasoning_content": sent} if sent else {}))
    broken = told.compared(told.prompt("x", [*asked, reply, user("more")]), None).broken
    found = broken and (broken.part, broken.rule)
    part = "template" if sent else "messages[1]"
    assert first.broken is None and found == ((part, "thinking-dropped") if style == "thinking" else None)


@settings(max_examples=30, deadline=None)
@given(answer=st.text("helou€", min_size=2, max_size=8), cut=st.integers(0, 7), seed=st.integers(0, 9))
def test_a_text_that_a_stop_string_cut_is_what_the_client_was_told(answer: str, cut: int, seed: int) -> None:
    told, asked = conversations(), [user("hello")]
    shown = answer[: min(cut, len(answer) - 1)]
    told.remember(told.prompt("x", asked), assistant(shown), spelled(answer, seed), cut=shown)
    messages = [*asked, assistant(shown), user("more")]
    prompt = told.prompt("x", messages)
    assert prompt.known == 2
    assert decoded(prompt) == rendered("ChatML", messages)


def test_changed_history_is_the_templates_from_there_on():
    told, messages, ids = conversations(), [user("hello")], spelled("hello", 1)
    told.remember(told.prompt("x", messages), assistant("hello"), [*ids, END])
    messages = [*messages, assistant("hello"), user("hello you")]
    second = told.prompt("x", messages)
    told.remember(second, assistant("heel"), [*spelled("heel", 2), END])
    changed = [*messages, assistant("hell"), user("o")]
    prompt = told.prompt("x", changed)
    assert prompt.known == 2
    assert list(prompt.ids[: len(second.ids)]) == list(second.ids)
    assert decoded(prompt) == rendered("ChatML", changed)
    other = told.prompt("x", [user("hell"), *changed[1:]])
    assert (other.known, list(other.ids)) == (0, encoded(rendered("ChatML", [user("hell"), *changed[1:]])))


def encoded(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text, add_special_tokens=False))


def test_nothing_is_known_in_another_namespace_or_with_other_tools():
    told, messages = conversations(), [user("hello")]
    told.remember(told.prompt("x", messages, TOOLS), assistant("hello"), [*spelled("hello", 1), END])
    messages = [*messages, assistant("hello"), user("you")]
    assert told.prompt("x", messages, TOOLS).known == 2
    more = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": name}} for name in ("b", "a")]
    for namespace, tools in (("y", TOOLS), (None, TOOLS), (("x",), TOOLS), ("x", None), ("x", more)):
        prompt = told.prompt(namespace, messages, tools)
        assert (prompt.known, list(prompt.ids)) == (0, encoded(rendered("ChatML", messages, tools)))


@pytest.mark.parametrize("mode", ["append", "template"])
def test_a_conversation_keeps_the_date_on_which_it_began(mode: Mode):
    dated = "<|im_start|>system\nToday is {{ date_string }}.<|im_end|>\n" + CHATML
    told = Conversations(byte_tokenizer(dated), STOPS, HistoryIndex(1 << 20), mode)
    first = replace(told.prompt("x", [user("hello")]), date="31 Dec 1999")
    told.remember(first, assistant("hello"), [*spelled("hello", 1), END])
    again = told.prompt("x", [user("hello"), assistant("hello"), user("more")])
    assert again.date == "31 Dec 1999"
    assert ("31 Dec 1999" in decoded(again)) == (mode == "template")  # appending keeps the beginning
    assert told.prompt("y", again.messages).date != "31 Dec 1999"


def test_a_key_of_the_client_names_a_session_and_keeps_the_history() -> None:
    """Also when the client rewrites its conversation. A key names different sessions in different namespaces."""
    numbers = iter(range(10, 20_000))
    told = Conversations(TOKENIZERS["ChatML"], STOPS, HistoryIndex(1 << 20), new_session=numbers.__next__)
    first = told.prompt("x", [user("hello")], None, "thread")
    told.remember(first, assistant("hello"), [*spelled("hello", 1), END])
    again = told.prompt("x", [user("hello"), assistant("hello"), user("more")], None, "another")
    assert (again.known, list(again.ids[: len(first.ids)])) == (2, list(first.ids))
    rewritten = told.prompt("x", [user("hello you")], None, "thread")
    stranger = told.prompt("y", [user("hello")], None, "thread")
    assert [each.session for each in (first, again, rewritten, stranger)] == [10, 11, 10, 12]
    for number in range(MOST_SESSIONS):
        assert told.session("x", "thread") == 10
        told.session("y", f"filler {number}")
    assert told.session("x", "another") not in (10, 11)
    assert told.session("x", None) is None and told.session("x", "") is None


def test_conversations_that_begin_alike_are_numbered_apart() -> None:
    """The conversation that got a reply last is expected to continue it; each keeps its number once they differ."""
    numbers = iter(range(10, 20))
    told = Conversations(TOKENIZERS["ChatML"], STOPS, HistoryIndex(1 << 20), new_session=numbers.__next__)

    def turn(*said: str) -> int:
        messages = [message for text in said[:-1] for message in (user(text), assistant("hello"))]
        prompt = told.prompt("x", [*messages, user(said[-1])])
        told.remember(prompt, assistant("hello"), [*spelled("hello", 1), END])
        return prompt.session

    assert [turn("a"), turn("a", "b"), turn("a", "b", "c")] == [10, 10, 10]
    assert [turn("a"), turn("a", "b"), turn("a", "b", "d")] == [11, 11, 11]
    assert [turn("a", "b", "c", "e"), turn("a", "b", "d", "e")] == [10, 11]


@pytest.mark.parametrize("style", ["ChatML", "Mistral"])
def test_tool_calls_and_their_results_stand_after_the_call_as_it_was_sampled(style: str):
    told, asked = conversations(style), [user("hello")]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    first = told.prompt("x", asked, TOOLS)
    ids = [*spelled(text, 5), END]
    told.remember(first, assistant("", tool_calls=[call]), ids)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "grey"}
    for arguments in ({"city": "Oslo"}, '{"city":"Oslo"}'):
        sent = {**call, "function": {"name": "weather", "arguments": arguments}}
        prompt = told.prompt("x", read_messages([*asked, assistant("", tool_calls=[sent]), result]), TOOLS)
        assert prompt.known == 2
        assert list(prompt.ids[: len(first.ids) + len(ids)]) == [*first.ids, *ids]
        if style == "ChatML":
            assert decoded(prompt) == rendered(style, [*asked, assistant("", tool_calls=[call]), result], TOOLS)


def test_a_prompt_that_appending_makes_too_long_is_rendered_again_if_that_is_shorter():
    """For a template with the tools in the last user turn, appending writes them in each turn."""
    messages: list[dict[str, Any]] = [user("a")]
    limits = {}
    for limit in (None, 10_000, 260):
        told = Conversations(TOKENIZERS["Mistral"], STOPS, HistoryIndex(1 << 20), limit=limit)
        told.remember(told.prompt("x", messages, TOOLS), assistant("hello"), [*spelled("hello", 1), END])
        prompt = told.prompt("x", [*messages, assistant("hello"), user("b")], TOOLS)
        limits[limit] = (prompt.known, len(prompt.ids))
    whole = len(encoded(rendered("Mistral", [*messages, assistant("hello"), user("b")], TOOLS)))
    assert limits[None] == limits[10_000] == (2, limits[None][1])
    assert limits[260] == (0, whole)
    assert whole < 260 < limits[None][1]


LOSSY = CHATML + "{%- if messages|length > 2 %}{{ 'turns ' ~ messages|length }}{%- endif %}"
LOSSY_WITH_TOOLS = CHATML + "{%- if tools and messages|length > 2 %}{{ 'turns ' ~ messages|length }}{%- endif %}"


def test_what_appending_would_lose_is_rendered() -> None:
    """A template counts turns, and would write another number after known ids."""

    def third(told: Conversations, tools: Any) -> str:
        """Return the prompt of the third turn; both replies are known."""
        messages = [user("a")]
        for _ in range(2):
            told.remember(told.prompt("x", messages, tools), assistant("hello"), [*spelled("hello", 1), END])
            messages = [*messages, assistant("hello"), user("b")]
        prompt = told.prompt("x", messages, tools)
        assert prompt.known == 4
        return decoded(prompt)

    assert third(Conversations(byte_tokenizer(LOSSY), STOPS, HistoryIndex(1 << 20)), None).endswith("turns 5")
    assert third(Conversations(byte_tokenizer(LOSSY_WITH_TOOLS), STOPS, HistoryIndex(1 << 20)), TOOLS).endswith(
        "turns 5"
    )
    told = Conversations(byte_tokenizer(LOSSY_WITH_TOOLS), STOPS, HistoryIndex(1 << 20), "append")
    assert third(told, TOOLS).endswith("turns 5") and "turns" not in third(told, None)
    with pytest.raises(InvalidInput, match="history='append' would lose"):
        Conversations(byte_tokenizer(LOSSY), STOPS, HistoryIndex(1 << 20), "append")
