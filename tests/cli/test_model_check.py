"""Files that no model can be loaded from are refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.cli import main
from radixkv.cli.model_check import check
from radixkv.errors import InvalidInput, UnsupportedModel
from tests.gguf.raw_file import file_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(file_of())


def test_a_header_is_read_up_to_the_weights(place: Path) -> None:
    (place / "cut.gguf").write_bytes(file_of()[:40])
    with pytest.raises(InvalidInput, match=r"cut\.gguf"):
        check("cut.gguf")
    (place / "other.gguf").write_bytes(file_of().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lambo"))
    with pytest.raises(UnsupportedModel, match="lambo"):
        check("other.gguf")


def test_the_bundled_model_and_names_of_the_hub_pass() -> None:
    assert check("tiny") is None
    assert check("some/model") is None


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "modle.gguf": (lambda at: put(at, "model.gguf"), "there is no file modle.gguf; its folder has model.gguf"),
    "./folder": (lambda at: None, "there is no model folder ./folder"),
    "empty": (lambda at: put(at / "empty"), "empty is no model folder: it has no config.json"),
    "two": (lambda at: put(at / "two", "a.gguf", "b.gguf"), "two holds 2 GGUF models: give the path of one of a.gguf"),
    "half": (
        lambda at: (put(at / "half", "a.gguf"), (at / "half" / "config.json").write_text('{"model_type": "llama"}')),
        "half has weights in GGUF only: give the path of their file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_command_refuses_a_path_in_one_line(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = REFUSED[name]
    make(place)
    if (command, name) == ("serve", "two"):  # it would serve both, but their headers lack a key
        said = "two/a.gguf: its metadata has no llama.embedding_length"
    assert main([command, name]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"radixkv: {said}") and error.count("\n") == 1


def test_a_path_is_refused_before_torch_is_imported(place: Path) -> None:
    code = "import sys\nfrom radixkv.cli import main\nassert main(['serve', './folder']) == 2\n"
    code += "assert not {'torch', 'transformers', 'rich'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
