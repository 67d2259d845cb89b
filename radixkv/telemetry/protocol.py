"""Frames to bytes and back: a big-endian u32 length, then a msgpack map {"v": 1, "t": type, "seq": n, "ts": time, ...}.

Knows how frames are written; how they are read, and what is believed of them, `decoder` knows. Knows no socket and no
file. docs/telemetry_protocol.md tells all of this to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

from radixkv.errors import ProtocolError
from radixkv.telemetry.decoder import MAX_FRAME, PREFIX, RECORDS, VERSION, Decoder
from radixkv.telemetry.frames import Attach, Bye, Delta, Frame, Gap, Hello, Snapshot
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.pages import LISTS, pages
from radixkv.telemetry.records import Changes
from radixkv.telemetry.shapes import MOST_INT

__all__ = [
    "MAX_FRAME",
    "VERSION",
    "Attach",
    "Bye",
    "Decoder",
    "Delta",
    "Frame",
    "Gap",
    "Hello",
    "Snapshot",
    "encode",
    "snapshot_frames",
]


def encode(frame: Frame, limit: int = MAX_FRAME) -> bytes:
    """The frame's bytes, its length in front. O(bytes). Raises ProtocolError if they are more than `limit`."""
    name, fields = _PACK[type(frame)]
    said = {"v": VERSION, "t": name, "seq": frame.seq, "ts": frame.ts, **fields(frame)}
    body: bytes = msgpack.packb(said, default=_plain)
    if len(body) > limit:
        raise ProtocolError(f"a {name} frame of {len(body)} bytes is over the cap of {limit}: send it in pages")
    return len(body).to_bytes(PREFIX, "big") + body


def snapshot_frames(mirror: Mirror, seq: int, ts: float, rest: Callable[[], None] = lambda: None) -> Iterator[Snapshot]:
    """Everything in frames, cut now and made one by one, so that a reader need not hold them all.

    `rest` is called between two pages that are cut.
    """
    every = pages(mirror.everything(), rest)
    return (Snapshot(page, len(every), changes, seq=seq, ts=ts) for page, changes in enumerate(every))


def _plain(value: Any) -> Any:
    """What msgpack cannot write: whole numbers of more than 64 bits, such as somebody's priority, go to the limit."""
    if isinstance(value, int):
        return MOST_INT if value > 0 else -MOST_INT
    raise TypeError(f"telemetry tells plain values only, not a {type(value).__name__}")


def _body(changes: Changes) -> dict[str, Any]:
    body: dict[str, Any] = {"time": changes.time}
    if changes.reset:
        body["reset"] = True
    if changes.stats:
        body["stats"] = changes.stats
    for name in LISTS:
        values: Iterable[Any] = getattr(changes, name)
        if values:
            body[name] = [each.pack() for each in values] if name in RECORDS else values
    return body


_PACK: dict[type[Frame], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    Attach: ("attach", lambda frame: {"token": frame.token, "hz": frame.hz}),
    Hello: ("hello", lambda frame: {"engine": frame.facts.pack()}),
    Snapshot: (
        "snapshot",
        lambda frame: {"page": frame.page, "pages": frame.pages, "body": _body(frame.changes)},
    ),
    Delta: ("delta", lambda frame: {"body": _body(frame.changes)}),
    Gap: ("gap", lambda frame: {"dropped": frame.dropped}),
    Bye: ("bye", lambda frame: {"reason": frame.reason}),
}
