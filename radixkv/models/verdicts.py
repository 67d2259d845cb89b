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
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

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
from radixkv.models.rounded_kv import format_test
from radixkv.models.selftest import brief_test, self_test
from radixkv.version import __version__

_log = logging.getLogger(__name__)
_FOLDER = "verdicts"
_UNUSED_S = 90 * 86_400.0


def tested(loaded: LoadedModel) -> float:
    """Return the relative error of a model's self-test, from its record if there is one; records a new result.

    Runs the whole test for models that are not of layers of our own with `sources`. Raises as `self_test` does. A pool
    in another format is tested in addition, at each load, and the larger error counts.
    """
    if loaded.kv_dtype != "auto":
        return max(tested(replace(loaded, kv_dtype="auto")), format_test(loaded))
    record = _record(loaded)
    if record is None:
        return self_test(loaded)
    if (recorded := _read(record)) is not None:
        try:
            return max(recorded, brief_test(loaded))
        except (InvalidInput, UnsupportedModel) as reason:
            _log.debug("%s: the whole test runs, as a short one failed: %s", loaded.name, reason)
    error = self_test(loaded)
    _write(record, error)
    return error


def _record(loaded: LoadedModel) -> Path | None:
    """Return the file of a model's record; None for a model that has none, and without a folder to trust."""
    model = loaded.model
    if not isinstance(model, NativeModel) or not model.sources:
        return None
    try:
        os.close(private_files.open_cache(_FOLDER))  # no other user may write there
        files = identity_of(model.sources)
    except (OSError, RuntimeError) as error:  # the second: there is no home
        _log.debug("%s: the result of its self-test is not recorded: %s", loaded.name, error)
        return None
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
        module_kinds(model),
    )
    return private_files.cache_path(_FOLDER) / hashlib.sha256(repr(parts).encode()).hexdigest()


def module_kinds(model: nn.Module) -> list[tuple[str, str, object]]:
    """Return name, class and weight format of each module, which decide the rounding of a forward."""
    return [(name, type(part).__name__, _format(part)) for name, part in model.named_modules()]


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


def _read(record: Path) -> float | None:
    """Return the recorded error; None without a record, and for a damaged one."""
    try:
        with open(record, "rb", opener=private_files.no_link) as file:
            named, error = json.loads(file.read(1000))
            os.utime(file.fileno())
        if named != record.name or not 0.0 <= error < 1.0:
            raise ValueError(f"{named!r} {error!r}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as reason:
        _log.debug("the record %s of a self-test cannot be used: %s", record, reason)
        return None
    return float(error)


def _write(record: Path, error: float) -> None:
    """Record a result, and remove the records that were not used for 90 days."""
    try:
        private_files.write(record, json.dumps([record.name, error]).encode())
    except OSError as reason:
        _log.debug("the result %s of a self-test is not recorded: %s", record, reason)
        return
    for each in record.parent.iterdir():
        with suppress(OSError):  # another process has removed it
            if each.lstat().st_mtime < time.time() - _UNUSED_S:
                each.unlink()
