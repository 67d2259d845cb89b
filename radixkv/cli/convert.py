"""`radixkv convert`: write a GGUF model as a folder of safetensors, which loads without dequantisation.

The folder is written next to its final place and renamed at the end. So it is there as a whole or not at all, also
after Ctrl-C, SIGTERM or on a full disk.
"""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixkv import model_path
from radixkv.cli import model_check
from radixkv.cli.entry_point import STOP_SIGNALS, handled
from radixkv.errors import InvalidInput
from radixkv.gguf import header as gguf
from radixkv.sizing.kv_size import size_text

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SMALL_FILES = 32 << 20  # bytes, ample for a tokenizer and its settings


class StoppedError(Exception):
    """A signal has ended the conversion."""

    def __init__(self, number: int) -> None:
        """Record the signal's number."""
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def run(arguments: argparse.Namespace) -> int:
    """Convert the model; return 0, or 128 plus the number of the signal that stopped the writing.

    Raises InvalidInput or UnsupportedModel for a file that does not load, and InvalidInput for a folder that holds
    files or a disk without room, both before any weight is read; OSError.
    """
    started = time.monotonic()
    folder = _free_folder(arguments.folder)
    header = model_check.check(str(_gguf(arguments.file)))
    assert header is not None, "the file was found to be GGUF"
    _check_space(folder.parent, header.bytes_in(DTYPES[arguments.dtype]))
    model, tokenizer = _load(header.path, arguments.dtype, arguments.tokenizer)  # nothing is on the disk until now
    try:
        with _deferred_signals() as check, _whole(folder) as partial:
            written = _write(model, tokenizer, partial, check)
            check()
    except StoppedError as stopped:
        print(f"radixkv: stopped by {stopped}; nothing is left on the disk", file=sys.stderr)
        return stopped.status
    seconds = time.monotonic() - started
    chat = shlex.join(["radixkv", "chat", arguments.folder])
    print(f"{arguments.folder}: {size_text(written)} as {arguments.dtype}, in {seconds:.1f} s. To use it: {chat}")
    return 0


# ---- checks before any weight is read


def _gguf(name: str) -> Path:
    """Return the GGUF file that `name` is, or the only one in that folder. Raises InvalidInput."""
    path = model_path.local(name)
    if path.is_dir():
        found = gguf.find(path)
        if found is None:
            raise InvalidInput(f"{name} holds no GGUF file, and convert reads no other format")
        return found
    found = model_path.find(name)
    if found is None or found.is_dir():
        raise InvalidInput(f"there is no file {name}, and convert reads GGUF files only")
    return found


def _free_folder(name: str) -> Path:
    """Return the absolute path of a folder that is missing or empty. Raises InvalidInput for any other place."""
    folder = Path(os.path.realpath(model_path.local(name)))
    if os.path.ismount(folder):  # it cannot be replaced by the finished folder
        raise InvalidInput(f"{name} is a mount point: give a new folder in it")
    if folder.is_symlink():
        raise InvalidInput(f"{name} is a link to itself: give a new folder")
    if folder.is_dir():
        if any(folder.iterdir()):
            raise InvalidInput(f"{name} is not empty, and convert overwrites nothing: give a new folder")
        if folder == Path.cwd():
            raise InvalidInput(f"{name} is the present folder: give the name of a new one")
    elif folder.exists():
        raise InvalidInput(f"{name} is a file: give a new folder")
    elif not folder.parent.is_dir():
        raise InvalidInput(f"{name} cannot be made: there is no folder {folder.parent}")
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InvalidInput(f"{name} cannot be made: {folder.parent} is not writable")
    return folder


def _check_space(place: Path, weights: int) -> None:
    """Refuse a disk that has no room for the folder."""
    needed, free = weights + _SMALL_FILES, shutil.disk_usage(place).free
    if needed > free:
        raise InvalidInput(f"the converted model takes {size_text(needed)}, and {size_text(free)} are free in {place}")


# ---- the conversion


def _load(path: Path, dtype: str, tokenizer: str | None) -> tuple[Any, Any]:
    """Return the model and tokenizer as an engine reads them, before it changes their attention and layers."""
    import torch  # takes seconds; wrong arguments are refused before

    from radixkv.models import architecture, loader
    from radixkv.models.file_tokenizer import of_transformers

    given = None if tokenizer is None else loader.given_tokenizer(tokenizer, trust_remote_code=False)
    model, own = loader.read(
        str(path),
        tokenizer=given,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        revision=None,
        trust_remote_code=False,
    )
    architecture.check_supported(model)
    return model, of_transformers(own)


def _write(model: Any, tokenizer: Any | None, folder: Path, check: Callable[[], None]) -> int:
    """Write the model to the folder, and call `check` between two pieces; return the bytes of its weights."""
    from radixkv.models import checkpoint_writer
    from radixkv.models.gguf_weights import byte_bar

    total = checkpoint_writer.bytes_of(model)
    with byte_bar("writing", total) as advance:

        def progress(count: int) -> None:
            check()
            advance(count)

        checkpoint_writer.write_model(folder, model, tokenizer, progress=progress)
    return total


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` at the end, or removed after any error."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    except OSError as error:
        if error.errno in _FULL:
            raise OSError(f"{folder.parent} is full: {error.strerror}; nothing is left of {folder.name}") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _deferred_signals() -> Iterator[Callable[[], None]]:
    """Defer SIGINT, SIGTERM and SIGHUP; yield a function that raises StoppedError after one of them.

    An exception that a handler raises can arise anywhere, also where a library drops it or while files are removed.
    """
    arrived: list[int] = []

    def check() -> None:
        if arrived:
            raise StoppedError(arrived[0])

    with handled((signal.SIGINT, *STOP_SIGNALS), arrived.append, once=False):
        yield check
