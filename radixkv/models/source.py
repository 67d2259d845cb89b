"""Find a model and bring it into memory: the bundled one, a local folder, or a name on the hub.

Knows files and names, and what may go wrong with them. Does not know attention or pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from radixkv.errors import InvalidInput, UnsupportedModel

BUNDLED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read(
    name: str, *, dtype: torch.dtype, device: torch.device, revision: str | None, trust_remote_code: bool
) -> tuple[Any, Any | None]:
    """Return (model, tokenizer or None); weights come from safetensors only.

    Raises InvalidInput if nothing usable is found under this name, UnsupportedModel if what is found is not to be run.
    """
    folder = _folder(name)
    if folder is not None:
        _check_folder(folder)
    place = name if folder is None else str(folder)
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": folder is not None}
    with _quiet(name in BUNDLED):
        model = _read_model(name, place, dtype, options).to(device)
    return model, _read_tokenizer(place, folder, options)


def _folder(name: str) -> Path | None:
    """The local folder that `name` means; None if it is a hub name. Raises InvalidInput for a path to nothing."""
    if not name.strip():
        raise InvalidInput("the model's name is empty; give a folder, a hub name, or 'tiny' for the bundled model")
    if name in BUNDLED:
        return BUNDLED[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidInput(f"{name} is a file; give the folder that holds config.json and the weights")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise InvalidInput(f"there is no model folder {name}")
    return None


def _check_folder(folder: Path) -> None:
    """A folder must have a configuration and weights that are not pickles."""
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder} is no model folder: it has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise UnsupportedModel(
            f"{folder} has pickled weights only, and unpickling runs code; convert them with "
            "model.save_pretrained(folder), which writes safetensors"
        )
    raise InvalidInput(f"{folder} has a config.json, but no weights (*.safetensors)")


def _read_model(name: str, place: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Load the weights; what transformers raises becomes one of our errors, with its text."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, use_safetensors=True, attn_implementation="eager", output_loading_info=True, **options
        )
    except OSError as error:
        raise InvalidInput(f"cannot find model {name!r}: no local folder of that name, and {error}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot make a decoder of {name!r}: {_advice(error)}") from error
    except Exception as error:
        raise InvalidInput(f"the files of {name!r} cannot be read: {type(error).__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedModel(f"{name!r} lacks {len(missing)} weights, {missing[0]} among them; they would be random")
    return model


def _advice(error: Exception) -> str:
    """The error's text; where a model brings its own code, what to do."""
    if "trust_remote_code" in str(error):
        return "it brings its own code; pass trust_remote_code=True if you have read and trust it"
    return str(error)


def _read_tokenizer(place: str, folder: Path | None, options: dict[str, Any]) -> Any | None:
    """The tokenizer that comes with the model; None if it comes without (token ids still work)."""
    if folder is not None and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError) as error:
        if folder is None:
            return None
        raise InvalidInput(f"the tokenizer in {folder} cannot be read: {error}") from error


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """No progress bar while this is open: loading the bundled model takes less time than looking at one."""
    was_on = transformers_logging.is_progress_bar_enabled()
    if quiet:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet and was_on:
            transformers_logging.enable_progress_bar()
