"""Replies in channels over HTTP: thinking and answer are separated, and found in the history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chat.styles import STYLES
from tests.chat.test_live_styles import Scripted, sampled
from tests.serve.served import CHAT, Served, fake_model, served, texts

STYLE = STYLES["gpt-oss"]
THOUGHT = STYLE.thinks("hello you")
CHATS = "/v1/chat/completions"


@contextmanager
def saying(*replies: str | Sequence[int]) -> Iterator[Served]:
    tokenizer = STYLE.tokenizer()
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=STYLE.stop_ids)
    ids = [sampled(STYLE, reply) if isinstance(reply, str) else list(reply) for reply in replies]
    with served(model=model, brain=Scripted(ids)) as server:
        yield server


def message(answer: Any) -> Any:
    return answer["choices"][0]["message"]


def test_thinking_and_answer_come_apart() -> None:
    with saying(THOUGHT, THOUGHT) as server:
        said = message(server.chat())
        assert (said["reasoning_content"], said["content"]) == ("Hmm, hello you?", "hello you")
        told = server.events(CHATS, CHAT)
        assert texts(told) == {0: "hello you"}
        assert texts(told, "reasoning_content") == {0: "Hmm, hello you?"}
        assert sum(bool(event["choices"][0]["delta"].get("reasoning_content")) for event in told) > 3  # as events


def test_a_reply_that_a_stop_string_cut_is_found_again() -> None:
    with saying(THOUGHT, THOUGHT, STYLE.says("bye")) as server:
        answers = [message(server.chat(stop=stop)) for stop in (["o you"], ["o yo"])]
        assert [said["reasoning_content"] for said in answers] == ["Hmm, hell"] * 2
        assert [said["content"] for said in answers] == [""] * 2
        server.chat(messages=[*CHAT["messages"], answers[0], {"role": "user", "content": "again"}])
        assert server.service.conversations.stats.found == 1
