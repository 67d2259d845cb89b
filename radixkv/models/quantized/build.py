"""Compile the products for this machine, once, into a private folder of the user's cache.

A library is named by two hashes. The first is of its source, the compiler, the options and the features of the CPU: a
change of any of them makes another library. The second is of its content, because loading a damaged library may kill
the process. A library is loaded once before it is kept. It is written to a temporary folder and renamed, under a lock,
so several processes may need it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixkv import private_files

_FOLDER = Path(__file__).parent
SOURCES = (_FOLDER / "kernels.cpp", _FOLDER / "step.cpp")
_HEADERS = tuple(_FOLDER / name for name in ("kernels.h", "instructions.h", "products.h", "rows.h"))
_COMPILERS = ("c++", "g++", "clang++")
# Contraction would fuse a product and a sum where the source does not, and the bits would depend on the compiler.
_OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w")
_NEEDED = frozenset({"avx2", "fma", "f16c"})
_LONGEST_S = 300.0  # of a compilation, which takes five seconds on an idle core
_UNUSED_S = 30 * 86_400.0
_BEGUN = "build-"  # begins the names of temporary folders
_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).radixkv_instructions()"


class BuildError(Exception):
    """The products cannot be compiled here; the message has the reason."""


def library() -> Path:
    """Return a path to the compiled library, and compile it first if it is not in the cache: five seconds, once.

    The path names the descriptor whose content was checked. It stays open as long as the process lives, because the
    dynamic loader identifies libraries by their paths. A damaged library is removed and compiled again. Raises
    BuildError for another CPU or system, without a compiler, and if another user may change the cache folder.
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
    folder = private_folder()
    try:
        return Path(f"/proc/self/fd/{_compiled_once(compiler, folder, _key(compiler, features))}")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} cannot compile into {_path(folder)}: {error}") from error
    finally:
        os.close(folder)


def cpu_features() -> frozenset[str]:
    """Return the features of this CPU as Linux names them; none on other systems and other machines."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def private_folder() -> int:
    """Return a descriptor of the folder of compiled libraries, and create it if it is missing.

    A library in a folder that other users may write would run their code: then it raises BuildError.
    """
    try:
        return private_files.open_cache("kernels")
    except (OSError, RuntimeError) as error:  # the second: there is no home
        raise BuildError(
            f"the folder for compiled libraries cannot be used: {error} (XDG_CACHE_HOME sets another one)"
        ) from error


def _key(compiler: str, features: frozenset[str]) -> str:
    """Return the hash of everything on which the library depends."""
    real = os.path.realpath(compiler)
    version = os.stat(real)
    parts = [real, str(version.st_size), str(version.st_mtime_ns), *_OPTIONS, *sorted(features)]
    source = b"\0".join(file.read_bytes() for file in (*SOURCES, *_HEADERS))
    return hashlib.sha256(source + "\0".join(parts).encode()).hexdigest()[:32]


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _path(folder: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{folder}"))


def _cached(folder: int, key: str, *, remove: bool) -> int | None:
    """Return a descriptor of this key's library, None without one. Costs a hash of the library.

    With `remove`, remove damaged ones: the folder is locked.
    """
    for name in os.listdir(folder):
        if name.startswith(f"{key}-") and name.endswith(".so"):
            try:
                found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:  # another process has removed it
                continue
            with open(found, "rb", closefd=False) as file:
                if name == _name(key, file.read()):
                    os.utime(found)
                    return found
            os.close(found)
            if remove:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
    return None


def _compiled_once(compiler: str, folder: int, key: str) -> int:
    """Return a descriptor of this key's library; one process at a time compiles it, and the others wait.

    A process whose library is in the cache waits for no other one.
    """
    found = _cached(folder, key, remove=False)
    with suppress(OSError):  # a file system without locks: each process compiles
        if _locked(folder, _LONGEST_S if found is None else 0.0):
            _remove_leftovers(folder)
        elif found is None:
            raise BuildError(f"another process has been compiling into {_path(folder)} for {_LONGEST_S:g} s: end it")
    if found is None:
        found = _cached(folder, key, remove=True)
    if found is None:
        _compile(compiler, folder, key)
        found = _cached(folder, key, remove=True)
    if found is None:
        raise BuildError(f"the library that {compiler} made was changed or removed")
    return found


def _locked(folder: int, longest: float) -> bool:
    """Lock the folder; returns False if another process holds the lock for `longest` seconds. Raises OSError."""
    until = time.monotonic() + longest
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        else:
            return True


def _remove_leftovers(folder: int) -> None:
    """Remove the folders of killed builds, and libraries that were not loaded for a month. The folder is locked."""
    for entry in _path(folder).iterdir():
        if entry.name.startswith(_BEGUN):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.stat().st_mtime < time.time() - _UNUSED_S:
            entry.unlink(missing_ok=True)


def _compile(compiler: str, folder: int, key: str) -> None:
    """Add the library to the folder. Raises BuildError with the compiler's first error, or if it cannot be loaded."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it is closed
            print("radixkv compiles functions for this CPU, once: about five seconds", file=sys.stderr, flush=True)
    with _ending_in_order(), tempfile.TemporaryDirectory(dir=_path(folder), prefix=_BEGUN) as apart:
        made = Path(apart) / "made.so"
        _run([compiler, *_OPTIONS, "-o", str(made), *map(str, SOURCES)], apart)
        try:  # in another process, because a damaged library may kill the one that loads it
            _run([sys.executable, "-I", "-c", _TRIAL, str(made)], apart)
        except (BuildError, OSError) as error:
            raise BuildError(f"{compiler} made no library that can be loaded: {error}") from error
        made.chmod(0o600)
        os.rename(made, _name(key, made.read_bytes()), dst_dir_fd=folder)


def _run(command: list[str], folder: str) -> None:
    """Run a command in a folder, also for its temporary files; raises BuildError with its first error."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S, cwd=folder, check=False,
        env={**os.environ, "TMPDIR": folder},
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error" in line.lower()), f"exit status {done.returncode}")
        raise BuildError(f"{command[0]} failed: {first}")


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, so that files are removed, unless the process handles it itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
