"""What doctor says of a model's tokenizer, stop tokens, suggestions and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.chat.template import ChatTemplate
from radixkv.cli import language
from radixkv.cli.histories import histories
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
    """(status, seen) of what is found about one thing."""
    return [(each.status, each.seen) for each in language.language(loaded) if each.about == about]


# ---- tokens


def test_a_tokenizer_may_have_fewer_tokens_than_the_model_or_be_missing(tiny: LoadedModel) -> None:
    assert told(tiny, "tokenizer") == [("ok", f"{type(tiny.tokenizer).__name__}, 1,536 tokens")]
    bytes_only = replace(tiny, tokenizer=byte_tokenizer(), stop_token_ids=STOPS)
    [(status, said)] = told(bytes_only, "tokenizer")
    assert (status, said.endswith("264 tokens; 1,272 token ids are none of its tokens")) == ("ok", True)
    [(status, said)] = told(replace(tiny, tokenizer=None), "tokenizer")
    assert (status, "prompts are token ids" in said) == ("note", True)
    assert told(replace(tiny, tokenizer=None), "chat template") == []


def test_what_ends_a_reply_is_written_out(tiny: LoadedModel) -> None:
    bytes_only = byte_tokenizer()

    def stops(ids: Sequence[int], tokenizer: Any = bytes_only) -> tuple[str, str]:
        [found] = told(replace(tiny, tokenizer=tokenizer, stop_token_ids=frozenset(ids)), "stop tokens")
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
    assert (status, "SamplingParams(temperature=0.6, top_k=20, top_p=0.95):" in said) == ("note", True)
    assert suggests(do_sample=True, temperature=1.0) == []
    assert suggests() == []
    assert told(tiny, "sampling") == []


# ---- conversations


@pytest.mark.parametrize(
    ("template", "strips", "exact"),
    [
        (CHATML, False, True),
        (THINKING, True, True),
        (MISTRAL, False, False),  # the system prompt moves to the last turn
        (CHATML.replace("{{ m.content }}", "{{ '> ' if m.role == 'assistant' }}{{ m.content }}"), False, False),
        (CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"), False, False),
        (CHATML.replace("{%- for m", "{{ messages | length }}{%- for m"), False, False),
    ],
    ids=["ChatML", "thinking", "Mistral", "quotes", "opens thinking", "counts"],
)  # fmt: skip
def test_appended_histories_are_compared_with_the_template(template: str, strips: bool, exact: bool) -> None:
    found = histories(byte_tokenizer(template), STOPS)
    assert (found.strips_thinking, found.difference is None) == (strips, exact)


def test_a_difference_says_where() -> None:
    template = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    found = histories(byte_tokenizer(template), STOPS)
    assert found.difference is not None
    assert found.difference.startswith("appended '<think>\\nIt is 4.<|im_end|>")
    assert "rendered 'It is 4.<|im_end|>" in found.difference


def test_what_a_template_has_no_place_for() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant: "
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    assert histories(byte_tokenizer(CHATML), STOPS).shows_tools
    assert histories(byte_tokenizer(CHATML), STOPS).shows_system
    assert not histories(byte_tokenizer(plain), STOPS).shows_tools
    found = histories(byte_tokenizer(refuses + plain), STOPS)
    assert (found.shows_system, found.difference) == (False, None)


def test_a_session_meets_what_was_found(tiny: LoadedModel) -> None:
    """Where appending is exact, a second turn's prompt is the template's text, whole."""
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer, STOPS)
    ask: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    reply = [{"role": "assistant", "content": "you"}]
    ids = template.opening(ask)
    ids.extend(tokenizer.encode("you<|im_end|>", add_special_tokens=False))
    assert template.said_text(template.continued(ids, ask)) == template.said_text(
        template.opening([*ask, *reply, *ask])
    )


def test_chat_needs_a_template() -> None:
    with pytest.raises(ChatError):
        histories(byte_tokenizer(None), STOPS)


def test_findings_about_conversations(tiny: LoadedModel) -> None:
    def about(template: str | None) -> list[str]:
        model = replace(tiny, tokenizer=byte_tokenizer(template), stop_token_ids=STOPS)
        return [f"{status}: {seen}"[:28] for status, seen in told(model, "chat template")]

    assert about(CHATML) == ["ok: appended histories read e"[:28]]
    assert about(None) == ["note: none: generate() and su"[:28]]
    assert [each.partition(":")[0] for each in about(THINKING)] == ["ok", "note", "note"]  # no place for tools either
    assert about(MISTRAL)[0] == "note: an appended history is "[:28]
    drops = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    assert about(drops)[0].startswith("problem")
