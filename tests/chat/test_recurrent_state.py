"""Chats on a model with recurrent state: each turn resumes from the end of the last message of the turn before."""

from __future__ import annotations

from itertools import pairwise

import pytest

from radixkv import SamplingParams
from radixkv.chat import Engine
from radixkv.chat.template import ChatTemplate
from tests.chat.styles import DATE, STYLES, Style
from tests.chat.worlds import CHATML, THINKING, chat_engine
from tests.engine.fakes import check

GREEDY = SamplingParams(max_tokens=200, temperature=0)
SYSTEM = "You are a careful assistant. " * 8
OPENS_THINKING = THINKING.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def reasoned(text: str) -> str:
    return f"<think>\nThe user wrote: {text}. What can that mean?\n</think>\n\nYou said {text}!"


def hits_of(engine: Engine, turns: int) -> list[tuple[int, int]]:
    """Return (hit, length) of the prompts of a conversation."""
    found = []
    with engine.chat(system=SYSTEM) as chat:
        for turn in range(turns):
            usage = chat.send(f"message {turn} of a long conversation", GREEDY).usage
            found.append((usage.cached_tokens, usage.prompt_tokens))
    return found


@pytest.mark.parametrize("template", [THINKING, OPENS_THINKING], ids=["thinking", "opens thinking"])
def test_chats_whose_template_strips_reasoning_hit_all_but_the_last_turn(template: str) -> None:
    with chat_engine(reasoned, template=template, snapshots=40) as engine:
        found = hits_of(engine, 6)
        opening = len(_template(engine).rendering.reply_opening or ())
        for (_, before), (hit, _) in pairwise(found):
            assert hit == before - opening
        check(engine)


def test_chats_without_reasoning_hit_the_reply_too() -> None:
    with chat_engine(snapshots=40, template=CHATML) as engine:
        found = hits_of(engine, 6)
        for (_, before), (hit, _) in pairwise(found):
            assert hit > before
        check(engine)


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_the_reply_starts_after_the_last_message(style: Style) -> None:
    template = ChatTemplate(style.tokenizer(), style.stop_ids, date=DATE)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    ids = template.opening(messages)
    start = template.reply_start(ids)
    assert template.rendering.text(ids[start:]) == style.begin
    assert template.reply_start(ids[:-1]) == (0 if style.begin else len(ids) - 1)


def _template(engine: Engine) -> ChatTemplate:
    return ChatTemplate(engine.model.tokenizer, engine.model.stop_token_ids)
