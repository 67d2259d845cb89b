"""Special needs of single architectures: chunks, different layers, shared KV, keys and values of other sizes, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from radixkv.attention.kv_store import KVStore
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel
from radixkv.models.quantized.kernels import kernels
from radixkv.models.runner import Runner
from tests.models.conftest import GROUPED, SIZES
from tests.models.step_runner import chunk, compare


def llama4(**options: Any) -> Any:
    """One of four layers sees everything, without positions; the others have chunks of 32 tokens."""
    sizes = {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
    return transformers.Llama4TextConfig(
        **{**sizes, "attention_chunk_size": 32, "no_rope_layers": [1, 0, 1, 1], "attn_temperature_tuning": True,
           "floor_scale": 8, **options}
    )  # fmt: skip


def gemma3n(**options: Any) -> Any:
    """The last two layers have no keys of their own: they read those of the layers before them."""
    return transformers.Gemma3nTextConfig(
        **{**GROUPED, "num_hidden_layers": 4, "head_dim": 16, **options},
        num_kv_shared_layers=2,
        sliding_window=20,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
    )


def gemma4(head_dim: int = 8, global_head_dim: int = 16) -> Any:
    """Heads of the layers that see everything are wider."""
    return transformers.Gemma4TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        sliding_window=20,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=97,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
    )


def deepseek_v3(nope: int = 8, rope: int = 8, value: int = 12) -> Any:
    """Keys of 16 numbers, values of 12."""
    return transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, first_k_dense_replace=2, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
    )  # fmt: skip


def gpt_oss(head_dim: int = 8) -> Any:
    """Sinks, and windows in every second layer."""
    return transformers.GptOssConfig(
        **GROUPED, head_dim=head_dim, num_local_experts=2, num_experts_per_tok=1, sliding_window=21,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def roberta() -> Any:
    """Positions begin after the padding id."""
    return transformers.RobertaConfig(**SIZES, is_decoder=True)


def bart() -> Any:
    """Takes no positions: counts the tokens in its cache."""
    return transformers.BartConfig(
        vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, is_decoder=True,
        is_encoder_decoder=False, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def got_ocr2() -> Any:
    """A decoder after an image tower; the whole model's setting does not show the attention of its text part."""
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        "output_channels": 8, "mlp_dim": 16, "global_attn_indexes": [],
    }  # fmt: skip
    text = {"model_type": "qwen2", **GROUPED, "image_token_index": 96}
    return transformers.GotOcr2Config(vision_config=vision, text_config=text, image_token_index=96)


CONFIGS = {make.__name__: make for make in (llama4, gemma3n, gemma4, deepseek_v3, gpt_oss, roberta, bart, got_ocr2)}
# transformers computes these in float32 for every dtype: rotations, norms.
TOLERANCE = {"deepseek_v3": 1e-4, "gemma3n": 1e-4, "gemma4": 1e-4, "gpt_oss": 1e-4, "llama4": 1e-4}
IN_FLOAT32 = {"gpt_oss"}  # its experts do not run in float64


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_logits_equal_the_own_forward(build: Callable[..., Any], kind: str) -> None:
    loaded = adapter.load(build(CONFIGS[kind](), torch.float32 if kind in IN_FLOAT32 else torch.float64))
    assert loaded.attention == "torch"
    compare(loaded, TOLERANCE.get(kind, 1e-9))


def shapes(loaded: LoadedModel) -> list[tuple[int, int, int]]:
    return [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in loaded.layers]


def test_shared_kv_is_stored_once(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = adapter.load(build(gemma3n()))
    assert [layer.source for layer in loaded.layers] == [None, None, 0, 1]
    store = Runner(loaded, 8, 4).store
    assert len(store.keys) == 2
    assert loaded.bytes_per_token * 4 == store.bytes_per_block == 4 * 2 * (2 * 32 * 4)
    written: list[int] = []
    write = KVStore.write

    def counting(store: KVStore, layer: int, *new: torch.Tensor) -> None:
        written.append(layer)
        write(store, layer, *new)

    monkeypatch.setattr(KVStore, "write", counting)
    Runner(loaded, 8, 4).run([chunk(range(3, 8), 0, [0, 1])])
    assert written == [0, 1]


def test_layers_that_compute_their_own_kv_share_nothing(build: Callable[..., Any]) -> None:
    loaded = adapter.load(build(gemma4()))
    assert [layer.source for layer in loaded.layers] == [None, None]
    assert loaded.stored_layers == loaded.layers


def test_small_weights_read_shared_kv_by_compiled_functions(build: Callable[..., Any]) -> None:
    loaded = adapter.load(build(gemma3n()), weights="int8")
    assert [layer.source for layer in loaded.layers] == [None, None, 0, 1]
    assert loaded.attention == ("compiled" if kernels() is not None else "torch")
    compare(loaded, 1e-3)


def test_sharing_that_one_token_shows_and_a_prompt_does_not_is_refused(build: Callable[..., Any]) -> None:
    model = build(gemma3n())

    def scale(module: Any, inputs: Any, options: dict[str, Any]) -> None:
        key, value = options["shared_kv_states"]["full_attention"]
        if key.shape[2] > 1:
            options["shared_kv_states"]["full_attention"] = 1.5 * key, value

    model.model.layers[3].self_attn.register_forward_pre_hook(scale, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="does not compute the same over a paged pool"):
        adapter.load(model, attention="torch")


def test_blocks_must_fit_into_chunks(build: Callable[..., Any]) -> None:
    loaded = adapter.load(build(llama4()))
    with pytest.raises(InvalidInput, match="chunks of 32 tokens, which block_size=24 must divide"):
        Runner(loaded, 8, 24)
