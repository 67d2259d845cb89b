"""A plan from the header of a GGUF file equals the plan from the config.json of the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from radixkv.cli import main
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.sizing.kv_shapes import kv_shape
from tests.gguf.raw_file import F32, STRING, U32, file_of, key, shards, tensor

KEYS = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
F16, Q4_0 = 1, 2
CONFIGS: dict[str, tuple[str, dict[str, int], Any]] = {
    "llama": ("llama", {}, lambda: transformers.LlamaConfig(**SIZES)),
    "mistral": (
        "llama", {"attention.sliding_window": 512}, lambda: transformers.MistralConfig(**SIZES, sliding_window=512),
    ),
    "qwen2": ("qwen2", {}, lambda: transformers.Qwen2Config(**SIZES)),
    "qwen3": (
        "qwen3", {"attention.key_length": 32, "attention.value_length": 32},
        lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    ),
    "gemma3": (
        "gemma3",
        {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 512},
        lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=512),
    ),
}  # fmt: skip


def written(path: Path, architecture: str = "llama", kind: int = F16, **keys: int) -> str:
    """A GGUF file without real weights: an embedding of this type, and as many other tensors as layers."""
    size = 97 * 64 * 2  # at least the bytes of the embedding, and a multiple of 32
    fields = [key(f"{architecture}.{name}", U32, number) for name, number in {**KEYS, **keys}.items()]
    fields.append(key(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-6))
    tensors = [tensor("token_embd.weight", (64, 97), kind)]
    tensors += [tensor(f"blk.{at}.attn_norm.weight", (8,), 0, size + 32 * at) for at in range(6)]
    path.write_bytes(file_of([key("general.architecture", STRING, architecture), *fields], tensors, data=size + 32 * 6))
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_has_the_shape_of_its_config(name: str, tmp_path: Path) -> None:
    architecture, keys, config = CONFIGS[name]
    path = written(tmp_path / "model.gguf", architecture, **keys)
    (tmp_path / "folder").mkdir()
    config().save_pretrained(tmp_path / "folder")
    other = kv_shape(str(tmp_path / "folder"))
    assert kv_shape(path) == replace(other, name=path, dtype="float16")
    assert kv_shape(str(tmp_path)).layers == other.layers  # of the only model in a folder


def test_what_cannot_be_planned_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "model.gguf", "rwkv6")
    with pytest.raises(UnsupportedModel, match="rwkv6"):
        kv_shape(path)
    assert main(["plan", path]) == 1
    assert "model.gguf" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="3 KV heads evenly"):
        kv_shape(written(tmp_path / "model.gguf", **{"attention.head_count_kv": 3}))
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[:-1])
    with pytest.raises(InvalidInput, match="is truncated"):
        kv_shape(str(tmp_path))
    paths = shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(InvalidInput, match="lacks model-00002-of-00003"):
        kv_shape(str(paths[0]))
