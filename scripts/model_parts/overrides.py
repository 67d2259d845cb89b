"""The settings that an architecture needs in a small model: the right kinds of layers, and sizes that fit each other.

They are given by model type; all other fields have the sizes of `recipes.SMALL`.
"""

from __future__ import annotations

from typing import Any

MIXED = ["sliding_attention", "full_attention"] * 2
_HYBRID = ["linear_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _each(*kinds: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return the same fields for several model types."""
    return {kind: dict(fields) for kind in kinds}


OVERRIDES: dict[str, dict[str, Any]] = {
    # Windows in some layers; a short model would have windows in no layer or in all layers.
    **_each("gemma3_text", "gemma4_text", "gemma4_unified_text", "exaone4", "olmo3", layer_types=MIXED),
    **_each("dots1", "laguna", "mellum", "kolibri1", "vaultgemma", "cwm", layer_types=MIXED),
    **_each("cohere2", "cohere2_moe", "modernbert-decoder", "granite_swa", layer_types=MIXED),
    **_each("mistral", "mixtral", "ministral3", "phi3", "phimoe", "starcoder2", sliding_window=53),
    **_each("qwen2", "qwen3", "qwen2_moe", use_sliding_window=True, layer_types=MIXED),
    "qwen3_moe": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 53, "no_rope_layer_interval": 2},
    "ministral": {"head_dim": 8, "layer_types": MIXED, "rope_parameters": _ROPE},
    "cohere_compass_text": {"layer_types": MIXED, "rope_parameters": dict.fromkeys(MIXED, _ROPE)},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    # Attention and other kinds of layers.
    **_each("lfm2", "lfm2_moe", layer_types=["conv", "full_attention"] * 2),
    **_each("bailing_hybrid", "granitemoehybrid", "kimi_linear", layer_types=_HYBRID),
    **_each("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", layer_types=_HYBRID),
    "qwen4_exp_text": {
        "layer_types": _HYBRID,
        "hc_lowrank": 8,
        "hc_count": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 0},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 53},
    "inkling_text": {"layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "inkling2_text": {"layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    # Keys and values that layers share, sizes that differ by layer.
    "gemma3n_text": {
        "layer_types": MIXED,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": MIXED,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "num_experts": None,
    },
    "gemma4_unified_text": {"layer_types": MIXED, "global_head_dim": 32, "use_bidirectional_attention": None},
    # Sizes that must fit each other.
    "doge": {"num_experts": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
        "sliding_window": 53,
    },
    "helium": {"head_dim": 8},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "num_attention_heads": 4},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    **_each("hunyuan_v1_dense", "hunyuan_v1_moe", head_dim=8),
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 16),
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "big_bird": {"block_size": 16, "num_random_blocks": 1},  # sparse from 112 tokens on
    "git_vision_model": {"patch_size": 16},
    "moshi": {"sliding_window": 128},  # its own forward and its own cache disagree about a shorter one
    "xmod": {"default_language": "en_XX"},
    "llama4_text": {"no_rope_layer_interval": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "local_attention_window_len": 53,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    **_each(
        "gemma4_assistant",
        "gemma4_unified_assistant",
        backbone_hidden_size=32,
        text_config={"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
}
"""Model type -> fields of its configuration; a nested configuration is a dict."""


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LONG = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 3.0, 4.0],
    short_mscale=1.0,
    long_mscale=1.5,
    original_max_position_embeddings=64,
)
_GROUPED = {"experts_implementation": "grouped_mm"}  # transformers' default, which does not run in float64

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM with linear RoPE": ("llama", _rope("linear", factor=4.0)),
    "LlamaForCausalLM with YaRN": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "LlamaForCausalLM with Llama 3's RoPE": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "DeepseekV3ForCausalLM with YaRN": (
        "deepseek_v3",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    "DeepseekV3ForCausalLM with full queries": ("deepseek_v3", {"q_lora_rank": None}),
    "FalconForCausalLM with ALiBi": ("falcon", {"alibi": True}),
    "FalconForCausalLM with grouped heads": ("falcon", {"new_decoder_architecture": True}),
    "MptForCausalLM with learned positions": ("mpt", {"attn_config": {"alibi": False}}),
    "Gemma4ForCausalLM with experts, K = V": (
        "gemma4_text",
        {"attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 8},
    ),
    "Gemma3ForCausalLM with softcaps": ("gemma3_text", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "Gemma3ForCausalLM with bidirectional attention": ("gemma3_text", {"use_bidirectional_attention": True}),
    "PhimoeForCausalLM with no window": ("phimoe", {"sliding_window": None}),
    "Qwen2MoeForCausalLM with no window": ("qwen2_moe", {"use_sliding_window": False, "layer_types": None}),
    "StableLmForCausalLM with parallel residuals": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "GPTNeoXForCausalLM with one residual": ("gpt_neox", {"use_parallel_residual": False}),
    "MixtralForCausalLM with grouped products": ("mixtral", _GROUPED),
    "GptOssForCausalLM with grouped products": ("gpt_oss", _GROUPED),
    "DeepseekV3ForCausalLM with grouped products": ("deepseek_v3", _GROUPED),
    "Gemma2ForCausalLM with bidirectional attention": ("gemma2", {"use_bidirectional_attention": True}),
    "GemmaForCausalLM with bidirectional attention": ("gemma", {"use_bidirectional_attention": True}),
    "Gemma4ForCausalLM with bidirectional attention": ("gemma4_text", {"use_bidirectional_attention": "all"}),
    "Ministral3ForCausalLM with scores that grow": (
        "ministral3",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
    ),
    "HunYuanDenseV1ForCausalLM with scaled RoPE": ("hunyuan_v1_dense", _rope("dynamic", alpha=100.0, factor=1.0)),
    "Qwen2ForCausalLM with windows in later layers": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": None, "max_window_layers": 2},
    ),
    "BertLMHeadModel with cross-attention": ("bert", {"add_cross_attention": True}),
    "GPT2LMHeadModel with cross-attention": ("gpt2", {"add_cross_attention": True}),
    "Llama4ForCausalLM with chunks alone": ("llama4_text", {"no_rope_layers": [1, 1, 1, 1]}),
    "Gemma3nForCausalLM with one shared layer": ("gemma3n_text", {"num_kv_shared_layers": 1}),
    "Phi3ForCausalLM with part of the RoPE": ("phi3", {"partial_rotary_factor": 0.5}),
    "JetMoeForCausalLM with one expert a token": ("jetmoe", {"num_experts_per_tok": 1}),
    "LlamaForCausalLM with dynamic NTK": ("llama", _rope("dynamic", factor=4.0)),
    "Phi3ForCausalLM with longrope": ("phi3", {**_LONG, "sliding_window": None}),
    "PhimoeForCausalLM with longrope": ("phimoe", {**_LONG, "sliding_window": None}),
    "DogeForCausalLM with experts": ("doge", {"is_moe": True, "num_experts": 16}),
    "GPT2LMHeadModel with scales by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "GPTBigCodeForCausalLM with many heads": ("gpt_bigcode", {"multi_query": False}),
    "OPTForCausalLM with post-norms": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "OlmoForCausalLM with clipping": ("olmo", {"clip_qkv": 0.5}),
    "BertLMHeadModel with both directions": ("bert", {"is_decoder": False}),
}
"""Other architectures of a class, by configuration: name -> model type and fields in addition to those above."""
