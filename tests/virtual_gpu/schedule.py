"""Streams and events of a simulated GPU: nodes of work that a seeded scheduler runs late, in any order CUDA allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.virtual_gpu.gpu import VirtualGpu
    from tests.virtual_gpu.graphs import Capture
    from tests.virtual_gpu.memory import Memory

Clock = dict[int, int]
"""How many nodes of each stream are known to have run before: a vector clock."""


@dataclass(eq=False)
class Node:
    """One copy or launch; it may run once all nodes of `after` are done."""

    name: str
    run: Callable[[], None] | None
    after: tuple[Node, ...]
    stream: int
    number: int
    clock: Clock
    where: str  # in the code under test
    done: bool = False


def join(one: Clock, other: Clock) -> None:
    """Let `one` contain all that `other` contains."""
    for stream, number in other.items():
        if number > one.get(stream, 0):
            one[stream] = number


class VirtualStream:
    """A queue whose nodes run in order."""

    def __init__(self, gpu: VirtualGpu, number: int) -> None:
        self._gpu, self.number = gpu, number
        self.pending: deque[Node] = deque()
        self.clock: Clock = {}
        self.last: Node | None = None
        self.waits: list[Node] = []  # of the next node
        self.capture: Capture | None = None  # under way
        self.reusable: list[Memory] = []  # freed allocations of this stream

    def add(self, name: str, run: Callable[[], None], host: Clock, where: str) -> Node:
        """Append a node, which also follows all that the host has waited for."""
        join(self.clock, host)
        self.clock[self.number] = number = self.clock.get(self.number, 0) + 1
        after = tuple(node for node in (self.last, *self.waits) if node is not None and not node.done)
        self.waits.clear()
        self.last = Node(name, run, after, self.number, number, dict(self.clock), where)
        return self.last

    def wait_stream(self, stream: VirtualStream) -> None:
        """Let later nodes wait for all present nodes of another stream."""
        event = VirtualEvent(self._gpu)
        event.record(stream)
        event.wait(self)


class VirtualEvent:
    """A mark in a stream."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self.node: Node | None = None
        self.clock: Clock | None = None
        self.capture: Capture | None = None

    def record(self, stream: VirtualStream | None = None) -> None:
        """Mark the end of a stream's work, by default the present one's."""
        with self._gpu.lock:
            self._gpu.check_context()
            stream = stream or self._gpu.current_stream()
            self.node, self.clock, self.capture = stream.last, dict(stream.clock), stream.capture

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Let later nodes of a stream, by default the present one, wait for the mark."""
        with self._gpu.lock:
            self._gpu.check_context()
            stream = stream or self._gpu.current_stream()
            if self.clock is None:
                return
            if self.capture is not stream.capture and (self.capture is None or not self.capture.joined_by(stream)):
                self._gpu.refuse_in_capture("waiting for an event of another capture, or of none", code=905)
            join(stream.clock, self.clock)
            if self.node is not None and not self.node.done:
                stream.waits.append(self.node)

    def synchronize(self) -> None:
        """Wait for the mark, and for no later work."""
        with self._gpu.lock:
            self._gpu.check_context()
            self._gpu.refuse_in_capture("waiting for an event on the host")
            if self.clock is not None:
                self._gpu.counts["event wait"] += 1
                self._gpu.finish([self.node] if self.node is not None else [], self.clock)

    def query(self) -> bool:
        """Return whether the mark has been reached."""
        return self.node is None or self.node.done


@dataclass
class Scheduler:
    """Runs nodes of streams in an order drawn from a seed."""

    random: Random
    lag: float
    """The probability that the device runs nothing while the host queues a node."""
    streams: list[VirtualStream] = field(default_factory=list)

    def ready(self) -> list[VirtualStream]:
        """Return the streams whose first node may run."""
        return [each for each in self.streams if each.pending and all(node.done for node in each.pending[0].after)]

    def take(self, stream: VirtualStream) -> Node:
        """Remove a stream's first node, which counts as done."""
        node = stream.pending.popleft()
        node.done, node.after = True, ()
        return node

    def advance(self, execute: Callable[[Node], None]) -> None:
        """Let the device run some nodes, or none."""
        while self.random.random() >= self.lag and (ready := self.ready()):
            execute(self.take(self.random.choice(ready)))

    def finish(self, wanted: Iterable[Node], execute: Callable[[Node], None]) -> None:
        """Run the wanted nodes, all that precede them, and perhaps others."""
        needed = _with_ancestors(wanted)
        while needed:
            ready = self.ready()
            assert ready, "nodes wait for each other"
            stream = self.random.choice(ready)
            node = stream.pending[0]
            if node in needed or self.random.random() >= self.lag:
                needed.discard(node)
                execute(self.take(stream))


def _with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that are not done, and those that precede them."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if not node.done and node not in found:
            found.add(node)
            left.extend(node.after)
    return found
