"""A GGUF file loads as the model that it was written from, bit for bit; every other file is refused."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import read_header
from radixkv.model_path import BUNDLED
from radixkv.models import gguf_weights, loader
from radixkv.sizing.kv_size import size_text
from tests.models.checkpoints.files import read as load
from tests.models.checkpoints.files import same
from tests.models.gguf_files import CONFIGS, SIZES, made, write
from tests.selection import mostly_long

THEIRS = ["llama", "llama, tied", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3"]  # read by transformers
KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
KINDS_OF_256 = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ2_0"]
IDS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))


def read(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model as it is before its attention is replaced."""
    header = read_header(path)
    return gguf_weights.read_model(header, config_of(header), dtype)


@torch.no_grad()
def check_equal(ours: Any, model: Any) -> None:
    assert type(ours) is type(model) and same(ours, model)
    for (name, buffer), (_, theirs) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, theirs, rtol=1e-5, atol=0.0, msg=name)  # rotary frequencies
    torch.testing.assert_close(ours(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_architecture_equals_the_model_that_was_written(tmp_path: Path, family: str) -> None:
    model = made(CONFIGS[family]())
    check_equal(read(write(model, tmp_path / "model.gguf")), model)


@pytest.mark.parametrize("family", mostly_long(["llama, tied", "qwen3_moe", "gemma3"], "llama, tied"))
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_match_the_package(tmp_path: Path, family: str, kind: str) -> None:
    model = made(CONFIGS[family]())
    check_equal(read(write(model, tmp_path / "model.gguf", kind)), model)


@pytest.mark.parametrize("kind", mostly_long(KINDS_OF_256, "Q4_K", "Q5_K", "Q6_K"))
def test_quantised_weights_in_blocks_of_256(tmp_path: Path, kind: str) -> None:
    model = made(transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}))
    check_equal(read(write(model, tmp_path / "model.gguf", kind)), model)


@pytest.mark.parametrize("family", mostly_long(THEIRS, "llama", "gemma3"))
def test_transformers_reads_the_same_weights(tmp_path: Path, family: str) -> None:
    path = write(made(CONFIGS[family]()), tmp_path / "model.gguf", "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert same(read(path), theirs)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    model = made(CONFIGS["qwen3"]())
    first = write(model, tmp_path / "model.gguf", "Q4_1", shards=3)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    check_equal(read(first), model)
    check_equal(read(tmp_path / "model-00002-of-00003.gguf"), model)


# ---- the engine


def test_the_engine_generates_as_transformers_does(tmp_path: Path) -> None:
    model = made(CONFIGS["llama 3"]())
    path = write(model, tmp_path / "model.gguf", "Q4_0")
    prompt = IDS[0].tolist()
    expected = model.generate(IDS, max_new_tokens=24, do_sample=False)[0, IDS.shape[1] :].tolist()
    for name in (path, tmp_path):  # the file, and the folder that holds it alone
        with Engine.load(name, monitor=False, num_blocks=32) as engine:
            assert engine.model.tokenizer is None and engine.model.stop_token_ids == {2}
            [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
            assert list(output.token_ids) == expected


def test_a_file_with_an_unknown_tokenizer_answers_with_another(tmp_path: Path) -> None:
    folder = BUNDLED["tiny"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, special = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size)), set(tokenizer.all_special_ids)
    path = write(
        model,
        tmp_path / "tiny.gguf",
        **{
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "of radixkv",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if id_ in special else 1 for id_ in range(len(tokens))],
            "tokenizer.ggml.merges": ["a b"],
        },
    )
    with pytest.raises(UnsupportedModel, match=r"'of radixkv'.*pass tokenizer="):
        Engine.load(path, monitor=False)
    greedy, answers = SamplingParams(temperature=0, max_tokens=24), []
    for name, given in (("tiny", None), (path, folder)):
        with Engine.load(name, tokenizer=given, monitor=False, num_blocks=64) as engine:
            assert engine.model.stop_token_ids == ({2} if given is None else {0, 2})  # by the tokens' names, too
            answers.append(engine.chat().send("Hello! What is your name?", greedy).text)
    assert answers[0] == answers[1] != ""


# ---- refusals


def edited(path: Path, change: Any, family: str = "llama", **metadata: Any) -> Path:
    return write(made(CONFIGS[family]()), path / "model.gguf", change=change, **metadata)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda tensors: [tensors.pop(f"blk.1.{name}.weight") for name in ("attn_q", "ffn_up")])
    with pytest.raises(UnsupportedModel, match=r"fills model\.layers\.1\.mlp\.up_proj\.weight, .*q_proj.*random"):
        load(path)


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.2.attn_q.weight", "blk.0.attn_gate.weight"])
def test_a_surplus_tensor_is_refused(tmp_path: Path, name: str) -> None:
    path = edited(tmp_path, lambda tensors: tensors.update({name: (np.ones(64, np.float32), Kind.F32)}), "qwen2")
    with pytest.raises(UnsupportedModel, match=f"no place for {name},"):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("blk.1.ffn_down.weight", (64, 32)), ("blk.0.attn_norm.weight", (32,)), ("blk.0.attn_q.weight", (64, 2, 32))],
)
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    path = edited(tmp_path, lambda tensors: tensors.update({name: (np.ones(shape, np.float32), Kind.F32)}))
    with pytest.raises(InvalidInput, match=rf"{name} has the shape \[{', '.join(map(str, shape))}\], and the metadata"):
        load(path)


def test_a_type_that_the_package_does_not_dequantise_is_refused(tmp_path: Path) -> None:
    blocks = np.zeros((97, 64 // 32 * 40), np.uint8)
    path = edited(tmp_path, lambda tensors: tensors.update({"token_embd.weight": (blocks, Kind.Q8_1)}))
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight has type Q8_1, which the package gguf does not"):
        load(path)


def test_the_package_is_needed_for_quantised_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["llama"]())
    plain, quantised = write(model, tmp_path / "plain.gguf", "BF16"), write(model, tmp_path / "small.gguf", "Q4_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    assert load(plain)[0].dtype == torch.float32
    with pytest.raises(
        UnsupportedModel, match=r"small.gguf has weights of type Q4_0, .*: pip install 'radixkv\[gguf\]'"
    ):
        load(quantised)


def test_metadata_that_transformers_rejects_are_refused(tmp_path: Path) -> None:
    path = edited(
        tmp_path, None, **{".embedding_length": 64, ".attention.head_count": 3, ".attention.head_count_kv": 1}
    )
    with pytest.raises(UnsupportedModel, match="transformers cannot make a model of its metadata: "):
        load(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf")
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    with pytest.raises(InvalidInput, match="ended within "):
        gguf_weights.read_model(header, config_of(header), torch.float32)
    path.unlink()
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        gguf_weights.read_model(header, config_of(header), torch.float32)


def test_a_file_that_is_replaced_after_its_header_was_read(tmp_path: Path) -> None:
    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf")
    header = read_header(path)
    shutil.copy(path, tmp_path / "another")
    (tmp_path / "another").replace(path)
    with pytest.raises(InvalidInput, match="was written or replaced while it was read: load it again"):
        gguf_weights.read_model(header, config_of(header), torch.float32)


def test_weights_that_do_not_fit_into_memory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["llama"]())
    path = write(model, tmp_path / "model.gguf", "Q8_0")
    numbers = sum(each.numel() for each in model.parameters())
    monkeypatch.setattr(loader, "free_memory", lambda: 4 * numbers - 1)
    monkeypatch.setattr(gguf_weights, "_fill", lambda *_: pytest.fail("read"))
    with pytest.raises(
        InvalidInput, match=f"{size_text(4 * numbers)} as float32, .* dtype='bfloat16' .* {size_text(2 * numbers)}"
    ):
        load(path)
    monkeypatch.setattr(loader, "free_memory", lambda: 4 * numbers)

    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(gguf_weights, "_fill", full)
    with pytest.raises(InvalidInput, match="no memory is left for the weights of"):
        load(path)


# ---- output


def test_progress_is_shown_on_a_terminal_for_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(made(CONFIGS["llama"]()), tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_weights, "_LARGE", 1)
    load(path)
    assert capfd.readouterr() == ("", "")  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # counts as one
    load(path)
    assert "reading model.gguf" in capfd.readouterr().err
    monkeypatch.setattr(gguf_weights, "_LARGE", 1 << 40)
    load(path)
    assert capfd.readouterr() == ("", "")
