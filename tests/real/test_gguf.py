"""The parts of radixkv that read GGUF, each alone on the real file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.cli import main
from radixkv.cli.chat import installed_model
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import GGUFHeader, read_header
from radixkv.models.gguf_tokenizer import stop_token_ids
from tests.cli.test_convert import logits, read
from tests.gguf.test_header import check_equal
from tests.gguf.tokenizer_files import PUBLISHED
from tests.models.checkpoints.files import same
from tests.models.test_gguf_tokenizer import TEXTS, built, check


def test_the_header_equals_the_packages(model_file: Path) -> None:
    header = read_header(model_file)
    check_equal(header, model_file)
    assert header.bytes_in(4) == 538_060_032


def test_the_configuration_matches_the_published_model(model_file: Path) -> None:
    assert config_of(read_header(model_file)) == {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def test_a_converted_folder_holds_the_same_model(model_file: Path, tmp_path: Path) -> None:
    assert main(["convert", str(model_file), str(tmp_path / "folder")]) == 0
    (ours, words), (again, its_words) = read(model_file), read(tmp_path / "folder")
    assert same(again, ours)
    assert torch.equal(logits(again), logits(ours))
    assert again.generation_config.eos_token_id == ours.generation_config.eos_token_id
    text = "<|im_start|>user\nWhat is 12 x 34?\n\n  \u00c7a va?<|im_end|>\n"
    assert words.encode(text) == its_words.encode(text)
    assert words.chat_template == its_words.chat_template


# ---- the tokenizer


@cache
def tokenizer() -> tuple[GGUFHeader, PreTrainedTokenizerFast]:
    file = installed_model()
    assert file is not None
    header = read_header(file)
    return header, built(header)


@cache
def pair() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The tokenizer, and one with the parts of its published tokenizer.json: each digit alone, then as GPT-2 splits."""
    header, ours = tokenizer()
    assert header.metadata["tokenizer.ggml.pre"] == "smollm"
    published = Tokenizer.from_str(ours.backend_tokenizer.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED["smollm"])
    published.decoder = decoders.ByteLevel()
    return published, ours


def test_texts_have_the_ids_of_the_published_tokenizer(model_file: Path) -> None:
    @settings(max_examples=120)
    @given(text=TEXTS)
    def each(text: str) -> None:
        check(*pair(), text)

    each()


def test_known_ids(model_file: Path) -> None:
    header, ours = tokenizer()
    assert ours.encode("Hello world") == [19556, 905]
    assert ours.tokenize(" 2024!") == ["\u0120", "2", "0", "2", "4", "!"]
    assert len(ours) == 49_152
    assert [ours.convert_ids_to_tokens(id_) for id_ in stop_token_ids(header)] == ["<|endoftext|>", "<|im_end|>"]
    assert (ours.bos_token, ours.eos_token, ours.model_max_length) == ("<|im_start|>", "<|im_end|>", 8192)
