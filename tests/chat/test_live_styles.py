"""Whole conversations on an engine, in each style: their cache hits, and how replies are parsed."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from radixkv import SamplingParams
from radixkv.chat import Engine
from radixkv.chat.template import ChatTemplate
from tests.chat.styles import DATE, STYLES, Style
from tests.chat.test_templates import spelled
from tests.engine.fakes import FakeModel, check, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=1000)
THINKING = [name for name, style in STYLES.items() if style.strips]
PAGE = Path(__file__).parents[2] / "docs" / "chats.md"


class Scripted:
    """A model that gives these replies, one after another, to any prompt."""

    def __init__(self, replies: Sequence[list[int]]) -> None:
        self.replies = iter(replies)
        self.expected: list[int] = []
        self.rest: list[int] = []

    def __call__(self, tokens: list[int]) -> int:
        if tokens != self.expected:  # a new prompt
            self.rest = list(next(self.replies))
        token = self.rest.pop(0)
        self.expected = [*tokens, token]
        return token


def talking(style: Style, replies: Sequence[list[int]]) -> Engine:
    tokenizer = style.tokenizer()
    model = FakeModel(tokenizer, len(tokenizer), 20_000, style.stop_ids)
    engine, _ = make_engine(2000, 16, model=model, brain=Scripted(replies))
    return engine


def sampled(style: Style, text: str, seed: int = 1) -> list[int]:
    """Ids of a reply and its stop token, not as an encoder would choose them."""
    return [*spelled(style, text, seed), *style.tokenizer().convert_tokens_to_ids(list(style.stops[:1]))]


def seen(style: Style, ids: Sequence[int]) -> str:
    return str(style.tokenizer().decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_shown_no_more_in_a_rendered_history_and_forgotten_with_its_turn(name: str) -> None:
    style = STYLES[name]
    replies = [sampled(style, style.thinks(answer)) for answer in ("One.", "Two.", "Three.", "Two.")]
    with talking(style, replies) as engine, engine.chat() as chat:
        first = chat.send("a", GREEDY)
        assert (first.text, first.thinking) == ("One.", "Hmm, One.?")
        assert chat.history[-1] == {"role": "assistant", "content": "One."}
        states = [chat.token_ids]
        for text in ("b", "c"):
            chat.send(text, GREEDY)
            states.append(chat.token_ids)
            assert seen(style, chat.token_ids).count("Hmm") == 1  # the one after the last question
        chat.rewind()
        assert chat.token_ids == states[1]
        assert chat.edit(2, "b", GREEDY).text == "Two."
        assert chat.token_ids == states[1]
        check(engine)


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("history", ["append", "template"])
def test_a_reply_that_was_cut_while_it_thought_has_said_nothing(name: str, history: str) -> None:
    style = STYLES[name]
    thinks = sampled(style, style.thinks("Four hundred and four."))
    replies = [thinks, sampled(style, style.says("Yes."))]
    with talking(style, replies) as engine, engine.chat(history=history) as chat:  # type: ignore[arg-type]
        most = next(n for n in range(1, len(thinks)) if "Four" in seen(style, thinks[:n]))
        cut = chat.send("a", GREEDY.but(max_tokens=most))
        assert (cut.finish_reason, cut.text) == ("length", "")
        assert "Hmm, Four".startswith(cut.thinking) and cut.thinking.startswith("Hmm, ")
        before = chat.token_ids
        after = chat.send("b", GREEDY)
        assert after.text == "Yes."
        if history == "append":
            assert after.usage.cached_tokens == len(before) - 1
            assert chat.token_ids[: len(before)] == before
        else:
            assert "Hmm" not in seen(style, chat.token_ids)
        assert seen(style, chat.token_ids).count(style.user("b", "")) == 1


@pytest.mark.parametrize("name", STYLES)
def test_a_stop_string_inside_a_token_cuts_the_text_and_not_the_ids(name: str) -> None:
    style = STYLES[name]
    whole = style.tokenizer().encode(style.says("well hello you"), add_special_tokens=False)
    replies = [[*whole, 0], sampled(style, style.says("Yes."))]
    with talking(style, replies) as engine, engine.chat(history="append") as chat:
        cut = chat.send("a", GREEDY.but(stop="ell h"))
        assert cut.finish_reason == "stop"
        assert cut.text.endswith("w") and "ell h" not in cut.text
        assert "hello" in seen(style, cut.token_ids)  # one token, whose first letter ended the reply
        assert list(cut.token_ids) == whole[: len(cut.token_ids)]
        before = chat.token_ids
        assert chat.send("b", GREEDY).usage.cached_tokens == len(before) - 1
        assert chat.token_ids[: len(before)] == before
        assert seen(style, chat.token_ids[len(before) :]).startswith(style.close + style.user("b", ""))


# ---- how much is found


def dialogue(style: Style, turns: int = 8) -> Iterator[tuple[str, list[int]]]:
    """Questions and replies of the lengths that people and thinking models have; thinking is twice the answer."""
    for turn in range(turns):
        question = f"In round {turn}, how would you go on with the story, and why so? " * 2
        answer = f"In round {turn} the hero goes home, for there the road ends and all that he wanted is there. " * 4
        thought = f"They want round {turn} of the story. What did I say before? Let me go through it again. " * 8
        text = style.thinks("ANSWER").replace("Hmm, ANSWER?", thought.strip()).replace("ANSWER", answer.strip())
        yield question.strip(), sampled(style, text, turn)


def found(style: Style, *, append: bool) -> tuple[float, float]:
    """The cached share of the prompts after the first: of all their tokens, and of those that were there before."""
    template = ChatTemplate(style.tokenizer(), style.stop_ids, None, DATE)
    ids, computed, messages, said = array("i"), array("i"), [], {}
    hits = tokens = there = 0
    for question, sampled_text in dialogue(style):
        messages.append({"role": "user", "content": question})
        if not ids:
            prompt = template.opening(messages)
        elif append:
            prompt = template.continued(ids, messages[-1:])
        else:
            prompt = template.spliced(messages, said, keep_thinking=False)
        if ids:
            shared = [a == b for a, b in zip(prompt, computed, strict=False)]
            hits += shared.index(False) if False in shared else len(shared)
            tokens, there = tokens + len(prompt), there + len(ids)
        said[len(messages)] = sampled_text
        messages.append({"role": "assistant", "content": "not looked at"})
        ids = prompt + array("i", sampled_text)
        computed = ids[:-1]
    return hits / tokens, hits / there


def test_the_page_says_what_was_measured() -> None:
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d. %|]+) \|$", PAGE.read_text(), re.MULTILINE))
    measured = {
        name: " | ".join(
            f"{100 * share:.1f} %" for append in (True, False) for share in found(STYLES[name], append=append)
        )
        for name in THINKING
    }
    assert {name: rows.get(name) for name in THINKING} == measured
