"""A tokenizer that the caller passes: for models that are built already, and in place of the files' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidInput
from radixkv.models import adapter
from tests.chat.worlds import byte_tokenizer
from tests.models.conftest import GROUPED, make

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POOL: dict[str, Any] = {"num_blocks": 30, "monitor": False}


def model(rows: int = 300) -> Any:
    return make(transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1, "vocab_size": rows}))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with the files of a tokenizer, and nothing else."""
    byte_tokenizer().save_pretrained(tmp_path / "words")
    return tmp_path / "words"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with a model, and no tokenizer."""
    model().save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def said(loaded: Any, tokenizer: Any) -> str:
    """Return what two turns of a chat answer."""
    with Engine.load(loaded, tokenizer=tokenizer, **POOL) as engine:
        chat = engine.chat("Be brief.")
        replies = [chat.send("hello", GREEDY), chat.send("and again", GREEDY)]
        assert replies[1].usage.cached_tokens >= replies[0].usage.prompt_tokens
        return "|".join(reply.text for reply in replies)


def test_a_built_model_chats_with_a_tokenizer_however_it_is_given(words: Path, bare: Path) -> None:
    texts = {
        said(model(), byte_tokenizer()),
        said(model(), str(words)),
        said(model(), words),
        said(str(bare), words),
        said(bare, byte_tokenizer()),
    }
    [text] = texts
    assert len(text) > 8


def test_it_replaces_the_tokenizer_of_the_files_which_is_not_read(bare: Path) -> None:
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"the tokenizer in .* cannot be read"):
        adapter.load(str(bare))
    given = byte_tokenizer()
    given.eos_token = "<|endoftext|>"
    loaded = adapter.load(str(bare), tokenizer=given)
    assert loaded.tokenizer is given
    assert loaded.stop_token_ids == {2, given.eos_token_id}  # 2 is the model's own


class Processor:
    tokenizer = byte_tokenizer()


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a number": (lambda at: 7, "or a folder or hub name that has one, not a builtins.int"),
    "a raw tokenizer": (
        lambda at: byte_tokenizer().backend_tokenizer,
        r"not a tokenizers.Tokenizer: wrap it, transformers.PreTrainedTokenizerFast\(tokenizer_object=...\)",
    ),
    "a processor": (lambda at: Processor(), "Processor: pass its .tokenizer"),
    "a class": (lambda at: PreTrainedTokenizerFast, "not a builtins.type"),
    "no folder": (lambda at: str(at / "gone"), "there is no tokenizer folder .*gone"),
    "no relative folder": (lambda at: Path("gone/words"), "there is no tokenizer folder ./gone/words"),
    "no name": (lambda at: "", "the tokenizer's name is empty"),
    "a file": (lambda at: at / "a.txt", "is a file; give the folder that holds the tokenizer's files"),
    "a folder without one": (lambda at: at, "has no tokenizer: none of tokenizer.json, "),
    "a broken one": (lambda at: at / "broken", "the tokenizer in .*broken cannot be read: "),
}


@pytest.mark.parametrize("fault", WRONG)
def test_anything_else_is_refused_before_the_model_is_read(tmp_path: Path, fault: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    make_one, error = WRONG[fault]
    with pytest.raises(InvalidInput, match=error):
        adapter.load(str(tmp_path / "no-model"), tokenizer=make_one(tmp_path))


def test_a_tokenizer_in_the_place_of_the_settings_is_named(words: Path) -> None:
    config: Any = byte_tokenizer()
    with pytest.raises(InvalidInput, match=r"config must be an EngineConfig, not a \w+: a tokenizer is passed as tok"):
        Engine.load(str(words), config)
