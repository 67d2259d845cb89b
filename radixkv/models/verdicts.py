"""Test a model of files once: the result of its self-test is recorded in the user's cache folder.

A record is named by a hash of everything on which the result depends: the files, the code of radixkv, the versions of
libraries, the features of the CPU, the settings, and the modules of the model. A change of any of them runs the whole
test. With a record, a chunk and a decode are tested at each load. Failures are never recorded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch

import radixkv_kernels
from radixkv import private_files
from radixkv.device import device_of
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.identity import identity_of
from radixkv.models.loaded import LoadedModel
from radixkv.models.native.layers import NativeModel
from radixkv.models.quantized.build import cpu_features
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import quantized_weights
from radixkv.models.selftest import brief_test, self_test
from radixkv.version import __version__

_log = logging.getLogger(__name__)
_FOLDER = "verdicts"
_UNUSED_S = 90 * 86_400.0


def tested(loaded: LoadedModel) -> float:
    """Return the relative error of a model's self-test, from its record if there is one; records a new result.

    Runs the whole test for models that are not of layers of our own with `sources`. Raises as `self_test` does.
    """
    key = _key(loaded)
    if key is None:
        return self_test(loaded)
    if (recorded := _attempt(_read, key)) is not None:
        try:
            return max(recorded, brief_test(loaded))
        except (InvalidInput, UnsupportedModel) as reason:
            _log.debug("%s: the whole test runs, as a short one failed: %s", loaded.name, reason)
    error = self_test(loaded)
    _attempt(lambda folder, name: _write(folder, name, error), key)
    return error


# ---- the key


def _key(loaded: LoadedModel) -> str | None:
    """Return the name of a model's record; None for a model that has none."""
    model = loaded.model
    if not isinstance(model, NativeModel) or not model.sources:
        return None
    try:
        files = identity_of(model.sources)
    except OSError as error:
        _log.debug("%s: its files cannot be identified: %s", loaded.name, error)
        return None
    modules = [(name, type(part).__name__, _format(part)) for name, part in model.named_modules()]
    settings = loaded.attention, loaded.layers, loaded.dtype, loaded.device, loaded.max_length, loaded.vocab_size
    library = kernels() if quantized_weights(model) else None
    place = device_of(loaded.device)
    parts = (
        files,
        _machine(),
        None if library is None else library.file,
        place.properties() if place.is_gpu else None,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        model.switches,
        type(model.operators).__name__,
        settings,
        modules,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _format(part: object) -> object:
    """Return the format of a layer's quantised weights; None for other modules."""
    return getattr(getattr(part, "quantized", None), "format", None)


@cache
def _machine() -> tuple[object, ...]:
    """Return the versions, the code and the CPU, all of which a result depends on."""
    here = Path(__file__).parent
    folders = here, here.parent / "attention", Path(radixkv_kernels.__file__).parent
    code = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".cpp", ".h")]
    stats = [(str(file), found.st_size, found.st_mtime_ns) for file in code if (found := file.stat())]
    versions = __version__, torch.__version__, np.__version__, platform.python_version()
    return *versions, torch.backends.cpu.get_cpu_capability(), sorted(cpu_features()), stats


# ---- records


def _attempt(act: Callable[[int, str], float | None], key: str) -> float | None:
    """Call `act` with the folder of records and a name in it; None if that fails, with a line in the log."""
    try:
        folder = private_files.open_cache(_FOLDER)
    except (OSError, RuntimeError) as error:  # the second: there is no home
        _log.debug("results of self-tests are not recorded: %s", error)
        return None
    try:
        return act(folder, key)
    except (OSError, ValueError, TypeError) as error:
        _log.debug("the record %s of a self-test cannot be used: %s", key, error)
        return None
    finally:
        os.close(folder)


def _read(folder: int, key: str) -> float | None:
    """Return the recorded error; None without a record. Raises ValueError for a damaged one."""
    try:
        found = os.open(key, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(found, "rb") as file:
        named, error = json.loads(file.read(1000))
        os.utime(found)
    if named != key or not 0.0 <= error < 1.0:
        raise ValueError(f"{named!r} {error!r}")
    return float(error)


def _write(folder: int, key: str, error: float) -> None:
    """Record a result in one step, and remove the records that were not used for 90 days."""
    fresh = f"{secrets.token_hex(8)}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), "wb") as file:
        try:
            file.write(json.dumps([key, error]).encode())
            file.flush()
            os.rename(fresh, key, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(fresh, dir_fd=folder)
            raise
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # another process has removed it
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - _UNUSED_S:
                os.unlink(name, dir_fd=folder)
