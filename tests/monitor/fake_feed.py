"""A feed for tests that shows the states which a test gives it."""

from __future__ import annotations

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.records import Changes, EngineFacts
from radixkv_monitor.feed import Feed, Status, Traffic
from radixkv_monitor.state import State, StateCopier

FACTS = EngineFacts(
    engine="engine-1",
    pid=4711,
    started=1000.0,
    version="0.1.0",
    model="tiny",
    device="cpu",
    dtype="float32",
    attention="torch",
    eviction="lru",
    num_blocks=64,
    block_size=16,
    bytes_per_block=1024,
    max_length=512,
    max_sequences=8,
    max_batch_tokens=256,
    prefill_chunk=64,
)


class FakeFeed(Feed):
    """`apply` adds changes, and `latest` is their sum."""

    title = "still"

    def __init__(self, *changes: Changes, facts: EngineFacts = FACTS) -> None:
        self.mirror = Mirror()
        self.copier = StateCopier(facts, line=1)
        self.state: State | None = None
        self.link = Status("live", 0.0)
        self.closed = False
        for each in changes:
            self.apply(each)

    def apply(self, changes: Changes) -> None:
        self.mirror.apply(changes)
        self.state = self.copier.take(self.mirror, [changes])

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    @property
    def latest(self) -> State | None:
        return self.state

    @property
    def status(self) -> Status:
        return self.link

    @property
    def now(self) -> float:
        return self.state.time if self.state is not None else 0.0

    @property
    def traffic(self) -> Traffic:
        return Traffic()
