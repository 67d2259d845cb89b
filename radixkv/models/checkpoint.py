"""Examine the files of a checkpoint's folder before any weight is loaded.

Reads JSON files and the headers of safetensors files. No weight is read and nothing is unpickled.

transformers builds whatever a configuration asks for: ten million layers take days, and a wrong width takes memory for
random weights until the mismatch is reported. Sizes beyond the stored tensors are therefore refused first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.identity import Piece

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX, ADAPTER = f"{WEIGHTS}.index.json", "adapter_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT = "unpickling runs code; convert them with model.save_pretrained(folder), which writes safetensors"
_LFS = b"version https://git-lfs"  # start of a placeholder for a large file, in a clone made without git-lfs
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its dtype as safetensors calls it ("BF16"), its shape, and its place in a file."""

    dtype: str
    shape: tuple[int, ...]
    piece: Piece = field(compare=False)

    @property
    def bits(self) -> int:
        """Bits per number."""
        digits = "".join(letter for letter in self.dtype.split("_")[0] if letter.isdigit())  # 8 of F8_E4M3
        return int(digits or 8)

    @property
    def floating(self) -> bool:
        """Whether the numbers are floating point."""
        return self.dtype not in _INTEGERS and self.dtype != "BOOL"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds a model: its configuration, its weight files, and every tensor in them by name."""

    folder: Path
    config: Mapping[str, Any]
    files: Sequence[str]
    tensors: Mapping[str, StoredTensor]

    def bytes_in(self, itemsize: int | None) -> int:
        """Return the bytes of the weights with `itemsize` bytes per number; as stored if None or quantized."""
        same = itemsize is None or "quantization_config" in self.config
        return sum(
            math.prod(each.shape) * (each.bits if same or not each.floating else 8 * (itemsize or 0)) // 8
            for each in self.tensors.values()
        )

    @property
    def most_weights(self) -> int:
        """The weights that the files can hold: a number of a quantised checkpoint holds one per bit, at most."""
        quantized = "quantization_config" in self.config
        return sum(math.prod(each.shape) * (each.bits if quantized else 1) for each in self.tensors.values())


def examine(folder: Path) -> Checkpoint:
    """Examine all files from which a model is loaded. Costs the headers of the weight files.

    Raises InvalidInput for missing or broken files, UnsupportedModel for whole files that radixkv does not run; both
    name the file.
    """
    config = read_config(folder)
    if (folder / GENERATION).is_file():
        _check_generation(folder / GENERATION)
    files = _weight_files(folder, config)
    tensors = _tensors(folder, files)
    _check_integers(folder, config, tensors)
    check_fields(folder, config, {name: each.shape for name, each in tensors.items()})
    return Checkpoint(folder, config, files, tensors)


def _tensors(folder: Path, files: Sequence[str]) -> dict[str, StoredTensor]:
    """Return every tensor of these files. Raises InvalidInput if two files have one, which transformers would allow."""
    found: dict[str, StoredTensor] = {}
    where: dict[str, str] = {}
    for file in files:
        for name, stored in _header(folder / file).items():
            if name in found:
                raise InvalidInput(f"{folder}: {name} lies in {where[name]} and in {file}: fetch or copy it again")
            found[name], where[name] = stored, file
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration; raises InvalidInput if there is none, or if it names no model type."""
    path = folder / CONFIG
    if (folder / ADAPTER).is_file():
        raise UnsupportedModel(
            f"{folder} holds an adapter ({ADAPTER}), which radixkv does not apply: merge it into its base "
            "model (peft's merge_and_unload) and save that"
        )
    if not path.is_file():
        _check_kind(path)
        inside = sorted(
            [*folder.glob(f"*/{CONFIG}"), *folder.glob(f"snapshots/*/{CONFIG}")]
        )  # training runs, hub cache
        hint = f", but {inside[0].parent} does" if inside else ""
        raise InvalidInput(f"{folder} is no model folder: it has no {CONFIG}{hint}")
    config = read_object(path)
    if (
        not isinstance(config.get("model_type"), str) and "auto_map" not in config
    ):  # "auto_map" names a model's own code
        raise InvalidInput(f"{path} names no model_type, so nobody knows which model this is")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises InvalidInput with the position of the error for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} must hold a JSON object, not a {type(found).__name__}")
    return found


def weight_names(folder: Path, config: Mapping[str, Any]) -> Sequence[str]:
    """Return the possible names of the file of all weights or its index; raises UnsupportedModel for a pickle."""
    named = config.get("transformers_weights")
    if named is None:
        return WEIGHTS, INDEX
    _check_name(folder, folder / CONFIG, named)
    return (str(named),)


def shards(folder: Path, name: str) -> list[str]:
    """Return the files that an index names, existing or not, or the name itself if it is not an index.

    transformers would also follow an index to a pickle, or out of the folder. Both are refused here.
    """
    if not name.endswith(".index.json"):
        return [name]
    found = read_object(folder / name).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InvalidInput(f"{folder / name} has no weight_map from weights to files: fetch or copy it again")
    names = sorted({str(each) for each in found.values()})
    for each in names:
        _check_name(folder, folder / name, each)
    return names


def _weight_files(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the safetensors files with the weights; all exist."""
    names = weight_names(folder, config)
    name = next((each for each in names if (folder / each).is_file()), None)
    if name is None:
        raise _no_weights(folder, names)
    files = shards(folder, name)
    missing = [each for each in files if not (folder / each).is_file()]
    if missing:
        _check_kind(folder / missing[0])
        raise InvalidInput(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {name} names, {missing[0]} among them: "
            "fetch or copy it again"
        )
    return files


def _no_weights(folder: Path, names: Sequence[str]) -> Exception:
    """Return the error for a folder without weights: they are pickled, have another name, or are missing."""
    for name in names:
        _check_kind(folder / name)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        return UnsupportedModel(f"{folder} has pickled weights only, and {_CONVERT}")
    if any(folder.glob("*.gguf")):
        return UnsupportedModel(f"{folder} has weights in GGUF only: give the path of their file")
    text = f"{folder} has no weights: no {' or '.join(names)}"
    others = sorted(each.name for each in folder.glob("*.safetensors"))
    if others:
        more = " and others" if len(others) > 1 else ""
        text += f", but {others[0]}{more}: the index is missing, or the name is wrong"
    return InvalidInput(text)


def _check_kind(path: Path) -> None:
    """Raise InvalidInput if this name belongs to a folder or a broken link."""
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder, not a file")
    if path.is_symlink():
        raise InvalidInput(f"{path} is a link to nothing, as in a cache that was cleaned: fetch or copy it again")


def _check_name(folder: Path, source: Path, name: object) -> None:
    """Refuse a weight file named by `source` if it is a pickle or lies outside of the folder."""
    if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise UnsupportedModel(f"{source} names {name!r} for weights: these are no safetensors, and {_CONVERT}")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
        raise InvalidInput(f"{source} names {name!r} for weights, which is not in {folder}")


def _header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raises InvalidInput for a truncated file or one of another format."""
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise InvalidInput(f"{path} stands in for the weights (Git LFS): run git lfs pull")
            with safe_open(path, framework="pt"):  # checks the header
                file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except SafetensorError as error:
        raise InvalidInput(f"{path} is not whole ({error}): fetch or copy it again") from error
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), Piece(path, 8 + size + start, end - start))
    return found


def _check_integers(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse integer weights without a quantization_config, which would be used as plain numbers."""
    if "quantization_config" in config:
        return
    for name, stored in tensors.items():
        if stored.dtype in _INTEGERS and name.endswith(".weight"):
            raise UnsupportedModel(
                f"{folder}: {name} is stored as {stored.dtype}, and no quantization_config in {CONFIG} says what that "
                "stands for"
            )


def _check_generation(path: Path) -> None:
    """Refuse invalid stop tokens: transformers would drop the whole generation_config.json and its stop tokens."""
    ids = read_object(path).get("eos_token_id")
    if not all(type(each) is int for each in (ids if isinstance(ids, list) else [] if ids is None else [ids])):
        raise InvalidInput(f"{path}: eos_token_id must be a token id or a list of them, not {ids!r}")


# ---- the configuration


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


def described(found: Checkpoint, place: str, options: Mapping[str, Any]) -> Any | None:
    """Return transformers' model in float32 on the meta device; None if it cannot be built, and reading gives the
    reason.

    `place` and `options` are transformers' own for the configuration. Costs about a tenth of a second. Raises
    InvalidInput if the model would have several times the weights that the files hold.
    """
    import torch  # here, because `check_fields` also runs before torch is imported, which takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(place, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=options["trust_remote_code"],
            )
    except Exception:  # transformers and the model's own code raise any class
        return None
    wanted = sum(parameter.numel() for parameter in model.parameters())
    if wanted > _MOST_TIMES * found.most_weights + _MOST_MORE:
        raise InvalidInput(
            f"{found.folder / 'config.json'} describes a model of {wanted:,} weights, and the files have "
            f"{found.most_weights:,}: the two do not belong together"
        )
    return model


def _integers(config: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield outer name with a dot, name and value of the integers of a configuration and of the ones in it."""
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield outer, name, value
        elif isinstance(value, Mapping) and not outer:
            yield from _integers(value, f"{name}.")
