"""A real cache under random operations, reported as records by a plain walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from radixkv.cache import PrefixCache, Sequence
from radixkv.cache.reuse import total
from radixkv.errors import OutOfBlocks, PinBudgetExceeded
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.records import Changes, EngineFacts, NodeRecord, RequestRecord, SequenceRecord
from radixkv_monitor.state import State, StateCopier

STEPS = st.lists(
    st.tuples(st.sampled_from(("open", "fork", "grow", "close", "pin", "unpin", "demote")), st.integers(0, 2**16)),
    min_size=1,
    max_size=30,
)


def facts(num_blocks: int, block_size: int = 4, engine: str = "test") -> EngineFacts:
    return EngineFacts(
        engine=engine, pid=1, started=0.0, version="0", model="m", device="cpu", dtype="float32", attention="torch",
        eviction="lru", num_blocks=num_blocks, block_size=block_size, bytes_per_block=1024, max_length=1024,
        max_sequences=8, max_batch_tokens=64, prefill_chunk=16,
    )  # fmt: skip


def run_length(blocks: Iterable[int]) -> tuple[int, ...]:
    runs: list[int] = []
    for block in blocks:
        if runs and runs[-2] + runs[-1] == block:
            runs[-1] += 1
        else:
            runs += [block, 1]
    return tuple(runs)


class RandomCache:
    """A small cache that changes by random steps, and the records of it that a monitor would receive.

    With `host_blocks` it has a host tier, whose moves run before each step.
    """

    def __init__(self, num_blocks: int = 24, block_size: int = 4, host_blocks: int = 0) -> None:
        self.now = 0.0
        make = partial(PrefixCache, host_blocks=host_blocks) if host_blocks else PrefixCache
        self.cache = make(num_blocks, block_size, clock=lambda: self.now)
        self.open: list[Sequence] = []
        self.pins: list = []  # type: ignore[type-arg]
        self.mirror = Mirror()
        self.copier = StateCopier(replace(facts(num_blocks, block_size), host_blocks=host_blocks), 1)
        self.used: dict[int, tuple[int, float]] = {}

    def step(self, verb: str, number: int) -> None:
        self.now += 1.0 + number % 7
        self.cache.moves()
        self.cache.moves_done()
        getattr(self, f"_{verb}")(number)
        self.cache.check()

    def _text(self, number: int) -> list[int]:
        """Return texts that share prefixes of different lengths; some end inside a block."""
        return [number % 2, *[7] * (number // 2 % 9), *[8 + number // 18 % 3] * (number // 54 % 11), 20 + number % 5]

    def _open(self, number: int) -> None:
        text = self._text(number)
        sequence = self.cache.open(text, None if number % 3 else "tenant")
        self.open.append(sequence)
        if isinstance(sequence, Sequence):
            self._load(sequence, text)
        if not sequence.closed:
            self._extend(sequence, text[sequence.length :])

    def _load(self, sequence: Sequence, text: list[int]) -> None:
        if found := sequence.loadable(text[sequence.length :]):
            try:
                sequence.load(text[sequence.length : sequence.length + found])
                sequence.commit()
            except OutOfBlocks:
                sequence.close()
                self.open.remove(sequence)

    def _extend(self, sequence: Sequence, tokens: list[int]) -> None:
        try:
            sequence.extend(tokens)
            sequence.commit(publish=sequence.id % 5 > 0)
        except OutOfBlocks:
            sequence.close()
            self.open.remove(sequence)

    def _one(self, number: int) -> Sequence | None:
        return self.open[number % len(self.open)] if self.open else None

    def _fork(self, number: int) -> None:
        if (sequence := self._one(number)) is not None:
            sequence.commit()  # no record contains blocks that forks share before they are published
            self.open.append(sequence.fork())

    def _grow(self, number: int) -> None:
        if (sequence := self._one(number)) is not None:
            self._extend(sequence, [30 + number % 4] * (1 + number % 6))

    def _close(self, number: int) -> None:
        if (sequence := self._one(number)) is not None:
            sequence.close()
            self.open.remove(sequence)

    def _pin(self, number: int) -> None:
        try:
            self.pins.append(self.cache.pin(self._text(number), None if number % 3 else "tenant"))
        except PinBudgetExceeded:
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        if self.pins:
            self.pins.pop(number % len(self.pins)).release()

    def _demote(self, number: int) -> None:
        self.cache.demote(self._text(number), None if number % 3 else "tenant")

    # ---- telling

    def nodes(self) -> Iterator[NodeRecord]:
        """Yield a record of every node, by a walk."""
        pinned = Counter(node.id for node in self.cache.state.pins.nodes())
        names = {root: name.value for name, root in self.cache.state.tree.roots.items()}
        for node in self.cache.state.tree.residents():
            used = self.used.get(node.id, (-1, 0.0))
            if used[0] != node.tick:
                used = self.used[node.id] = (node.tick, self.now)
            yield NodeRecord(
                id=node.id, parent=0 if node.parent is None else node.parent.id, start=node.start,
                tokens=node.end - node.start, blocks=run_length(node.blocks), holders=node.direct_holders,
                locks=node.locks, pins=pinned[node.id], hits=node.hits, priority=node.priority,
                demoted=node.demoted, born=0.0, used=used[1], namespace=names.get(node),
                head=tuple(memoryview(bytes(node.key[:32])).cast("i")), residence=node.residence,
                reused=total(node.reuse),
            )  # fmt: skip

    def sequences(self) -> Iterator[SequenceRecord]:
        """Yield a record of every open sequence; its request has the same number."""
        named = {block for node in self.cache.state.tree.walk() for block in node.blocks}  # of the pool
        for sequence in self.open:
            private = [block for block in sequence.own_blocks() if block not in named]
            yield SequenceRecord(sequence.id, sequence.id, 0, sequence.node.id, sequence.length,
                                 sequence.cached_length, run_length(private), 0.0)  # fmt: skip

    def state(self) -> State:
        """Return the state that a monitor shows now, built from the changes since the last call."""
        nodes = {node.id: node for node in self.nodes()}
        sequences = {sequence.id: sequence for sequence in self.sequences()}
        old = self.mirror
        changes = Changes(
            time=self.now,
            nodes=tuple(node for node in nodes.values() if old.nodes.get(node.id) != node),
            gone_nodes=tuple(old.nodes.keys() - nodes.keys()),
            sequences=tuple(each for each in sequences.values() if old.sequences.get(each.id) != each),
            gone_sequences=tuple(old.sequences.keys() - sequences.keys()),
            requests=tuple(request(number) for number in sequences.keys() - old.live.keys()),
        )
        self.mirror.apply(changes)
        return self.copier.take(self.mirror, (changes,))


def request(number: int, **facts: object) -> RequestRecord:
    """Return a decoding request of session number % 3."""
    plain = RequestRecord(
        number=number, phase="decode", session=number % 3, namespace=None, priority=0, streams=1, prompt_tokens=8,
        max_tokens=8, cached_tokens=0, computed_tokens=0, recomputed_tokens=0, output_tokens=0, preemptions=0,
        coalesced=False, submitted=0.0,
    )  # fmt: skip
    return replace(plain, **facts)  # type: ignore[arg-type]
