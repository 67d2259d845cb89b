"""The findings of doctor about a model's tokenizer, stop tokens, suggestions and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.chat.history_mode import histories, history_mode, try_appending
from radixkv.chat.template import ChatTemplate
from radixkv.chat.template_cases import TOOLS
from radixkv.cli import doctor_checks
from radixkv.errors import ChatError
from radixkv.models.adapter import load
from radixkv.models.loaded import LoadedModel
from tests.chat.worlds import CHATML, THINKING, byte_tokenizer
from tests.serve.styles import MISTRAL

STOPS = frozenset(byte_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load("tiny")


def told(loaded: LoadedModel, about: str) -> list[tuple[str, str]]:
    """(status, seen) of the findings on one subject."""
    return [(each.status, each.seen) for each in doctor_checks.language(loaded) if each.about == about]


# ---- tokens


def test_what_ends_a_reply_is_written_out(tiny: LoadedModel) -> None:
    bytes_only = byte_tokenizer()

    def stops(ids: Sequence[int], tokenizer: Any = bytes_only) -> tuple[str, str]:
        [found] = told(replace(tiny, codec=tokenizer, stop_token_ids=frozenset(ids)), "stop tokens")
        return found

    assert stops([263, 261]) == ("ok", "261 '<|endoftext|>', 263 '<|im_end|>'")
    assert stops([263, 500]) == ("ok", "263 '<|im_end|>', 500")
    assert stops([7], None) == ("ok", "7")
    assert stops(range(9), None) == ("ok", "0, 1, 2, 3, 4, 5 and 3 more")
    assert stops([], None)[0] == "note"
    assert "max_tokens" in stops([], None)[1]


def test_what_a_checkpoint_suggests_for_sampling_is_said(tiny: LoadedModel) -> None:
    def suggests(**settings: Any) -> list[tuple[str, str]]:
        model = SimpleNamespace(generation_config=SimpleNamespace(**settings))
        return told(replace(tiny, model=model), "sampling")  # type: ignore[arg-type] # of a model, only this is read

    [(status, said)] = suggests(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.0)
    assert (status, "SamplingParams(temperature=0.6, top_k=20, top_p=0.95)" in said) == ("ok", True)
    assert suggests(do_sample=True, temperature=1.0) == []
    assert suggests() == []
    assert told(tiny, "sampling") == []


# ---- conversations

OPENS = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
COUNTS = CHATML.replace("{%- for m", "{{ messages | length }}{%- for m")
COUNTS_WITH_TOOLS = CHATML.replace("{%- for m", "{{ messages | length if tools }}{%- for m")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant: "
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
NO_CALLS = CHATML.replace("{% for call in m.tool_calls or [] %}", "{% for call in [] %}")
DROPS = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"


def conversations(tiny: LoadedModel, template: str | None) -> list[str]:
    model = replace(tiny, codec=byte_tokenizer(template), stop_token_ids=STOPS)
    return [f"{status}: {said}" for status, said in told(model, "chat template")]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["ok: appended histories read exactly as the template renders them"]),
        (None, ["note: none: generate() and submit() work"]),
        (
            THINKING,
            [
                "note: it drops the thinking of earlier turns, so chat() renders",
                "note: it does not write tools: prompts list them",
            ],
        ),
        (
            MISTRAL,
            ["note: an appended history differs from the rendered one, but loses no text: system: token 7 is 'A'"],
        ),
        (
            COUNTS,
            ["note: chat() renders histories again (history='template'): appending would lose something: plain: "],
        ),
        (OPENS, ["note: an appended history differs from the rendered one, but loses no text: plain: "]),
        (COUNTS_WITH_TOOLS, ["ok: ", "note: with tools, chat() renders histories again: appending would lose"]),
        (PLAIN, ["ok: ", "note: it does not write tools: prompts list them, and calls are text"]),
        (NO_SYSTEM, ["ok: ", "note: system prompts do not reach the model", "note: it does not write tools"]),
        (NO_CALLS, ["ok: ", "note: it takes no tools: the chat template does not show tool calls"]),
        (DROPS, ["problem: the chat template drops an assistant's message"]),
        ("{% for", ["problem: the model's chat template "]),
    ],
    ids=[
        "ChatML",
        "none",
        "thinking",
        "Mistral",
        "counts",
        "opens",
        "counts with tools",
        "plain",
        "no system",
        "no calls",
        "drops",
        "broken",
    ],
)
def test_what_becomes_of_conversations_is_said(tiny: LoadedModel, template: str | None, said: list[str]) -> None:
    lines = conversations(tiny, template)
    assert [line[: len(start)] for line, start in zip(lines, said, strict=True)] == said


def test_what_is_said_of_a_history_is_what_a_session_does(tiny: LoadedModel) -> None:
    for template in (CHATML, THINKING, MISTRAL, COUNTS, OPENS):
        found = histories(byte_tokenizer(template), STOPS)
        for tools, appends in ((None, found.appends), (TOOLS, found.appends_with_tools)):
            session = ChatTemplate(byte_tokenizer(template), STOPS, tools)
            assert (history_mode(session, "auto") == "append") is appends
            if try_appending(session).loss(tools=tools is not None) is not None:
                with pytest.raises(ChatError, match="would lose what the chat template writes"):
                    history_mode(session, "append")


def test_chat_needs_a_template() -> None:
    with pytest.raises(ChatError):
        histories(byte_tokenizer(None), STOPS)
