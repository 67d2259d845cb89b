"""Errors name missing or broken files, with a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, checkpoint
from tests.models.checkpoints.files import INDEX, edit, rewrite, second_shard


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda at: (at / "config.json").unlink(), "is no model folder: it has no config.json"),
    "config no JSON": (lambda at: (at / "config.json").write_text("{"), r"config\.json cannot be read: Expecting"),
    "config empty": (lambda at: (at / "config.json").write_text("{}"), r"config\.json names no model_type"),
    "config of a wrong type": (lambda at: rewrite(at / "config.json", hidden_size="x"), "'hidden_size' expected int"),
    "no weights": (lambda at: [each.unlink() for each in at.glob("model*")], r"no model\.safetensors or .*json$"),
    "no index": (lambda at: (at / INDEX).unlink(), "but model-00001-of-00012.safetensors and others: the index is"),
    "index no JSON": (lambda at: (at / INDEX).write_text("{"), r"index\.json cannot be read: Expecting"),
    "index without map": (lambda at: (at / INDEX).write_text("{}"), r"index\.json has no weight_map"),
    "index leads out": (
        lambda at: (at / INDEX).write_text('{"weight_map": {"x": "../model.safetensors"}}'),
        r"names '\.\./model\.safetensors' for weights, which is not in",
    ),
    "no second shard": (
        lambda at: second_shard(at).unlink(),
        r"lacks 1 of the 12 files that model\.safetensors\.index\.json names, model-00002-of-00012\.safetensors among",
    ),
    "shard cut short": (lambda at: _cut(second_shard(at)), r"model-00002-of-00012\.safetensors is not whole .*again"),
    "shard a link to nothing": (
        lambda at: _link(second_shard(at)),
        r"model-00002-of-00012\.safetensors is a link to nothing, as in a cache that was cleaned: fetch or copy",
    ),
    "index a link to nothing": (lambda at: _link(at / INDEX), r"index\.json is a link to nothing"),
    "config a link to nothing": (lambda at: _link(at / "config.json"), r"config\.json is a link to nothing"),
    "weights a folder": (
        lambda at: (at / INDEX).rename(at / "model.safetensors") and _folder(at / "model.safetensors"),
        r"model\.safetensors is a folder, not a file",
    ),
    "a weight in two shards": (
        lambda at: shutil.copy(second_shard(at), at / "model-00012-of-00012.safetensors"),
        r"lies in model-00002-of-00012\.safetensors and in model-00012-of-00012\.safetensors: fetch or copy it again",
    ),
    "shard of Git LFS": (
        lambda at: second_shard(at).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        r"model-00002-of-00012\.safetensors stands in for the weights \(Git LFS\): run git lfs pull",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_missing_or_broken_is_named(many: Path, fault: str) -> None:
    damage, said = BROKEN[fault]
    damage(many)
    with pytest.raises(InvalidInput, match=said) as raised:
        adapter.load(str(many))
    assert str(many) in str(raised.value)
    assert "hub" not in str(raised.value)


def test_gguf_is_no_weight_file(one: Path) -> None:
    (one / "model.safetensors").rename(one / "model-Q4_K_M.gguf")
    with pytest.raises(UnsupportedModel, match="has weights in GGUF only: give the path of their file"):
        adapter.load(str(one))


def test_a_file_that_may_not_be_read_is_not_called_broken(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "safe_open", refuse)
    with pytest.raises(InvalidInput, match=r"model\.safetensors cannot be read: .*Permission denied"):
        adapter.load(str(one))


def test_weights_that_hold_a_nan_are_called_damaged(one: Path) -> None:
    edit(one, lambda weights: weights["model.norm.weight"][3].fill_(torch.nan))
    said = "gives nan or infinity by its own forward: its weights are damaged, or too large for torch.float32"
    with pytest.raises(InvalidInput, match=f"^LlamaForCausalLM {said}$"):
        adapter.load(str(one))


@pytest.mark.parametrize("asked", ["is_dir", "is_file"])
def test_a_folder_that_may_not_be_entered_is_an_input_error(
    one: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, asked, refuse)
    with pytest.raises(InvalidInput, match=f"^{one}.* cannot be read: Permission denied$"):
        adapter.load(str(one))


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_cut_anywhere_is_refused(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = (saved / "one" / "model.safetensors").read_bytes()
    folder = tmp_path / "cut"
    shutil.copytree(saved / "one", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InvalidInput, match="is not whole"):
        checkpoint.examine(folder)


@given(st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_weights_that_are_missing_are_never_made_up(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    weights = load_file(saved / "one" / "model.safetensors")
    lost = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
    folder = tmp_path / "lost"
    shutil.copytree(saved / "one", folder, dirs_exist_ok=True)
    save_file(
        {key: weights[key] for key in weights.keys() - lost} or {"x": torch.ones(1)}, folder / "model.safetensors"
    )
    with pytest.raises(UnsupportedModel) as raised:
        adapter.load(str(folder))
    assert f"lacks {len(lost)} weights, {min(lost)} among them; they would be random" in str(raised.value)
