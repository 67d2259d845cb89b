"""Pickled weights run code when they are read, so they are never read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter
from tests.models.checkpoints.files import INDEX, read, rewrite, same
from tests.models.conftest import FAMILIES, make


class Payload:
    """Unpickling this writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "I was run")


def _alone(folder: Path, evil: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(evil)


def _sharded(folder: Path, evil: bytes) -> None:
    _alone(folder, evil)
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _behind_an_index(folder: Path, evil: bytes) -> None:
    _alone(folder, evil)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "pytorch_model.bin"}}))


def _among_shards(folder: Path, evil: bytes) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.bin").write_bytes(evil)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "lm_head.weight": "b.bin"}}))


def _named_by_the_configuration(folder: Path, evil: bytes) -> None:
    (folder / "adapter_model.bin").write_bytes(evil)  # the one name of a pickle that transformers lets pass there
    rewrite(folder / "config.json", transformers_weights="adapter_model.bin")


def _under_another_name(folder: Path, evil: bytes) -> None:
    (folder / "model.safetensors").write_bytes(evil)


def _as_an_adapter(folder: Path, evil: bytes) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "."}')
    (folder / "adapter_model.bin").write_bytes(evil)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (_alone, "pickled weights only, and unpickling runs code; convert"),
        (_sharded, "pickled weights only, and unpickling runs code; convert"),
        (_behind_an_index, "names 'pytorch_model.bin' for weights: these are no safetensors, and unpickling"),
        (_among_shards, "names 'b.bin' for weights: these are no safetensors, and unpickling"),
        (_named_by_the_configuration, "names 'adapter_model.bin' for weights: these are no safetensors"),
        (_under_another_name, "is not whole"),
        (_as_an_adapter, "holds an adapter"),
    ],
)
def test_no_pickle_is_ever_read(
    one: Path, tmp_path: Path, place: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps({"lm_head.weight": Payload(mark)})
    pickle.loads(evil)
    assert mark.read_text() == "I was run"  # it would
    mark.unlink()
    place(one, evil)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(InvalidInput if place is _under_another_name else UnsupportedModel, match=said):
        adapter.load(str(one))
    assert not mark.exists()


def test_a_pickle_in_the_folder_of_the_weights_is_not_read(one: Path) -> None:
    (one / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert same(read(one)[0], make(FAMILIES["llama"]()))
