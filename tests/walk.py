"""Walk along one request: the functions of the product that it calls, in the order of their first calls.

    python -m tests.walk            print them, and the three counts

A profiler records the second `generate` of one token with the same prompt, which is cached then. A reader who follows
the request opens each function once, so later calls do not count. The functions of the caller's thread come first,
then the functions of the engine's: how two threads take turns is no fact of the code. For the same reason the engine's
thread is held until the caller waits, and the record ends when the engine reads its inbox again.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: on a GPU, another backend runs

import radixkv
import radixkv_kernels
from radixkv import Engine, SamplingParams

PACKAGES = tuple(str(Path(each.__path__[0])) + os.sep for each in (radixkv, radixkv_kernels))
PROMPT = "Hello there, my name is Nora and I live in Oslo. What is my name? " * 3


class Function(NamedTuple):
    """A function of the product, by its file and its qualified name."""

    file: str
    name: str


class Walk:
    """The functions of a request, by thread, in the order of their first calls."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[Function, None]] = {}
        self._threads: set[int] = set()  # whose calls are recorded now

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take an event of the interpreter's profiler."""
        code, thread = frame.f_code, threading.get_ident()
        if event != "call" or thread not in self._threads or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(PACKAGES):
            self._calls.setdefault(thread, {})[Function(code.co_filename, code.co_qualname)] = None

    def begin(self) -> None:
        """Record the calls of this thread from now on."""
        self._threads.add(threading.get_ident())

    def end(self) -> None:
        """Record no more calls of this thread."""
        self._threads.discard(threading.get_ident())

    def functions(self) -> list[Function]:
        """Return all functions; a thread that called `begin` earlier comes first."""
        return list(dict.fromkeys(each for functions in self._calls.values() for each in functions))

    def counts(self) -> dict[str, int]:
        """Count the functions, their files, and the returns: steps to a file that was left before."""
        files = [each.file for each in self.functions()]
        left: set[str] = set()
        returns = 0
        for before, after in pairwise(files):
            if before != after:
                left.add(before)
                returns += after in left
        return {"functions": len(files), "files": len(set(files)), "returns": returns}


def walk() -> Walk:
    """Generate a token, and return the functions that this called."""
    found = Walk()
    threading.setprofile(found.profile)
    with Engine.load("tiny", monitor=False, num_blocks=256) as engine:
        params = SamplingParams(temperature=0, max_tokens=1)
        engine.generate([PROMPT], params)
        gc.disable()  # a finalizer is a function, too
        caller, ended = threading.get_ident(), threading.Event()
        engine.client.thread.post(lambda: _hold(caller, found))
        sys.setprofile(found.profile)
        found.begin()
        engine.generate([PROMPT], params)
        found.end()
        sys.setprofile(None)
        engine.client.thread.post(lambda: (found.end(), ended.set()))
        assert ended.wait(60)
    threading.setprofile(None)
    return found


def _hold(caller: int, found: Walk) -> None:
    """Wait on the engine's thread until the caller waits for its request, and record this thread from then on."""
    deadline = time.monotonic() + 60
    while sys._current_frames()[caller].f_code is not threading.Condition.wait.__code__:
        assert time.monotonic() < deadline, "the caller does not wait for its request"
        time.sleep(0.001)
    found.begin()


if __name__ == "__main__":
    walked = walk()
    for each in walked.functions():
        print(f"{each.file.removeprefix(os.path.commonpath(PACKAGES))[1:]}: {each.name}", file=sys.stderr)
    print(json.dumps(walked.counts()))
