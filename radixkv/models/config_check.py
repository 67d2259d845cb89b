"""Compare a configuration with the headers of its weight files before a model is built from it.

transformers builds whatever a configuration asks for: ten million layers take days, and a wrong width takes memory for
random weights until the mismatch is reported. Sizes beyond the stored tensors are therefore refused first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput

_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "encoder_layers",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts",
    "num_nextn_predict_layers",
)  # fmt: skip
_SIZES = (
    "vocab_size", "hidden_size", "n_embd", "d_model", "head_dim", "num_attention_heads", "n_head", "n_heads",
    "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
_CONTEXTS = ("max_position_embeddings", "n_positions")
_ALWAYS_BUILT = 256  # layers or experts that are built quickly, stored or not; missing weights are reported later
_SMALL_SIZE = 4096  # of one dimension; so a file that lacks the embedding is called incomplete
_MOST_TIMES, _MOST_MORE = 2, 1 << 20  # numbers of the built model, relative to the stored ones: missing parts are named


def check_fields(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise InvalidInput for a context of no tokens, and for sizes and counts beyond the stored tensors.

    `shapes` has the shapes of all stored tensors by name.
    """
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    limits = dict.fromkeys(_SIZES, max(_SMALL_SIZE, largest)) | dict.fromkeys(_COUNTS, max(_ALWAYS_BUILT, len(shapes)))
    limits |= {name: max(limits[name], largest) for name in _COUNTS if "expert" in name}  # stacked in one tensor
    for outer, name, value in _integers(config):
        least = 1 if name in _CONTEXTS or (name in _SIZES and not outer) else 0
        if name in (*limits, *_CONTEXTS) and value < least:
            raise InvalidInput(f"{folder / 'config.json'}: {outer}{name} is {value}, and must be at least {least}")
        if name in limits and value > limits[name]:
            raise InvalidInput(
                f"{folder / 'config.json'}: {outer}{name} is {value}, and the files have {len(shapes)} weights with "
                f"dimensions of up to {largest}: the two do not belong together"
            )


def check_numbers(folder: Path, most_weights: int, place: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidInput if the model would have several times `most_weights`. Allocates no weights.

    `place` and `options` are transformers' own for the configuration in `folder`. Costs about a tenth of a second.
    A model that cannot be built is left to the reading, which gives the reason.
    """
    import torch  # here, because `check_fields` also runs before torch is imported, which takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(place, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=options["trust_remote_code"])
    except Exception:  # transformers and the model's own code raise any class
        return
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > _MOST_TIMES * most_weights + _MOST_MORE:
        raise InvalidInput(
            f"{folder / 'config.json'} describes a model of {wanted:,} weights, and the files have {most_weights:,}: "
            "the two do not belong together"
        )


def _integers(config: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield outer name with a dot, name and value of the integers of a configuration and of the ones in it."""
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield outer, name, value
        elif isinstance(value, Mapping) and not outer:
            yield from _integers(value, f"{name}.")
