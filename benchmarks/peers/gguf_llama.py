"""Write a transformers Llama as a GGUF file (version 3), in float32, for llama.cpp.

The file has no tokenizer but made-up pieces, one a token, in llama.cpp's "bert" vocabulary, the only kind without an
end of text. So a reply ends by its length alone, and no token has to be masked. Prompts are sent as token ids.

llama.cpp rotates pairs of adjacent dimensions where transformers rotates dimension i with i + half. The rows of each
head of the query and key projections are therefore interleaved here; scores do not change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_ALIGNMENT = 32


def write(model: Any, path: Path) -> None:
    """Write `model` (a LlamaForCausalLM without biases) to `path`; all of its numbers, as float32."""
    tensors = dict(_tensors(model))
    fields = dict(_fields(model.config, model.get_input_embeddings().num_embeddings))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for key, (kind, value) in fields.items():
            file.write(_string(key) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for name, tensor in tensors.items():
            shape = tensor.shape[::-1]  # the fastest dimension first
            file.write(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset))
            offset += _aligned(tensor.numel() * 4)
        for tensor in tensors.values():
            _pad(file)
            file.write(tensor.float().contiguous().numpy().tobytes())


def _fields(config: Any, vocab: int) -> Iterator[tuple[str, tuple[int, Any]]]:
    """Metadata for llama.cpp: the shape of the Llama, and the made-up vocabulary."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if config.attention_bias or config.mlp_bias or rope["rope_type"] != "default":
        raise ValueError("only Llamas without biases and with plain rotary frequencies can be written")
    yield "general.architecture", (_STRING, "llama")
    for key, number in (
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", dim),
        ("attention.value_length", dim),
        ("rope.dimension_count", dim),
        ("vocab_size", vocab),
    ):
        yield f"llama.{key}", (_UINT32, number)
    yield "llama.attention.layer_norm_rms_epsilon", (_FLOAT32, config.rms_norm_eps)
    yield "llama.rope.freq_base", (_FLOAT32, rope["rope_theta"])
    yield "tokenizer.ggml.model", (_STRING, "bert")
    yield "tokenizer.ggml.tokens", (_ARRAY, (_STRING, [f"\u2581w{token}" for token in range(vocab)]))
    yield "tokenizer.ggml.token_type", (_ARRAY, (_INT32, [1] * vocab))
    for special in ("bos", "unknown", "seperator", "padding", "mask"):  # the keys' own spelling
        yield f"tokenizer.ggml.{special}_token_id", (_UINT32, 0)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights under llama.cpp's names."""
    config, inner = model.config, model.model
    yield "token_embd.weight", inner.embed_tokens.weight.detach()
    yield "output_norm.weight", inner.norm.weight.detach()
    if not config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach()
    for number, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, weight in (
            ("attn_norm", layer.input_layernorm.weight),
            ("attn_q", _interleaved(attention.q_proj.weight, config.num_attention_heads)),
            ("attn_k", _interleaved(attention.k_proj.weight, config.num_key_value_heads)),
            ("attn_v", attention.v_proj.weight),
            ("attn_output", attention.o_proj.weight),
            ("ffn_norm", layer.post_attention_layernorm.weight),
            ("ffn_gate", mlp.gate_proj.weight),
            ("ffn_up", mlp.up_proj.weight),
            ("ffn_down", mlp.down_proj.weight),
        ):
            yield f"blk.{number}.{name}.weight", weight.detach()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head reordered from (first half, second half) to neighbouring pairs."""
    halves = weight.detach().view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f"}[kind], value)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))
