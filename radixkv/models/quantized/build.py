"""Compile the products for this machine, once, into a private folder of the user's cache.

A library is named by two hashes. The first is of its source, the compiler, the options and the features of the CPU: a
change of any of them makes another library. The second is of its content, because loading a damaged library may kill
the process. A library is written to a temporary file and renamed, so several processes may compile at once.
"""

from __future__ import annotations

import hashlib
import logging
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
_HEADERS = tuple(_FOLDER / name for name in ("kernels.h", "instructions.h", "products.h", "rows.h"))
_COMPILERS = ("c++", "g++", "clang++")
# Contraction would fuse a product and a sum where the source does not, and the bits would depend on the compiler.
_OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")
_NEEDED = frozenset({"avx2", "fma", "f16c"})
_LONGEST_S = 300.0  # of a compilation, which takes five seconds on an idle core
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The products cannot be compiled here; the message has the reason."""


def library() -> Path:
    """Return the compiled library, and compile it first if it is not in the cache: five seconds, once.

    A damaged library is removed and compiled again. Raises BuildError for another CPU or system, without a compiler,
    and if the cache folder belongs to another user.
    """
    features = cpu_features()
    if not features >= _NEEDED:
        lacking = f"lacks {', '.join(sorted(_NEEDED - features))}" if features else "is another machine or system"
        raise BuildError(
            f"compiled products need Linux on an x86-64 CPU with {', '.join(sorted(_NEEDED))}, and this one "
            f"({platform.system()} on {platform.machine()}) {lacking}"
        )
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler: install one of {', '.join(_COMPILERS)}")
    folder, key = private_folder(), _key(compiler, features)
    try:
        return _cached(folder, key) or _compile(compiler, folder, key)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} cannot compile into {folder}: {error}") from error


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


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _cached(folder: Path, key: str) -> Path | None:
    """Return the library of this key, None without one; remove damaged ones. Costs a hash of the library."""
    for path in folder.glob(f"{key}-*.so"):
        if path.name == _name(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _compile(compiler: str, folder: Path, key: str) -> Path:
    """Compile the source into `folder`. Raises BuildError with the compiler's first error."""
    _log.info("compiling the products for this machine, once: about five seconds")
    with tempfile.TemporaryDirectory(dir=folder) as apart:
        made = Path(apart) / "made.so"
        command = [compiler, *_OPTIONS, "-o", str(made), *map(str, SOURCES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, cwd=apart, check=False)
        if done.returncode:
            lines = (done.stderr or done.stdout).splitlines()
            first = next((line for line in lines if "error" in line), f"exit status {done.returncode}")
            raise BuildError(f"{compiler} failed: {first}")
        return made.replace(folder / _name(key, made.read_bytes()))
