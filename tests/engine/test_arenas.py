"""A process with a limit keeps to few arenas of malloc, with any number of threads."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from radixkv.sizing import memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has arenas")
PROGRAM = """
import ctypes, sys, threading
from radixkv.sizing.memory import limit_arenas
print(limit_arenas(2) if sys.argv[1] == "limited" else None)
together = threading.Barrier(12)
def allocate():
    together.wait()
    kept = [bytearray(2000) for _ in range(200)]
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = libc.fdopen(1, b"w")
sys.stdout.flush()
libc.malloc_info(0, ctypes.c_void_p(stream))
libc.fflush(ctypes.c_void_p(stream))
"""


def heaps(*arguments: str, **environment: str) -> tuple[str, int]:
    """What the limit returned in a process of its own, and the arenas of that process at the end."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    shown = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    ).stdout
    return shown.split()[0], len(re.findall("<heap nr", shown))


def test_a_limit_holds_for_all_threads() -> None:
    assert heaps("limited") == ("True", 2)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [("free", {}, "None"), ("limited", {"MALLOC_ARENA_MAX": "5"}, "False")],
)
def test_without_it_there_are_more(arguments: str, environment: dict[str, str], said: str) -> None:
    returned, count = heaps(arguments, **environment)
    assert returned == said
    assert count > 2


def test_memory_is_trimmed_where_malloc_can(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    for library in (SimpleNamespace(malloc_trim=trimmed.append), object()):
        monkeypatch.setattr(memory.ctypes, "CDLL", lambda _, library=library: library)
        memory.trim()
    assert trimmed == [0]
