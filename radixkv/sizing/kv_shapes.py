"""Read the shape of a model's KV from its config.json or GGUF file, or look it up by a well-known name.

No weight is read and nothing is downloaded. A shape does not imply that radixkv runs the model: `radixkv doctor` loads
it to test that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from radixkv import model_path
from radixkv.errors import InvalidInput
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import GGUFHeader, find, read_header
from radixkv.sizing.kv_size import WIDTHS, KVShape, LayerKV
from radixkv.sizing.state_shapes import LAYER_KINDS, is_hybrid, layer_kinds, layer_state

_NAMED = {  # layers, KV heads, head dim, context: as their config.json says; weights of 16 bits
    "llama-3.1-8b": (32, 8, 128, 131_072),
    "llama-3.1-70b": (80, 8, 128, 131_072),
    "llama-3.2-1b": (16, 8, 64, 131_072),
    "llama-3.2-3b": (28, 8, 128, 131_072),
    "mistral-7b": (32, 8, 128, 32_768),
    "qwen2.5-0.5b": (24, 2, 64, 32_768),
    "qwen2.5-7b": (28, 4, 128, 32_768),
    "qwen3-0.6b": (28, 8, 128, 40_960),
    "qwen3-8b": (36, 8, 128, 40_960),
    "qwen3-14b": (40, 8, 128, 40_960),
    "qwen3-32b": (64, 8, 128, 40_960),
    "qwen3-30b-a3b": (48, 4, 128, 40_960),
}

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")

# Defaults of transformers' config classes for fields that the files of a family may omit.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3n_text": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 15},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
    "gpt_oss": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    **{kind: {"head_dim": 256} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "nemotron_h": {"head_dim": 128},
}
_WINDOWED = {
    "sliding_attention": ("a window", "sliding_window"),
    "chunked_attention": ("a chunk", "attention_chunk_size"),
}
_KINDS = {"full_attention", "attention", *_WINDOWED}
_ATTEND_TWICE = ("diffllama", "longcat_flash")  # in each layer; DiffLlama with the same keys and half of the values
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_ENCODERS = ("albert", "bert", "electra", "roformer", "xlnet", "ernie", "big_bird", "data2vec")
# Prefixes of fields that describe a recurrent state, or an index that is stored in addition to the KV.
_STATE = ("mamba_", "ssm_", "linear_num_", "linear_conv_", "linear_attn_", "conv_L_cache", "rwkv_", "index_topk")
_STATEFUL = {"falcon_mamba", "hrm_text", "mamba", "mamba2", "recurrent_gemma", "reformer", "rwkv", "xlstm"}


def kv_shape(model: str) -> KVShape:
    """Return the KV shape of a model: "tiny" (bundled), a folder, a config.json, a GGUF file, or a well-known name.

    Raises InvalidInput with the reason if `model` is none of these, is not a decoder, or stores anything other than
    keys and values of each token; UnsupportedModel for a GGUF file of an unknown architecture. Costs the header of a
    GGUF file.

    >>> kv_shape("llama-3.1-70b").bytes_per_token()
    327680
    """
    path = _path_of(model)
    if path is None:
        return _named(model)
    if isinstance(path, Path) and model_path.is_gguf(path):
        return _of_gguf(read_header(path), model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return _of_config(config, model)
    except (ValueError, RecursionError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise InvalidInput(f"model {model!r}: {path} states no KV shape: {why}") from error


def _path_of(model: str) -> Path | Traversable | None:
    """Return the path of the config.json or of the GGUF file; None if `model` can only be a name."""
    if model == "tiny":
        return resources.files("radixkv").joinpath("assets", "tiny", "config.json")
    path = model_path.local(model)
    with model_path.readable():
        if path.is_dir():
            config = path / "config.json"
            found = config if config.is_file() else find(path)
            if found is None:
                raise InvalidInput(f"model {model!r}: the folder has no config.json and no GGUF file")
            return found
        if path.is_file():
            return path
    return model_path.find(model) if path.suffix.lower() == ".gguf" else None  # raises for a mistyped path


def _of_gguf(header: GGUFHeader, name: str) -> KVShape:
    """Return the KV shape of a GGUF file; without a dtype, and with a note, if the weights are quantised."""
    config = config_of(header)
    try:
        shape = _of_config(config, name)
    except ValueError as error:
        raise InvalidInput(f"model {name!r}: {header.path} states no KV shape: {error}") from error
    types = {each.type_name for each in header.tensors.values() if len(each.shape) > 1} - {"F32", "F16", "BF16"}
    if not types:
        return shape
    note = f"the weights are quantised ({', '.join(sorted(types))}): an engine stores KV in float32 on a CPU, else in "
    return replace(shape, dtype=None, notes=(*shape.notes, note + str(shape.dtype)))


def _named(model: str) -> KVShape:
    """Return a well-known shape; the organisation before the name and "-Instruct" after it are ignored."""
    name = model.lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-instruct")
    if name not in _NAMED:
        names = ", ".join(["tiny", *_NAMED])
        raise InvalidInput(
            f"model {model!r}: no such folder or config.json, and none of {names}; nothing is fetched: give the "
            "path of its config.json"
        )
    layers, heads, dim, context = _NAMED[name]
    return KVShape(name, (LayerKV(heads, dim, dim),) * layers, "bfloat16", context)


# ---- a config; errors in it are raised as ValueError


def _of_config(whole: dict[str, Any], name: str) -> KVShape:
    _check_decoder(whole)
    config = whole.get("text_config") or whole
    if not isinstance(config, dict):
        raise ValueError(f"text_config is {config!r}")
    _check_decoder(config)
    config = {**_DEFAULTS.get(str(config.get("model_type")), {}), **{k: v for k, v in config.items() if v is not None}}
    kinds = _kinds(config)
    storing = kinds[: len(kinds) - _sharing_layers(config, len(kinds))]
    layers = [_layer(config, at, kind) for at, kind in enumerate(storing)]
    kept = tuple(layer for layer in layers if layer is not None)
    if not kept:
        raise ValueError("none of its layers keeps keys and values")
    if config.get("model_type") in _ATTEND_TWICE:
        kept = tuple(layer for layer in kept for _ in range(2))
    context = next((config[field] for field in _CONTEXT if type(config.get(field)) is int), None)
    states = (layer_state(config),) * sum(_keeps_state(kind) for kind in kinds) if is_hybrid(config) else ()
    return KVShape(name, kept, _dtype(config, whole), context, tuple(_notes(config, storing, kept)), states)


def _check_decoder(config: Mapping[str, Any]) -> None:
    """Refuse encoders, and models that store anything other than keys and values of each token."""
    kind, made = str(config.get("model_type")), config.get("architectures") or []
    if not isinstance(made, list):
        raise ValueError(f"architectures is {made!r}")
    if config.get("is_encoder_decoder"):
        raise ValueError("it is an encoder-decoder; radixkv runs decoders")
    encodes = any(each in kind for each in _ENCODERS) and not kind.startswith("ernie4") and "decoder" not in kind
    if (encodes and not config.get("is_decoder")) or (made and not any(str(each).endswith(_DECODERS) for each in made)):
        raise ValueError(f"{', '.join(map(str, made)) or kind} is no decoder with a language model's head")
    state = [field for field in config if field.startswith(_STATE) and config[field]]
    state = [field for field in state if field == "index_topk" or not is_hybrid(config)]
    if kind in _STATEFUL or state:
        raise ValueError(f"{state[0] if state else kind}: it keeps something else than keys and values of each token")
    if config.get("cross_attention_layers"):
        raise ValueError("cross_attention_layers: some of its layers attend to another model's output")


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, a name of `_KINDS`; of a hybrid model also of `LAYER_KINDS`."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
    hybrid = is_hybrid(config)
    count = _whole(config, _LAYERS, default=len(kinds) if hybrid and isinstance(kinds, list) else None)
    if count > 10_000:
        raise ValueError(f"{count} layers")
    if hybrid and kinds is None:
        kinds = layer_kinds(config, count)
    if kinds is None:
        return ["sliding_attention" if _slides(config) else "full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"its list of layer types is not one of {count} layers")
    if other := sorted({str(kind) for kind in kinds} - (_KINDS | LAYER_KINDS.keys() if hybrid else _KINDS)):
        raise ValueError(f"layers of type {', '.join(other)} keep something else than keys and values of each token")
    return kinds


def _sharing_layers(config: Mapping[str, Any], count: int) -> int:
    """Return the number of layers, the last of `count`, that read the KV of earlier layers and store none."""
    sharing = config.get("num_kv_shared_layers", 0)
    if type(sharing) is not int or not 0 <= sharing < count:
        raise ValueError(f"num_kv_shared_layers is {sharing!r}, not a number below its {count} layers")
    return sharing


def _keeps_state(kind: str) -> bool:
    return kind in LAYER_KINDS and LAYER_KINDS[kind][1]


def _slides(config: Mapping[str, Any]) -> bool:
    """Return whether all layers of a config without layer types have a sliding window."""
    mixed = any(config.get(field) for field in ("sliding_window_pattern", "max_window_layers"))
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False and not mixed


def _layer(config: Mapping[str, Any], at: int, kind: str) -> LayerKV | None:
    """Return the KV shape of one layer; None if it has no attention."""
    attention, _ = LAYER_KINDS.get(kind, (kind, False))
    if attention is None:
        return None
    own = _own_fields(config, at, kind)
    heads = _whole(own, _HEADS)
    if own.get("no_op"):
        return None
    if own.get("kv_lora_rank"):  # latent attention, decompressed: every head has its key and its value
        key = _whole(own, ("qk_nope_head_dim",)) + _whole(own, ("qk_rope_head_dim",))
        return LayerKV(heads, key, _whole(own, ("v_head_dim",)))
    if own.get("model_type") == "zamba2":  # attends to its hidden states and its embeddings, side by side
        own["head_dim"] = 2 * _whole(own, _HIDDEN) // heads
    if own.get("model_type") == "jetmoe":  # repeats its keys and values for each expert of a token
        own["num_key_value_heads"] = heads
    dim = _whole(own, ("head_dim", "kv_channels"), default=0) or _whole(own, _HIDDEN) // heads
    if dim < 1:
        raise ValueError(f"{heads} heads share {_whole(own, _HIDDEN)} numbers")
    return LayerKV(_kv_heads(own, heads), dim, _whole(own, ("v_head_dim",), default=dim))


def _own_fields(config: Mapping[str, Any], at: int, kind: str) -> dict[str, Any]:
    """Return the config of one layer; model families have different fields for layers that differ."""
    own = {**config, **_part(config, "attn_config")}
    own.update({name: _at(own[name], at) for name in _KV_HEADS if isinstance(own.get(name), list)})
    if kind in _WINDOWED:
        own.update({name.removeprefix("swa_"): value for name, value in config.items() if name.startswith("swa_")})
        if config.get("model_type") == "mimo_v2_flash" and "swa_num_key_value_heads" not in config:
            own["num_key_value_heads"] = 2 * _whole(config, _KV_HEADS)  # as its class computes it, not as the file says
    elif "per_layer_config" not in config:
        own["head_dim"] = config.get("global_head_dim") or config.get("head_dim")
        if config.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = config.get("num_global_key_value_heads") or own.get("num_key_value_heads")
    overrides = _part(config, "per_layer_config")
    own.update(_part(overrides, next((key for key in overrides if key.isdecimal() and int(key) == at), "")))
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and at < len(blocks):
        own.update(_grouped(_part(blocks[at], "attention"), _whole(own, _HEADS)))
    return own


def _grouped(attention: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return the fields of a block's own attention: none at all, or the number of query heads per KV head."""
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return {"no_op": True}
    return {"num_key_value_heads": heads // _whole(attention, ("n_heads_in_group",), default=1)}


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Return the KV heads of a layer; without a field for them, each head has its own."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    kv_heads = _whole(config, _KV_HEADS, default=heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    return kv_heads


def _at(values: list[Any], at: int) -> Any:
    """Return the value of one layer from a list with one value per layer."""
    if at >= len(values):
        raise ValueError(f"a list for all layers ends before layer {at}")
    return values[at]


def _part(config: Any, field: str) -> Mapping[str, Any]:
    """Return a nested config; empty if it is missing."""
    part = config.get(field) if isinstance(config, dict) else None
    return part if isinstance(part, dict) else {}


def _whole(config: Mapping[str, Any], fields: tuple[str, ...], default: int | None = None) -> int:
    """Return the first of these fields that is present, an int above 0."""
    for field in fields:
        value = config.get(field)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"{field} is {value!r}, not a whole number above 0 and below 2**31")
        return value
    if default is None:
        raise ValueError(f"it has no {fields[0]}")
    return default


def _dtype(config: Mapping[str, Any], whole: Mapping[str, Any]) -> str | None:
    """Return the dtype that the weights are saved in; None if the config does not have it."""
    named = (each.get(field) for each in (config, whole) for field in ("dtype", "torch_dtype"))
    dtype = next((str(each).removeprefix("torch.") for each in named if each), None)
    if dtype is not None and dtype not in WIDTHS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(WIDTHS)}")
    return dtype


def _notes(config: Mapping[str, Any], kinds: list[str], layers: tuple[LayerKV, ...]) -> list[str]:
    """Return sentences about storage that the numbers alone do not explain."""
    notes = []
    if rank := config.get("kv_lora_rank"):
        latent = len(layers) * (_whole({"rank": rank}, ("rank",)) + _whole(config, ("qk_rope_head_dim",)))
        times = sum(layer.numbers for layer in layers) / latent
        notes.append(f"latent attention is stored decompressed, which takes {times:.1f} times what the latent would")
    for kind, (seen, field) in _WINDOWED.items():
        if count := kinds.count(kind):
            size = f" of {config[field]} tokens" if config.get(field) else ""
            notes.append(
                f"{count} of {len(kinds)} layers see {seen}{size}, but keep all KV, so that prefixes can be shared"
            )
    if sharing := config.get("num_kv_shared_layers"):
        notes.append(f"{sharing} more layers, the last ones, read the KV of earlier layers and store none")
    return notes
