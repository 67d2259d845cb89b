"""A small folder of records with known content, and what is found in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from radixkv.disk.slabs import Image
from radixkv.disk.store import Read, Run, Store

BYTES = 48
WAIT = 20.0


def block(text: int, number: int) -> bytes:
    text = 123_456_789 * text * (number >= 2) % 2**31  # the first two blocks are common to all texts
    return np.array([text, number], np.int32).tobytes()


def blocks(text: int, count: int) -> list[bytes]:
    return [block(text, number) for number in range(count)]


def image(text: int, number: int) -> Image:
    seed = (text * (number >= 2) + 1) * 1000 + number
    return np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)


def run(text: int, count: int, first: int = 0, namespace: bytes = b"n") -> Run:
    return Run(namespace, blocks(text, count), [image(text, number) for number in range(first, count)], time.time())


@contextmanager
def opened(folder: Path, slots: int = 1000) -> Iterator[Store]:
    store = Store(lambda: folder, BYTES, slots)
    assert store.settle(WAIT)
    try:
        yield store
    finally:
        assert store.close(WAIT)


def write(folder: Path, texts: Sequence[int], count: int = 6) -> None:
    with opened(folder) as store:
        for text in texts:
            assert store.offer(run(text, count))


def arrived(store: Store, text: int, count: int = 6, namespace: bytes = b"n") -> int:
    """How many blocks of a text are found and read; each of them has its content."""
    found, ended = store.find(namespace, blocks(text, count)), threading.Event()
    got: list[Image] = []
    store.read(Read(found, lambda number, image: got.append(image.copy()), lambda read: ended.set()))
    assert ended.wait(WAIT)
    for number, each in enumerate(got):
        assert np.array_equal(each, image(text, number)), f"block {number} of text {text} has other content"
    assert store.settle(WAIT)
    return len(got)


def let_any_disk_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to almost full disks, and wait for slow ones: machines of tests have both."""
    monkeypatch.setattr("radixkv.disk.store.LEAST_FREE", 0)
    monkeypatch.setattr("radixkv.disk.store.LEAST_SHARE", 0.0)
    monkeypatch.setattr("radixkv.engine.disk_stage._LEAST_WAIT", 20.0)
