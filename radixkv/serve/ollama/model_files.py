"""Read facts about a model from its files, whether it is loaded or not: no weight is read, and nothing is fetched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from radixkv import model_path
from radixkv.errors import UnsupportedModel
from radixkv.gguf.header import read_header
from radixkv.models import checkpoint
from radixkv.serve.fields import JsonObject

_NO_JSON = ("nan", "inf", "-inf")
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, empty without readable files.

    `size` is the bytes of its weights, `modified` the date of the latest file in seconds, and `digest` the SHA-256 of
    the files' names, sizes and dates. `format` is "gguf" or "safetensors". `quantization` is the type of most weights,
    and `parameters` is their number. `info` has the keys of a GGUF file's metadata that are no arrays. `template` is
    the source of the chat template, of all if there are several.
    """

    digest: str
    size: int = 0
    modified: float = 0.0
    format: str = ""
    family: str = ""
    quantization: str = ""
    parameters: int = 0
    info: JsonObject = field(default_factory=dict)
    template: str = ""


def facts_of(source: str) -> ModelFacts:
    """Return the facts about a model by the name that the command gave. Costs the headers, once for each version."""
    with suppress(ValueError, OSError, UnsupportedModel):  # InvalidInput is a ValueError, as is a bad name on the hub
        place = model_path.find(source)
        if place is None:
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(source, model_path.CONFIG)
            place = Path(found).parent if isinstance(found, str) else Path(source)
        return _read(place, (place / model_path.CONFIG if place.is_dir() else place).stat().st_mtime_ns)
    return ModelFacts(_digest(source))


@lru_cache(maxsize=64)
def _read(place: Path, _: int) -> ModelFacts:
    """Return the facts of one version of the files."""
    numbers: Counter[str] = Counter()
    if place.is_dir():
        found = checkpoint.examine(place)
        form, family, files = "safetensors", str(found.config.get("model_type", "")), [place / it for it in found.files]
        info, template = _info(family, found.config), _template(place)
        for each in found.tensors.values():
            numbers[each.dtype] += prod(each.shape)
    else:
        header = read_header(place)
        form, family, files, info = "gguf", header.architecture, list(header.versions), dict(header.metadata)
        template = "\n".join(str(info.pop(key)) for key in list(info) if key.startswith("tokenizer.chat_template"))
        for tensor in header.tensors.values():
            numbers[tensor.type_name] += tensor.numbers
    stats = [each.stat() for each in files]
    digest = _digest([(each.name, it.st_size, it.st_mtime_ns) for each, it in zip(files, stats, strict=True)])
    kept = {key: it for key, it in info.items() if isinstance(it, str | int | float) and str(it) not in _NO_JSON}
    kept["general.parameter_count"] = numbers.total()
    size, modified = sum(each.st_size for each in stats), max(each.st_mtime for each in stats)
    most = max(numbers, key=numbers.__getitem__, default="")
    return ModelFacts(digest, size, modified, form, family, most, numbers.total(), kept, template)


def _info(family: str, config: Mapping[str, Any]) -> JsonObject:
    inside = config.get("text_config")
    text = inside if isinstance(inside, dict) and inside else config
    return {"general.architecture": family, **{f"{family}.{key}": text.get(name) for key, name in _SIZES.items()}}


def _template(folder: Path) -> str:
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text("utf-8", errors="replace")
    given = checkpoint.read_object(settings).get("chat_template", "") if settings.is_file() else ""
    return given if isinstance(given, str) else json.dumps(given)


def _digest(value: object) -> str:
    return sha256(repr(value).encode(errors="replace")).hexdigest()
