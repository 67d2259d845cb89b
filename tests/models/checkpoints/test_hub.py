"""A model by its name on the hub, from a cache that the tests write: nothing is fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter
from tests.chat.worlds import byte_tokenizer
from tests.models.checkpoints.files import INDEX, read, rewrite, same, second_shard
from tests.models.conftest import FAMILIES, make

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model into the cache as some/model, on a machine that is now offline; return its folder."""
    place = tmp_path / "hub" / "models--some--model"
    shutil.copytree(saved / "many", place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return place / "snapshots" / COMMIT


def test_a_hub_name_loads_from_the_cache(hub: Path) -> None:
    model, tokenizer = read("some/model")
    assert same(model, make(FAMILIES["llama"]()))
    assert tokenizer is None
    byte_tokenizer().save_pretrained(hub)
    assert len(read("some/model")[1]) == 264


def test_a_tokenizer_is_found_by_its_hub_name(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    byte_tokenizer().save_pretrained(hub)
    loaded = adapter.load(make(FAMILIES["llama"]()), tokenizer="some/model")
    assert len(loaded.tokenizer) == 264
    assert "looking for it on the hub" not in caplog.text
    with pytest.raises(InvalidInput, match=r"the tokenizer 'other/model', of no local folder, cannot be read: "):
        adapter.load(make(FAMILIES["llama"]()), tokenizer="other/model")
    assert "tokenizer other/model: there is no folder of that name: looking for it on the hub" in caplog.text


def test_the_files_of_a_hub_model_are_looked_at_before_they_are_read(hub: Path) -> None:
    weights = json.loads((hub / INDEX).read_text())["weight_map"]
    (hub / INDEX).write_text(json.dumps({"weight_map": {**weights, "lm_head.weight": "evil.bin"}}))
    with pytest.raises(UnsupportedModel, match=r"names 'evil\.bin' for weights"):
        read("some/model")
    (hub / INDEX).write_text(json.dumps({"weight_map": {"x": "../../../x.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"^\S+ names .* for weights, which is not in"):
        read("some/model")
    (hub / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"^\S+config\.json cannot be read"):
        read("some/model")


def test_what_the_cache_lacks_of_a_hub_model_is_an_input_error(hub: Path) -> None:
    for file in (second_shard(hub), hub / INDEX, hub / "config.json"):
        file.unlink()
        with pytest.raises(InvalidInput, match=r"'some/model'|lacks|has no weights"):
            read("some/model")
    with pytest.raises(InvalidInput, match="cannot find model 'other/model': no local folder of that name, and"):
        read("other/model")


def test_the_owner_of_a_mistyped_name_is_printed_first(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    read("some/model")
    assert not caplog.records
    with pytest.raises(InvalidInput) as raised:
        read("tinny")
    assert str(raised.value).endswith("; the bundled model is 'tiny'")
    assert "\n" not in str(raised.value)
    [said] = [each.getMessage() for each in caplog.records]
    assert said == "tinny: there is no folder of that name: looking for it on the hub; the bundled model is 'tiny'"


def test_a_revision_is_a_commit_or_a_name_of_one(hub: Path) -> None:
    (hub.parent.parent / "refs" / "v2").write_text(OTHER)
    shutil.copytree(hub, hub.with_name(OTHER))
    rewrite(hub.with_name(OTHER) / "config.json", num_hidden_layers=1)
    for revision, layers in ((None, 2), ("main", 2), (COMMIT, 2)):
        assert len(read("some/model", revision=revision)[0].model.layers) == layers
    for revision in ("v2", OTHER):
        with pytest.raises(UnsupportedModel, match=r"no place for model\.layers\.1"):  # the configuration is another
            read("some/model", revision=revision)
    with pytest.raises(InvalidInput, match="cannot find model 'some/model'"):
        read("some/model", revision="v3")


def test_all_that_is_looked_at_is_fetched_first_and_of_one_commit(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def note(name: str, file: str, **options: Any) -> str | None:
        asked.append((file, options["revision"]))
        return str(hub / file) if (hub / file).exists() else None

    monkeypatch.setattr("transformers.utils.cached_file", note)
    read("some/model", revision="main")
    (first, revision), *others = asked
    assert (first, revision) == ("config.json", "main")
    assert {revision for _, revision in others} == {COMMIT}
    small = {"generation_config.json", "adapter_config.json", "model.safetensors", INDEX}
    assert {file for file, _ in others} == small | {each.name for each in hub.glob("*.safetensors")}
