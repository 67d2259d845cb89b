"""Execute the commands of a monitor on the engine's thread, between two steps: cancel, pin, unpin, demote, clear.

Each executed command is one line in the engine's log. A command whose request or node is gone does nothing and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from radixkv.cache import Pin
from radixkv.cache.readings import find_node
from radixkv.errors import CancelledByMonitor, PinBudgetExceeded
from radixkv.telemetry.command_queue import Outcome
from radixkv.telemetry.protocol import Command
from radixkv.telemetry.records import namespace_label

if TYPE_CHECKING:
    from radixkv.cache.types import CachedNode
    from radixkv.engine.core import Core

_log = logging.getLogger(__name__)


class _NotDoneError(Exception):
    """A command has no effect; the message is the reason."""


class EngineControl:
    """The commands of all monitors of one engine. Their pins hold until a monitor releases them."""

    def __init__(self, core: Core) -> None:
        """Act on `core`; it must outlive this object."""
        self._core = core
        self._pins: list[Pin] = []  # those that monitors made
        self._verbs: dict[str, Callable[[int, str], str]] = {
            "cancel": self._cancel,
            "pin": self._pin,
            "unpin": self._unpin,
            "demote": self._demote,
            "clear": self._clear,
        }

    def execute(self, command: Command, process: int | None) -> Outcome:
        """Execute a command of a process, log it, and return one sentence on its effect.

        O(requests) for cancel, else O(tokens of the node's text); clear costs as `PrefixCache.clear_namespace`.
        """
        monitor = "radixkv-monitor" if process is None else f"radixkv-monitor (pid {process})"
        try:
            text = self._verbs[command.verb](command.number, monitor)
        except (_NotDoneError, PinBudgetExceeded) as reason:
            return Outcome(False, str(reason))
        _log.warning("%s %s", monitor, text)  # printed also without settings of logging
        return Outcome(True, text)

    def _cancel(self, number: int, monitor: str) -> str:
        scheduler = self._core.scheduler
        request = next(
            (each for each in chain(scheduler.running, scheduler.waiting) if each.scheduling.number == number), None
        )
        if request is None:
            raise _NotDoneError(f"request {number} has ended already")
        generated = sum(stream.output_length for stream in request.streams)
        self._core.cancel(request, CancelledByMonitor(f"the request was cancelled by {monitor}"))
        return f"cancelled request {number} after {_count(generated, 'generated token')}"

    def _pin(self, number: int, monitor: str) -> str:
        node = self._node(number)
        if node.residence == "host":
            raise _NotDoneError(f"node {number} is in host memory: only tokens on the device can be pinned")
        pin = self._core.admission.pin(node.tokens, node.namespace)
        self._pins = [*(each for each in self._pins if each.active), pin]
        return f"pinned the {_count(pin.length, 'token')} up to the end of node {number}: {_count(pin.blocks, 'block')}"

    def _unpin(self, number: int, monitor: str) -> str:
        node, before = self._node(number), [pin for pin in self._pins if pin.active]
        released = self._core.cache.unpin(node.tokens, node.namespace)
        if not released:
            raise _NotDoneError(f"no pin ends at node {number}; a pin on a longer text may hold it")
        self._pins = [pin for pin in before if pin.active]
        own = len(before) - len(self._pins)
        made_by = f"{own} of a monitor, {released - own} of the engine's callers"
        return f"released {_count(released, 'pin')} at node {number}: {made_by}"

    def _demote(self, number: int, monitor: str) -> str:
        node = self._node(number)
        if node.locks:
            raise _NotDoneError(f"node {number} is in use: requests or pins hold it, so it cannot be evicted")
        if node.children:
            raise _NotDoneError(f"{_count(node.children, 'node')} follow node {number}: demote these first")
        self._core.demote(node.tokens, node.start, node.namespace)
        length = len(node.tokens) - node.start
        return f"demoted node {number}: its {_count(length, 'token')} are evicted before others"

    def _clear(self, number: int, monitor: str) -> str:
        root = find_node(self._core.cache.state, number)
        if root is None:
            raise _NotDoneError(f"namespace {number} is gone: nothing of it is cached")
        if len(root.tokens):
            raise _NotDoneError(f"node {number} is not a namespace")
        before = self._core.cache.stats()
        self._core.clear_namespace(root.namespace)
        after = self._core.cache.stats()
        freed = _count(after.free_blocks - before.free_blocks, "block")
        if after.host_blocks:
            freed += f" of the pool and {_count(after.host_free_blocks - before.host_free_blocks, 'block')} on the host"
        name = namespace_label(root.namespace)
        kept = (
            "nothing of it is left"
            if find_node(self._core.cache.state, number) is None
            else "requests or pins hold the rest"
        )
        return f"cleared {'the default namespace' if name is None else f'namespace {name!r}'}: freed {freed}; {kept}"

    def _node(self, number: int) -> CachedNode:
        """Find a node that covers tokens."""
        node = find_node(self._core.cache.state, number)
        if node is None:
            raise _NotDoneError(f"node {number} is gone: it was evicted, or joined with another node")
        if not len(node.tokens):
            raise _NotDoneError(f"node {number} is a namespace, which has no tokens of its own")
        return node


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
