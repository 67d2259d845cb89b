"""Write checkpoints, damage them, and read them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from radixkv.models import loader

INDEX = "model.safetensors.index.json"


def read(folder: Path | str, dtype: torch.dtype = torch.float32, *, revision: str | None = None) -> tuple[Any, Any]:
    """Return the model and tokenizer as the loader reads them."""
    return loader.read(str(folder), dtype=dtype, device=torch.device("cpu"), revision=revision, trust_remote_code=False)


def rewrite(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights in one file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def same(model: Any, other: Any) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def second_shard(folder: Path) -> Path:
    """Return the second of several weight files."""
    return sorted(folder.glob("*.safetensors"))[1]
