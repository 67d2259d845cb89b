"""Try each architecture in a process of its own, several at once: one that hangs, grows or dies stops no other."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from model_parts.verdict import Verdict


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of one architecture: seconds, and bytes of address space (only Linux enforces these)."""

    seconds: float = 120.0
    memory: int = 8 << 30


@dataclass
class _Running:
    name: str
    kinds: tuple[str, ...]
    process: Any
    answer: Connection
    ends: float


def judged(todo: Sequence[tuple[str, tuple[str, ...]]], at_once: int, limits: ProcessLimits) -> Iterator[Verdict]:
    """Yield the verdicts as they come. Closing the iterator stops the running processes."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and forked from there
    context.set_forkserver_preload(["model_parts.verdict", "radixkv.chat", "radixkv.models.adapter"])
    waiting, running = list(reversed(todo)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(context, *waiting.pop(), limits))
            soonest = min(each.ends for each in running) - time.monotonic()
            wait([each.answer for each in running], max(soonest, 0.0))
            for each in [each for each in running if each.answer.poll() or each.ends <= time.monotonic()]:
                running.remove(each)
                yield _ended(each, limits)
    finally:
        for each in running:
            _stop(each)


def _start(context: Any, name: str, kinds: tuple[str, ...], limits: ProcessLimits) -> _Running:
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, name, kinds, limits.memory), daemon=True)
    process.start()
    theirs.close()
    return _Running(name, kinds, process, answer, time.monotonic() + limits.seconds)


def _work(answer: Connection, name: str, kinds: tuple[str, ...], memory: int) -> None:
    """Judge, and send the verdict. Runs in the process; the parent handles Ctrl-C and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils import logging

    from model_parts.verdict import judge

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    answer.send(judge(name, kinds))


def _ended(each: _Running, limits: ProcessLimits) -> Verdict:
    """Return the verdict of a process; if it sent none, the reason."""
    try:
        if each.answer.poll():
            verdict: Verdict = each.answer.recv()
            return verdict
        reason = f"took more than {limits.seconds:g} s"
    except EOFError:
        each.process.join(5)
        reason = f"its process ended with {each.process.exitcode}, and said nothing"
    finally:
        _stop(each)
    return Verdict(each.name, each.kinds, "failed", reason=reason)


def _stop(each: _Running) -> None:
    each.process.kill()  # its verdict, if any, has been received
    each.process.join()
    each.answer.close()
