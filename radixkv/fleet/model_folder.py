"""Find or write the files of a model that a frontend reads: its configuration, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv import model_path
from radixkv.errors import UnsupportedModel
from radixkv.models import checkpoint_writer
from radixkv.models.loaded import LoadedModel

TOKENIZER = "tokenizer.json"


def files_of(name: str, model: LoadedModel, empty: Path, *, own_tokenizer: bool) -> Path:
    """Return the folder of a model; for a GGUF file, or with another tokenizer, write the files to `empty`.

    Raises UnsupportedModel for a model without a tokenizer that the frontend can read, or without a chat template.
    """
    codec: Any = model.codec
    folder = _folder(name) if own_tokenizer else None
    if codec is None or (folder is not None and not (folder / TOKENIZER).is_file()):
        raise UnsupportedModel(f"{name!r} has no {TOKENIZER}, which a frontend reads: it cannot be a worker")
    if not codec.chat_template:
        raise UnsupportedModel(f"{name!r} has no chat template, which a frontend needs: it cannot be a worker")
    if folder is None:
        checkpoint_writer.write_settings(empty, model.model, model.tokenizer)
    return folder or empty


def _folder(name: str) -> Path | None:
    """Return the folder that holds the files of a model, local or in the hub's cache; None for a GGUF file."""
    found = model_path.find(name)
    if found is None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, TOKENIZER)
        return Path(cached).parent if isinstance(cached, str) else Path(name)
    return None if model_path.is_gguf(found) else found
