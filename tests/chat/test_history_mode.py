"""Appending is tried on a sample first: differences from the template are found, named and refused."""

from __future__ import annotations

import pytest

from radixkv.chat.history_mode import history_mode, try_appending
from radixkv.chat.template import ChatTemplate
from radixkv.errors import ChatError
from tests.chat.styles import STYLES
from tests.chat.worlds import CHATML, byte_tokenizer, chat_engine

STOPS = frozenset(byte_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
# Numbers its turns, which an appended one begins again.
ROUNDS = """{%- for m in messages %}
{%- if m.role == 'user' %}[Round {{ loop.index0 // 2 + 1 }}] {% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Numbers the results of tools.
# Writes no role where an assistant has spoken before.
ROLELESS = CHATML.replace(
    "<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role if messages | length > 4 or m.role != 'user' }}\n"
)


def of(template: str, tools: list | None = None) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(template), STOPS, tools)


@pytest.mark.parametrize(
    ("name", "mode", "differ", "refused"),
    [
        ("ChatML", "append", [], []),
        ("Llama 3", "append", [], ["parallel calls"]),
        ("Mistral", "append", ["tools", "parallel calls"], []),  # tools stand before each user's turn that is new
        ("Qwen3", "template", ["thinking", "tools", "parallel calls"], []),  # with calls it thinks, too
        ("gpt-oss", "template", ["thinking", "tools"], ["parallel calls"]),
        (
            "DeepSeek",
            "template",
            ["plain", "many turns", "system", "thinking", "tools", "parallel calls"],  # each opens with thinking
            [],
        ),
    ],
)
def test_what_trying_finds_out(name: str, mode: str, differ: list[str], refused: list[str]) -> None:
    style = STYLES[name]
    template = ChatTemplate(style.tokenizer(), style.stop_ids)
    found = try_appending(template)
    assert [each.dialogue for each in found.differences] == differ
    assert [dialogue for dialogue, _ in found.refused] == refused
    assert found.loss(tools=True) is None
    assert history_mode(template, "auto") == mode
    assert history_mode(template, "append") == "append"
    assert history_mode(template, "template") == "template"


@pytest.mark.parametrize(("template", "lost"), [(ROUNDS, "4"), (ROLELESS, "user")], ids=["numbers", "roles"])
def test_appending_that_would_lose_something_is_refused_with_the_tokens_that_differ(template: str, lost: str) -> None:
    assert history_mode(of(template), "auto") == "template"
    loss = try_appending(of(template)).loss(tools=False)
    assert loss is not None
    assert lost in loss.lost
    assert loss.appended != loss.rendered
    with pytest.raises(ChatError) as caught:
        history_mode(of(template), "append")
    for said in (loss.dialogue, f"token {loss.position}", repr(loss.appended), repr(loss.rendered), repr(lost)):
        assert said in str(caught.value)


def test_a_session_does_what_was_found() -> None:
    with chat_engine(template=ROUNDS) as engine:
        with pytest.raises(ChatError, match="history='append' would lose"):
            engine.chat(history="append")
        with engine.chat() as chat:
            for text in ("one", "two"):
                chat.send(text)
            text = engine.model.tokenizer.decode(chat.token_ids)
            assert [text.count(f"[Round {turn}]") for turn in (1, 2)] == [1, 1]
        assert chat.closed
