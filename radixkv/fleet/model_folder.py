"""Write the files of a model that a frontend reads: its configuration, tokenizer and chat template.

A fleet takes workers for replicas of one model if these files and their path are equal. So the folder is named by its
content, and the configuration has the version of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from radixkv import model_path, private_files
from radixkv.errors import UnsupportedModel
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import read_header
from radixkv.models.identity import version_of
from radixkv.models.loaded import LoadedModel

TOKENIZER = "tokenizer.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_OF_TOKENIZER = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def write_files(name: str, model: LoadedModel, *, own_tokenizer: bool, revision: str | None = None) -> Path:
    """Write the files to a folder in the user's cache, unless they are there; return it.

    They are those of the model's folder; for a GGUF file, or with another tokenizer, radixkv makes them. Raises
    UnsupportedModel for a model without a tokenizer that the frontend can read, or without a chat template; OSError.
    """
    codec: Any = model.codec
    place = _place(name, revision)
    copied = own_tokenizer and place.is_dir()
    if codec is None or (copied and not (place / TOKENIZER).is_file()):
        raise UnsupportedModel(f"{name!r} has no {TOKENIZER}, which a frontend reads: it cannot be a worker")
    if not codec.chat_template:
        raise UnsupportedModel(f"{name!r} has no chat template, which a frontend needs: it cannot be a worker")
    os.close(private_files.open_cache("fleet"))
    with TemporaryDirectory(dir=private_files.cache_path("fleet"), prefix=".") as fresh:
        made = Path(fresh) / "files"
        made.mkdir()
        _write_settings(place, model, made)
        if copied:
            _copy(place, made, _OF_TOKENIZER)
        else:
            tokenizer: Any = model.tokenizer
            tokenizer.save_pretrained(made)
        target = private_files.cache_path("fleet") / _digest(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another worker has written them
                raise
    return target


def _place(name: str, revision: str | None) -> Path:
    """Return the GGUF file, or the folder that holds the files of a model, local or in the hub's cache."""
    found = model_path.find(name)
    if found is None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, _CONFIG, revision=revision)
        found = Path(cached).parent if isinstance(cached, str) else Path(name)
    return found


def _write_settings(place: Path, model: LoadedModel, folder: Path) -> None:
    """Write the configuration, with the version of the weights, and the stop tokens."""
    stops = {"eos_token_id": sorted(model.stop_token_ids)}
    if place.is_dir():
        settings = json.loads((place / _CONFIG).read_text())
        _copy(place, folder, (_GENERATION,))
    else:
        settings = {"architectures": [type(model.model).__name__], **config_of(read_header(place)), **stops}
    if not (folder / _GENERATION).exists():
        (folder / _GENERATION).write_text(json.dumps(stops))
    settings["radixkv_weights"] = version_of(model.model)
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2))


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        digest.update(f"{file.name} {len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]
