"""A written model reads back bit for bit, in one file and in several."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from radixkv.models import checkpoint_writer
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.models.checkpoints.files import INDEX, read, same
from tests.models.conftest import FAMILIES, GROUPED, SIZES, make


def settings(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_model_reads_back_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(FAMILIES[kind](), dtype)
    model.generation_config.eos_token_id = [2, 5]
    checkpoint_writer.write_model(tmp_path, model, byte_tokenizer())
    again, tokenizer = read(tmp_path, dtype)
    assert same(again, model)
    assert again.generation_config.eos_token_id == [2, 5]
    assert settings(again) == settings(model)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.encode("hello<|im_end|>") == byte_tokenizer().encode("hello<|im_end|>")


def test_scaled_rotary_frequencies_are_read_back(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        **GROUPED, rope_parameters={**rope, "original_max_position_embeddings": 64}, rms_norm_eps=1e-7
    )
    model = make(config)
    checkpoint_writer.write_model(tmp_path, model, None)
    again = read(tmp_path)[0]
    assert settings(again) == settings(model)
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_weights_are_aligned_as_in_memory(kind: str, tmp_path: Path) -> None:
    """Else the products of a written model are rounded differently from those of the model in memory."""
    model = make(FAMILIES[kind]())
    checkpoint_writer.write_model(tmp_path, model, None)
    data = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    offsets = {name: each["data_offsets"] for name, each in json.loads(data[8:start]).items() if name != "__metadata__"}
    aligned = {name for name, (at, _) in offsets.items() if (start + at) % 64 == 0}
    assert aligned >= {name for name, (at, end) in offsets.items() if (end - at) % 64 == 0}
    assert all((start + at) % 4 == 0 for at, _ in offsets.values())
    assert aligned


@pytest.mark.parametrize("most", [1, 10_000, 30_000])
def test_larger_models_are_in_several_files_with_an_index(most: int, tmp_path: Path) -> None:
    model = make(FAMILIES["qwen3"]())
    checkpoint_writer.write_model(tmp_path, model, None, shard_bytes=most)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [each.name for each in files] == [
        f"model-{at:05}-of-{len(files):05}.safetensors" for at in range(1, len(files) + 1)
    ]
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= most
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == checkpoint_writer.bytes_of(model)
    assert same(read(tmp_path)[0], model)


def test_a_tied_head_is_written_once_and_read_as_tied(tmp_path: Path) -> None:
    model = make(transformers.LlamaConfig(**{**GROUPED, "tie_word_embeddings": True}))
    checkpoint_writer.write_model(tmp_path, model, None)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = read(tmp_path)[0]
    assert same(again, model)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_experts_are_read_back(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make(transformers.Qwen3MoeConfig(**GROUPED, **experts, head_dim=16))
    checkpoint_writer.write_model(tmp_path, model, None)
    assert same(read(tmp_path)[0], model)


def test_odd_sizes_and_several_dtypes_in_one_file_stay_aligned(tmp_path: Path) -> None:
    model = make(transformers.GPTNeoXConfig(**{**SIZES, "vocab_size": 99}), torch.bfloat16)
    model.gpt_neox.final_layer_norm.float()
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("count", torch.tensor(7))
    checkpoint_writer.write_model(tmp_path, model, None)
    found = load_file(tmp_path / "model.safetensors")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in expected.items())


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError) as raised:
        checkpoint_writer.write_model(tmp_path, make(FAMILIES["llama"]()), None)
    assert raised.value.errno == errno.EEXIST
    assert (tmp_path / "model.safetensors").read_text() == "mine"
