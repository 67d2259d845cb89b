"""A converted folder gives the logits of its GGUF file bit for bit; refusals and interruptions leave nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import Engine, SamplingParams
from radixkv.cli import convert, main
from radixkv.models import checkpoint_writer, loader
from tests.chat.worlds import byte_tokenizer
from tests.cli.gguf_chat_model import write_chat_model
from tests.models.checkpoints.files import same
from tests.models.gguf_files import CONFIGS, made, write

IDS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return write_chat_model(tmp_path / "in" / "small-Q8_0.gguf")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder for the results."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def read(path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {"device": torch.device("cpu"), "revision": None, "trust_remote_code": False}
    return loader.read(str(path), dtype=dtype, **options, **more)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


# ---- the result


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_architecture_has_the_same_weights_and_logits(family: str, out: Path) -> None:
    path = write(made(CONFIGS[family]()), out / "model.gguf", "Q8_0")
    assert main(["convert", str(path), str(out / "folder")]) == 0
    for code in ("auto", "transformers"):
        (ours, _), (again, _) = read(path, model_code=code), read(out / "folder", model_code=code)
        assert type(again) is type(ours) and same(again, ours)
        assert torch.equal(logits(again), logits(ours))
        assert [(name, each.tolist()) for name, each in again.named_buffers()] == [
            (name, each.tolist()) for name, each in ours.named_buffers()
        ]


def test_a_chat_with_the_folder_is_the_chat_with_the_file(
    file: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = out / "a folder"
    assert main(["convert", str(file), str(folder)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{folder}: ")
    assert said.out.endswith(f" s. To use it: radixkv chat '{folder}'\n")
    assert [each.name for each in out.iterdir()] == ["a folder"]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~_umask()
    replies, engines = [], [Engine.load(each, num_blocks=40, monitor=False) for each in (file, folder)]
    for engine in engines:
        with engine:
            chat = engine.chat("Be brief.")
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
            replies.append([chat.send("hello", params).text, chat.send("you", params).text])
    one, other = (engine.model for engine in engines)
    assert replies[0] == replies[1]
    assert one.stop_token_ids == other.stop_token_ids == set(byte_tokenizer().convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    ))  # fmt: skip
    assert (one.tokenizer.chat_template, one.max_length) == (other.tokenizer.chat_template, other.max_length)
    text = "<|im_start|>user\nhello, yoü<|im_end|>"
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text) == byte_tokenizer().encode(text)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- refusals


REFUSED: dict[str, tuple[Callable[[Path, Path], list[object]], str]] = {
    "no file": (lambda at, file: [at / "gone.gguf", at / "new"], "there is no file {at}/gone.gguf"),
    "a hub name": (lambda at, file: ["some/model", at / "new"], "there is no file some/model, and convert reads GGUF"),
    "a folder with two": (lambda at, file: [at / "two", at / "new"], "holds 2 GGUF models: give the path of one of"),
    "full": (lambda at, file: [file, at / "full"], "{at}/full is not empty, and convert overwrites nothing"),
    "a mount point": (lambda at, file: [file, "/proc"], "/proc is a mount point: give a new folder in it"),
    "a link to itself": (lambda at, file: [file, at / "loop"], "{at}/loop is a link to itself: give a new folder"),
    "an unknown home": (lambda at, file: [file, "~no-such-user/new"], "there is no user 'no-such-user'"),
    "cut": (lambda at, file: [at / "cut.gguf", at / "new"], "cut.gguf"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(
    fault: str, file: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("full", "two"):
        (out / folder).mkdir()
    (out / "full" / "mine.txt").write_text("mine")
    (out / "cut.gguf").write_bytes(file.read_bytes()[:300])
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, out / "two" / name)
    (out / "loop").symlink_to("loop")
    monkeypatch.setattr(loader, "read", lambda *_, **__: pytest.fail("the model was read"))
    before = _tree(out)
    arguments, said = REFUSED[fault]
    assert main(["convert", *map(str, arguments(out, file))]) == 2
    error = capsys.readouterr().err
    assert said.format(at=out) in error
    assert error.startswith("radixkv: ") and error.count("\n") == 1
    assert _tree(out) == before


def test_a_disk_without_room_is_refused_first(
    file: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 40 << 20))
    assert main(["convert", str(file), str(out / "new")]) == 0  # 40 MiB are enough for it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 5 << 20))
    monkeypatch.setattr(loader, "read", lambda *_, **__: pytest.fail("the model was read"))
    assert main(["convert", str(file), str(out / "newer")]) == 2
    assert f"and 5 MiB are free in {out}" in capsys.readouterr().err
    assert [each.name for each in out.iterdir()] == ["new"]


# ---- the end of a conversion that fails


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {str(each): each.read_bytes() if each.is_file() else None for each in sorted(folder.rglob("*"))}


def _failing(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], object]) -> None:
    """Let the writing of weights fail after its first bytes."""
    whole = checkpoint_writer.write_model

    def write_model(*arguments: Any, progress: Callable[[int], object]) -> None:
        whole(*arguments, progress=lambda _: fail())

    monkeypatch.setattr(checkpoint_writer, "write_model", write_model)


def test_a_disk_that_fills_up_leaves_nothing(
    file: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        assert any(out.iterdir())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _failing(monkeypatch, fail)
    assert main(["convert", str(file), str(out / "new")]) == 1
    error = capsys.readouterr().err
    assert error == f"radixkv: {out} is full: No space left on device; nothing is left of new\n"
    assert not any(out.iterdir())


def _interrupt_at_each_piece(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    whole = checkpoint_writer.write_model

    def write_model(*arguments: Any, progress: Callable[[int], object]) -> None:
        def interrupted(count: int) -> None:
            signal.raise_signal(number)
            progress(count)

        whole(*arguments, progress=interrupted)

    monkeypatch.setattr(checkpoint_writer, "write_model", write_model)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_even_if_it_comes_twice(
    number: signal.Signals, file: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    remove = shutil.rmtree

    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(number)
        remove(*arguments, **options)

    _interrupt_at_each_piece(monkeypatch, number)
    monkeypatch.setattr(convert.shutil, "rmtree", interrupted)
    assert main(["convert", str(file), str(out / "new")]) == 128 + number
    assert capsys.readouterr().err == f"radixkv: stopped by {number.name}; nothing is left on the disk\n"
    assert not any(out.iterdir())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_folder_that_fills_meanwhile_is_not_overwritten(
    file: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle() -> None:
        (out / "new").mkdir(exist_ok=True)
        (out / "new" / "mine.txt").write_text("mine")

    _failing(monkeypatch, meddle)
    assert main(["convert", str(file), str(out / "new")]) == 1
    assert _tree(out) == {str(out / "new"): None, str(out / "new" / "mine.txt"): b"mine"}
