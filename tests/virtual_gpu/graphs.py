"""Captures and graphs of a simulated GPU: nodes that run only in replays, and the memory that they use."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Generic, TypeVar

from tests.virtual_gpu.memory import WRITE, Access, Memory, Span, add_access, poison
from tests.virtual_gpu.schedule import Node, VirtualStream

if TYPE_CHECKING:
    from tests.virtual_gpu.gpu import VirtualGpu
    from tests.virtual_gpu.transfers import HostRead

T = TypeVar("T")


class Capture:
    """A capture under way, by one thread, on one stream and those that its events reach."""

    def __init__(self, gpu: VirtualGpu, origin: VirtualStream) -> None:
        self._gpu, self._origin = gpu, origin
        self._before = {origin: (dict(origin.clock), origin.last, list(origin.waits))}
        self.nodes: list[Node] = []
        self.own: list[Memory] = []  # memory of the graph's pool
        self.spans: dict[Span, None] = {}  # of other memory
        self.host_reads: list[HostRead] = []
        self.invalid: str | None = None
        self._accesses: dict[Memory, list[Access]] = {}
        origin.capture, origin.last, origin.waits = self, None, []

    def joined_by(self, stream: VirtualStream) -> bool:
        """Let another stream take part, unless it is in a capture; return whether it does."""
        if stream.capture is not None or self._origin.capture is not self:
            return False
        self._before[stream] = (dict(stream.clock), stream.last, list(stream.waits))
        stream.capture, stream.last, stream.waits = self, None, []
        return True

    def add(self, node: Node, spans: list[Span]) -> str | None:
        """Record a node; return a description of a race, if it has one with another node."""
        self.nodes.append(node)
        race = None
        for span in spans:
            found = add_access(self._accesses.setdefault(span.memory, []), span, node, {})
            race = race or (found and f"{found.name} {found.kind} memory that {node.name} {span.kind}, in no order")
            if span.memory.capture is not self:
                self.spans[span] = None
        return race

    @property
    def nbytes(self) -> int:
        """Bytes that the graph's pool takes."""
        return sum(memory.nbytes for memory in self.own)

    def accesses_of(self, memory: Memory) -> list[Access]:
        """Return the accesses of recorded nodes."""
        return self._accesses.get(memory, [])

    def end(self) -> list[VirtualStream]:
        """Leave all streams as they were before; return those that were not joined again."""
        last = {stream: stream.clock.get(stream.number, 0) for stream in self._before}
        clock = dict(self._origin.clock)
        for stream, (before, node, waits) in self._before.items():
            stream.capture, stream.clock, stream.last, stream.waits = None, before, node, waits
        for stream in self._before:
            stream.reusable = [memory for memory in stream.reusable if memory.capture is not self]
        return [stream for stream, number in last.items() if clock.get(stream.number, 0) < number]


class VirtualGraph(Generic[T]):
    """Recorded nodes; `result` is the step's, whose memory each replay writes."""

    def __init__(self, gpu: VirtualGpu, capture: Capture, result: T) -> None:
        self._gpu, self._result = gpu, result
        self.nodes, self._own, self._spans = capture.nodes, capture.own, list(capture.spans)
        self._host_reads = capture.host_reads
        self.replays = 0

    def replay(self) -> T:
        """Queue all nodes as one node of the present stream."""
        gpu = self._gpu
        with gpu.lock:
            gpu.check_context()
            gpu.refuse_in_capture("replaying a graph")
            gpu.collect()
            gpu.counts["replay"] += 1
            self.replays += 1
            for span in self._spans:
                if not span.memory.alive:
                    gpu.violation("freed", f"a replay uses memory that {span.memory.name} had made, and that is freed")
            reads = [each.expect() for each in self._host_reads]
            order = Random(gpu.scheduler.random.random())
            made = [Span(memory, 0, memory.nbytes, WRITE) for memory in self._own]
            gpu.enqueue("a replay", lambda: self._run(order, reads), [*self._spans, *made])
        return self._result

    def _run(self, order: Random, reads: list[Callable[[], None]]) -> None:
        """Run the nodes in an order that their events allow; nothing of an earlier replay remains."""
        for check in reads:
            check()
        for memory in self._own:
            if memory.backing is not None:
                poison(memory.backing)
        done: set[Node] = set()
        queues: dict[int, list[Node]] = {}
        for node in reversed(self.nodes):
            queues.setdefault(node.stream, []).append(node)
        while queues:
            stream = order.choice([each for each in queues if done.issuperset(queues[each][-1].after)])
            node = queues[stream].pop()
            assert node.run is not None
            node.run()
            done.add(node)
            if not queues[stream]:
                del queues[stream]
