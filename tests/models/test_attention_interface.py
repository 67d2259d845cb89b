"""Selecting the implementation of attention, transformers' warning about it, and the handler of a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from radixkv.models.attention_interface import NO_HANDLER, OWN, current, handled_by, select

LOG = logging.getLogger("transformers.modeling_utils")


class Choosing:
    """A model that runs a function while its implementation of attention is selected."""

    def __init__(self, during: Callable[[], None]) -> None:
        self.during = during

    def set_attn_implementation(self, implementation: str) -> None:
        LOG.warning("this model has no choice")
        self.during()


def test_selecting_in_two_threads_leaves_the_log_as_it_was() -> None:
    """The second selection begins within the first one and ends after it."""
    first_ends, second_began = threading.Event(), threading.Event()

    def within_the_second() -> None:
        second_began.set()
        assert first_ends.wait(10)

    second = threading.Thread(target=select, args=(Choosing(within_the_second), OWN))

    def within_the_first() -> None:
        second.start()
        assert second_began.wait(10)

    level, filters, messages = LOG.level, list(LOG.filters), []
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(listener)
    try:
        select(Choosing(within_the_first), OWN)
        first_ends.set()
        second.join(10)
        LOG.warning("after both")
    finally:
        LOG.removeHandler(listener)
    assert (LOG.level, LOG.filters) == (level, filters)
    assert messages == ["after both"]


def test_a_forward_within_another_leaves_its_handler() -> None:
    """Also if it fails, as a load in a hook of a model may."""
    outer: Any = object()
    with handled_by(outer):
        with suppress(ZeroDivisionError), handled_by(NO_HANDLER):
            _ = 1 / 0
        assert current.handler is outer
    assert current.handler is NO_HANDLER
