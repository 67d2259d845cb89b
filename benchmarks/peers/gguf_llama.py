"""Write a transformers Llama as a GGUF file (version 3), in float32, for llama.cpp.

The file has no tokenizer but made-up pieces, one a token, in llama.cpp's "bert" vocabulary, the only kind without an
end of text. So a reply ends by its length alone, and no token has to be masked. Prompts are sent as token ids.

llama.cpp rotates pairs of adjacent dimensions where transformers rotates dimension i with i + half. The rows of each
head of the query and key projections are therefore interleaved here; scores do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from torch import Tensor


def write(model: Any, path: Path) -> None:
    """Write `model` (a LlamaForCausalLM without biases) to `path`; all of its numbers, as float32."""
    writer = GGUFWriter(path, "llama")
    _add_fields(writer, model.config, model.get_input_embeddings().num_embeddings)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_fields(writer: GGUFWriter, config: Any, vocab: int) -> None:
    """Add metadata for llama.cpp: the shape of the Llama, and the made-up vocabulary."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if config.attention_bias or config.mlp_bias or rope["rope_type"] != "default":
        raise ValueError("only Llamas without biases and with plain rotary frequencies can be written")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(vocab)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list([f"\u2581w{token}" for token in range(vocab)])
    writer.add_token_types([1] * vocab)
    for special in ("bos", "unknown", "seperator", "padding", "mask"):  # the keys' own spelling
        writer.add_uint32(f"tokenizer.ggml.{special}_token_id", 0)


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
