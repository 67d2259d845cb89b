"""Which local files a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv import model_path
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_shapes import kv_shape
from tests.gguf.raw_file import file_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(file_of())
    return folder


def test_folders_files_and_names_of_the_hub_are_told_apart(place: Path) -> None:
    put(place / "one", "a.gguf")
    put(place / "empty")
    put(place, "b.GGUF", "sha256-1234")
    assert model_path.find("one") == Path("one/a.gguf")
    assert model_path.find(str(place / "one" / "a.gguf")) == place / "one" / "a.gguf"
    assert model_path.find("empty") == Path("empty")
    assert model_path.find("b.GGUF") == Path("b.GGUF")
    assert model_path.find("sha256-1234") == Path("sha256-1234")  # by its first bytes
    assert model_path.find("tiny") == model_path.BUNDLED["tiny"]
    assert model_path.find("some/model") is None
    assert model_path.find("some/model-GGUF") is None


def test_a_configuration_comes_before_a_gguf_file(place: Path) -> None:
    put(place / "both", "a.gguf", "b.gguf")
    (place / "both" / "config.json").write_text("{}")
    assert model_path.find("both") == Path("both")


def test_a_folder_with_several_models_lists_them(place: Path) -> None:
    put(place / "many", "x-Q4_1.gguf", "x-Q8_0.gguf", "mmproj-x.gguf")
    with pytest.raises(InvalidInput, match=r"many holds 2 GGUF models: give the path of one of x-Q4_1.gguf, x-Q8_0.g"):
        model_path.find("many")
    put(place / "split", "y-00001-of-00002.gguf", "y-00002-of-00002.gguf")
    assert model_path.find("split") == Path("split/y-00001-of-00002.gguf")


def test_a_missing_file_lists_its_neighbours(place: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^there is no file typo\.gguf$"):
        model_path.find("typo.gguf")
    with pytest.raises(InvalidInput, match=r"^there is no file gone/typo\.gguf$"):
        model_path.find("gone/typo.gguf")
    put(place / "here", *(f"{letter}.gguf" for letter in "abcdefg"))
    with pytest.raises(InvalidInput, match=r"no file here/x\.gguf; its folder has a\.gguf, .*, e\.gguf and 2 more$"):
        model_path.find("here/x.gguf")
    (place / "link.gguf").symlink_to("gone.gguf")
    with pytest.raises(InvalidInput, match=r"link\.gguf is a link to nothing"):
        model_path.find("link.gguf")


@pytest.mark.parametrize(("name", "text"), [("weights.bin", "x"), ("empty", ""), ("config.json", "{}")])
def test_another_file_is_no_model(place: Path, name: str, text: str) -> None:
    (place / name).write_text(text)
    with pytest.raises(InvalidInput, match=r"is a file; give the folder that holds config\.json and the .*, or a GGUF"):
        model_path.find(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("~no-such-user/model.gguf", "there is no user 'no-such-user'"),
        ("~no-such-user", "there is no user 'no-such-user'"),
        ("./" + "a" * 300 + ".gguf", "File name too long"),
        ("b" * 300, "File name too long"),
    ],
)
def test_names_that_no_file_can_have_are_refused(name: str, reason: str, place: Path) -> None:
    for use in (model_path.find, kv_shape):
        with pytest.raises(InvalidInput, match=reason):
            use(name)
