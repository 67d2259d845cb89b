"""Record the monitor's demo to tests/monitor/data/agents.rec, for pictures and for tests of screens.

Run `python scripts/record_demo.py [FILE]`. Chats and agents share a pool that is a little too small for them. The same
seed gives the same bytes on any machine. After a new recording, run `python scripts/draw_monitor.py` and `pytest
tests/monitor/test_snapshots.py --snapshot-update`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Delta, Frame, Hello, snapshot_frames
from radixkv_monitor.demo import DemoSource
from radixkv_monitor.state_builder import save

TARGET = Path(__file__).parent.parent / "tests" / "monitor" / "data" / "agents.rec"
BEGAN = 1_790_000_000.0
SECONDS, EVERY = 60, 2
"""The length of the recording, and the interval of its deltas, in seconds."""


def frames(seed: int = 7, seconds: int = SECONDS) -> Iterator[Frame]:
    """Yield a hello, a snapshot of the start, and deltas with the changed stats only, as an engine sends them."""
    source, mirror = DemoSource(seed, num_blocks=1280, sessions=18, started=BEGAN), Mirror()
    yield Hello(replace(source.facts, pid=4711, version="0.1.0"), ts=BEGAN)
    mirror.apply(source.step(BEGAN))
    yield from snapshot_frames(mirror, 0, BEGAN)
    for seq in range(1, seconds // EVERY + 1):
        ts = BEGAN + seq * EVERY
        changes = source.step(ts)
        changed = {name: value for name, value in changes.stats.items() if mirror.stats.get(name) != value}
        mirror.apply(changes)
        yield Delta(replace(changes, stats=changed), seq=seq, ts=ts)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Record the monitor's demo.")
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    target = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    number = save(target, frames())
    print(f"wrote {number} frames, {target.stat().st_size:,} bytes, to {target}")


if __name__ == "__main__":
    main()
