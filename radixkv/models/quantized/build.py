"""Compile the products for this machine, once, into a private folder of the user's cache.

A library is named by a hash of its source, the compiler, the options and the features of the CPU: a change of any of
them makes another library. It is written to a temporary file and renamed: processes that compile at the same time
write the same library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCES = (_FOLDER / "kernels.cpp", _FOLDER / "step.cpp")
_HEADERS = (_FOLDER / "kernels.h", _FOLDER / "instructions.h")
_COMPILERS = ("c++", "g++", "clang++")
# Contraction would fuse a product and a sum where the source does not, and the bits would depend on the compiler.
_OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")
_NEEDED = frozenset({"avx2", "fma", "f16c"})
_LONGEST_S = 120.0  # of a compilation, which takes five seconds on an idle core


class BuildError(Exception):
    """The products cannot be compiled here; the message has the reason."""


def library() -> Path:
    """Return the compiled library, and compile it first if it is not in the cache: five seconds, once.

    Raises BuildError for another CPU, without a compiler, and if the cache folder belongs to another user.
    """
    features = cpu_features()
    if not features >= _NEEDED:
        raise BuildError(
            f"they need an x86-64 CPU with {', '.join(sorted(_NEEDED))}, and this one has no such features"
        )
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler: install one of {', '.join(_COMPILERS)}")
    path = private_folder() / f"{_key(compiler, features)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def cpu_features() -> frozenset[str]:
    """Return the features of this CPU as Linux names them; none on other systems and other machines."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def private_folder() -> Path:
    """Return the folder of compiled libraries, and create it if it is missing. Raises BuildError if it is not private.

    A library in a folder that other users may write would run their code.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixkv" / "kernels"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not stat: another user may have placed a link
    except (OSError, RuntimeError) as error:  # the second: there is no home
        raise BuildError(f"the folder for compiled libraries cannot be used: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise BuildError(f"{folder} is no folder: remove it")
    if found.st_uid != os.geteuid():
        raise BuildError(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & 0o077:
        raise BuildError(f"other users may read or write {folder}: chmod 700 it")
    return folder


def _key(compiler: str, features: frozenset[str]) -> str:
    """Return the hash of everything on which the library depends."""
    real = os.path.realpath(compiler)
    version = os.stat(real)
    parts = [real, str(version.st_size), str(version.st_mtime_ns), *_OPTIONS, *sorted(features)]
    source = b"\0".join(file.read_bytes() for file in (*SOURCES, *_HEADERS))
    return hashlib.sha256(source + "\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: str, path: Path) -> None:
    """Compile the source to `path`. Raises BuildError with the compiler's first error."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_OPTIONS, "-o", str(made), *map(str, SOURCES)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, cwd=folder, check=False)
            if done.returncode:
                lines = (done.stderr or done.stdout).splitlines()
                first = next((line for line in lines if "error" in line), f"exit status {done.returncode}")
                raise BuildError(f"{compiler} failed: {first}")
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} cannot compile into {path.parent}: {error}") from error
