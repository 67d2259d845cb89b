"""Tokenizers with and without a template, with and without tokens that lack an embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from radixkv.chat import Engine
from radixkv.engine import Completion
from radixkv.errors import InvalidInput, InvalidTokens
from radixkv.sampling.params import SamplingParams
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.models.checkpoints.files import read, rewrite
from tests.models.conftest import GROUPED, make

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def with_tokenizer(folder: Path, template: str | None = CHATML, more: tuple[str, ...] = (), rows: int = 300) -> Path:
    """Write a model of `rows` embeddings, with a tokenizer of 264 tokens and the added ones."""
    make(transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1, "vocab_size": rows})).save_pretrained(folder)
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(more), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def answer(folder: Path, prompt: Any) -> Completion:
    with Engine.load(str(folder), num_blocks=30, monitor=False) as engine:
        return engine.generate([prompt], GREEDY)[0]


CHAT = [{"role": "user", "content": "hello"}]


def test_a_template_may_lie_in_a_file_or_in_the_configuration(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    assert (folder / "chat_template.jinja").read_text() == CHATML
    first = answer(folder, CHAT)
    assert first.usage.prompt_tokens > 5
    (folder / "chat_template.jinja").unlink()
    rewrite(folder / "tokenizer_config.json", chat_template=CHATML)
    assert answer(folder, CHAT).token_ids == first.token_ids
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools }}"}]
    rewrite(folder / "tokenizer_config.json", chat_template=named)
    assert answer(folder, CHAT).token_ids == first.token_ids


def test_without_a_template_there_is_text_and_no_chat(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path, template=None)
    assert answer(folder, "hello").usage.output_tokens == 12
    with pytest.raises(InvalidInput, match="no chat template: pass text or token ids"):
        answer(folder, CHAT)


def test_without_a_tokenizer_there_are_token_ids(one: Path) -> None:
    done = answer(one, [5, 6, 7])
    assert (len(done.token_ids), done.text) == (12, "")
    for prompt in ("hello", CHAT):
        with pytest.raises(InvalidInput, match=r"this model has no tokenizer, so it cannot read .*: pass token ids"):
            answer(one, prompt)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"added_tokens": [], "model": 1}'),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_broken_tokenizer_is_not_a_missing_one(tmp_path: Path, file: str, text: str | None) -> None:
    folder = with_tokenizer(tmp_path)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(InvalidInput, match=f"the tokenizer in {folder} cannot be read: "):
        read(folder)


def test_a_tokenizer_with_code_of_its_own(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path)
    rewrite(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(InvalidInput, match="it brings its own code; pass trust_remote_code=True"):
        read(folder)


def test_added_tokens_beyond_the_embedding_are_refused_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_tokenizer(tmp_path, more=("<|call|>", "<|done|>"), rows=265)
    assert answer(folder, "<|call|>hello").finish_reason == "length"
    said = "the tokenizer has 1 tokens that the model has no embedding for, '<|done|>' (265) among them: prompts with"
    assert said in caplog.text
    with pytest.raises(InvalidTokens, match=r"token 265 at position 0 is outside the vocabulary: allowed is 0\.\.264"):
        answer(folder, "<|done|>hello")
