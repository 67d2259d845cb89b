"""Telemetry frames, and their encoding as bytes.

A frame is a big-endian u32 length, then a msgpack map {"v": 1, "t": type, "seq": n, "ts": time, ...}.
`docs/telemetry_protocol.md` describes the format. The decoder checks everything that it reads: any fault raises
ProtocolError, and the memory of one frame is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace
from math import isfinite
from typing import Any, TypeVar

import msgpack

from radixkv.errors import ProtocolError
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.paging import LISTS, LONGEST_LIST, LONGEST_TEXT, paginate
from radixkv.telemetry.records import (
    MOST_INT,
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    Record,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
    drawable,
)

VERSION = 1
MAX_FRAME = 4 * 1024 * 1024
"""The most bytes that may follow a length."""
MOST_POOL = 2**24
"""The most blocks of an engine that a hello may declare."""
PREFIX = 4
"""The size of a length in bytes."""
_MOST_ARRAYS = 65_536  # in one frame: an empty one takes 1 byte on the wire, and 80 in memory
_MOST_MAPS = 3  # the frame, its body, its stats
_MOST_STATS = 4096
_LONGEST_VERB = 32  # characters of a command

RECORDS: dict[str, type[Record]] = {
    "nodes": NodeRecord,
    "sequences": SequenceRecord,
    "requests": RequestRecord,
    "sessions": SessionRecord,
    "evictions": EvictionRecord,
}
"""The record class of each list of changes; the other lists hold ids."""
Kind = TypeVar("Kind")

WRONG_TOKEN = "wrong token"
"""The first words of a bye's reason that no further attempt will change."""

CRASHED = "the engine's thread stopped"
"""The first words of a bye's reason if the engine ended by a fault."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The fields of every frame: `seq` is the number of the latest delta that it includes, `ts` the time when it was
    made.

    Deltas are numbered 1, 2, 3, ...; the delta after a snapshot with seq n is n + 1.
    """

    seq: int = field(default=0, kw_only=True)
    ts: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Attach(Frame):
    """The first frame that a client sends: `hz` is the requested rate of deltas; TCP requires the token."""

    token: str = ""
    hz: float = 4.0


@dataclass(frozen=True, slots=True)
class Command(Frame):
    """A command of a client whose hello allowed `control`: one of `command_queue.VERBS`. `id` names its reply."""

    id: int
    verb: str
    number: int


@dataclass(frozen=True, slots=True)
class Reply(Frame):
    """The end of the command `id`: whether it was executed, and one sentence on what it did, or why it did nothing."""

    id: int
    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class Hello(Frame):
    """The first frame of every connection and recording: the facts of the engine."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Snapshot(Frame):
    """Page `page` (from 0) of `pages` of the whole state. Page 0 resets; the state is complete after the last page.

    No delta comes between two pages.
    """

    page: int
    pages: int
    changes: Changes

    @property
    def last(self) -> bool:
        """Whether the state is complete after this page."""
        return self.page == self.pages - 1


@dataclass(frozen=True, slots=True)
class Delta(Frame):
    """The changes since the preceding frame. An empty one shows that the engine is alive."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class Gap(Frame):
    """The reader was too slow: `dropped` deltas are missing, and a snapshot follows."""

    dropped: int


@dataclass(frozen=True, slots=True)
class Bye(Frame):
    """The last frame, with the reason of the end."""

    reason: str


def encode(frame: Frame, limit: int = MAX_FRAME) -> bytes:
    """Encode a frame, preceded by its length. O(bytes). Raises ProtocolError if it has more than `limit` bytes."""
    name, values_of = _ENCODERS[type(frame)]
    fields = {"v": VERSION, "t": name, "seq": frame.seq, "ts": frame.ts, **values_of(frame)}
    body: bytes = msgpack.packb(fields, default=_plain)
    if len(body) > limit:
        raise ProtocolError(f"a {name} frame of {len(body)} bytes is over the cap of {limit}: send it in pages")
    return len(body).to_bytes(PREFIX, "big") + body


def snapshot_frames(
    mirror: Mirror, seq: int, ts: float, pause: Callable[[], None] = lambda: None
) -> Iterator[Snapshot]:
    """Cut the whole state into frames now, and make them one by one, so that a reader need not hold them all.

    `pause` is called between two pages while they are cut.
    """
    pages = paginate(mirror.everything(), pause)
    return (Snapshot(page, len(pages), changes, seq=seq, ts=ts) for page, changes in enumerate(pages))


def _plain(value: Any) -> Any:
    """Convert values that msgpack rejects: integers of more than 64 bits, such as a caller's priority, are clamped."""
    if isinstance(value, int):
        return MOST_INT if value > 0 else -MOST_INT
    raise TypeError(f"telemetry sends plain values only, not a {type(value).__name__}")


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
    if changes.next_victims is not None:
        body["next_victims"] = changes.next_victims
    if changes.what_if is not None:
        body["what_if"] = json.dumps(changes.what_if)  # a text: older readers refuse frames with more maps
    return body


_ENCODERS: dict[type[Frame], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    Attach: ("attach", lambda frame: {"token": frame.token, "hz": frame.hz}),
    Command: ("command", lambda frame: {"id": frame.id, "verb": frame.verb, "number": frame.number}),
    Reply: ("reply", lambda frame: {"id": frame.id, "done": frame.done, "text": frame.text}),
    Hello: ("hello", lambda frame: {"engine": frame.facts.pack()}),
    Snapshot: ("snapshot", lambda frame: {"page": frame.page, "pages": frame.pages, "body": _body(frame.changes)}),
    Delta: ("delta", lambda frame: {"body": _body(frame.changes)}),
    Gap: ("gap", lambda frame: {"dropped": frame.dropped}),
    Bye: ("bye", lambda frame: {"reason": frame.reason}),
}


class Decoder:
    """Decode frames from bytes that arrive in any pieces. Holds less than one frame between two calls."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        """`limit` is the most bytes that may follow a length."""
        self._limit = limit
        self._bytes = bytearray()
        self._broken: ProtocolError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._bytes)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Return the frames that `data` completes; frames that are not taken come with the next call.

        Raises ProtocolError for bytes that are not a frame, after the valid frames before them. Every later call raises
        it too, because the next frame cannot be located any more.
        """
        if self._broken is None:
            self._bytes += data
        return self._whole()

    def _whole(self) -> Iterator[Frame]:
        while True:
            if self._broken is not None:
                raise self._broken
            try:
                frame = self._next()
            except ProtocolError as error:
                self._broken = error
                self._bytes.clear()
                raise
            if frame is None:
                return
            yield frame

    def _next(self) -> Frame | None:
        if len(self._bytes) < PREFIX:
            return None
        length = int.from_bytes(self._bytes[:PREFIX], "big")
        if length > self._limit:
            raise ProtocolError(
                f"a frame claims {length} bytes, and {self._limit} is the cap: this is not our protocol"
            )
        end = PREFIX + length
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[PREFIX:end])
        del self._bytes[:end]
        return _frame(body)


def _frame(body: bytes) -> Frame:
    """Decode the body of a frame. Raises ProtocolError for any fault."""
    try:
        fields = _unpack(body)
        _require(isinstance(fields, dict), "a frame is a map")
        version = _get(fields, "v", int)
        _require(version == VERSION, f"this speaks version {VERSION}, the other side {version}: use the same release")
        name = _get(fields, "t", str)
        _require(name in _DECODERS, f"there are no {name[:40]!r} frames in version {VERSION}")
        return _DECODERS[name](fields, seq=_count(fields, "seq"), ts=_number(fields, "ts"))
    except ProtocolError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a frame that makes no sense: {str(error)[:200] or type(error).__name__}") from error


def _unpack(body: bytes) -> Any:
    """Unpack the values of a body, within limits: a few bytes must not allocate much memory."""
    arrays = maps = 0

    def array(values: list[Any]) -> tuple[Any, ...]:
        nonlocal arrays
        arrays += 1
        if arrays > _MOST_ARRAYS:
            raise ProtocolError(f"a frame has at most {_MOST_ARRAYS} arrays")
        return tuple(values)

    def mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        nonlocal maps
        maps += 1
        _require(maps <= _MOST_MAPS, f"a frame has at most {_MOST_MAPS} maps")
        made = dict(pairs)
        _require(len(made) == len(pairs) and set(map(type, made)) <= {str}, "the keys of a map are texts, once each")
        return made

    return msgpack.unpackb(
        body,
        list_hook=array,
        object_pairs_hook=mapping,
        ext_hook=_no_extension,
        max_array_len=LONGEST_LIST,
        max_map_len=_MOST_STATS,
        max_str_len=LONGEST_TEXT,
        max_bin_len=0,
        max_ext_len=16,
    )


def _no_extension(code: int, data: bytes) -> Any:
    raise ProtocolError("a frame holds no msgpack extensions")


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise ProtocolError(otherwise)


def _get(fields: dict[str, Any], key: str, *kinds: type[Kind]) -> Kind:
    value = fields.get(key)
    if type(value) not in kinds:  # not `_require`: formatting a long body takes longer than everything else
        raise ProtocolError(f"{key!r} of a frame cannot be {str(value)[:40]!r}")
    return value  # type: ignore[return-value]  # just looked at


def _count(fields: dict[str, Any], key: str) -> int:
    value = _get(fields, key, int)
    _require(0 <= value <= MOST_INT, f"{key!r} of a frame cannot be {value}")
    return value


def _number(fields: dict[str, Any], key: str) -> float:
    value = _get(fields, key, float, int)
    _require(isfinite(value), f"{key!r} of a frame cannot be {value}")
    return float(value)


def _tuple(fields: dict[str, Any], key: str) -> tuple[Any, ...]:
    return _get(fields, key, tuple)


def _changes(fields: dict[str, Any]) -> Changes:
    body = _get(fields, "body", dict)
    parts: dict[str, Any] = {}
    for name in LISTS:
        if name in body:
            parts[name] = _list(name, _tuple(body, name))
    if "next_victims" in body:
        parts["next_victims"] = _list("next_victims", _tuple(body, "next_victims"))
    if "what_if" in body:
        parts["what_if"] = _what_if(_get(body, "what_if", str))
    if "stats" in body:
        parts["stats"] = _stats(_get(body, "stats", dict))
    return Changes(_number(body, "time"), _get(body, "reset", bool) if "reset" in body else False, **parts)


def _list(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    record = RECORDS.get(name)
    if record is not None:
        _require(set(map(type, values)) <= {tuple}, f"{name!r} is a list of records")
        return tuple(map(record.unpack, values))
    _require(set(map(type, values)) <= {int} and min(values, default=0) >= 0, f"{name!r} is a list of ids")
    return values


def _stats(fields: dict[str, Any]) -> dict[str, float]:
    for key in fields:
        _number(fields, key)
    return fields


def _what_if(text: str) -> dict[str, Any]:
    from radixkv.telemetry.what_if import SIZES, WhatIfReport  # numpy takes 0.1 s, which `radixkv ps` does not need

    report = WhatIfReport.from_fields(json.loads(text))
    for each in (report.recent, report.since_load):
        counts = (report.pool_blocks, report.dropped, *astuple(each)[:-1], *each.hit_tokens)
        right = all(type(count) is int and 0 <= count <= MOST_INT for count in counts)
        _require(right and len(counts) == 5 + len(SIZES), "the counts of a curve are out of range")
    return replace(report, reasons=tuple(drawable(str(each)) for each in report.reasons)).as_fields()


def _hello(fields: dict[str, Any], **common: Any) -> Hello:
    facts = EngineFacts.unpack(_tuple(fields, "engine"))
    # A monitor has an entry for each block, and divides by the block size.
    _require(0 < facts.num_blocks <= MOST_POOL, f"a pool cannot have {facts.num_blocks} blocks")
    _require(facts.host_blocks <= MOST_POOL, f"host memory cannot have {facts.host_blocks} blocks")
    _require(facts.block_size > 0, f"a block cannot have {facts.block_size} tokens")
    return Hello(facts, **common)


def _snapshot(fields: dict[str, Any], **common: Any) -> Snapshot:
    page, number = _count(fields, "page"), _count(fields, "pages")
    _require(page < number, f"there is no page {page} of {number}")
    changes = _changes(fields)
    _require(changes.reset == (page == 0), "the first page of a snapshot resets, and no other")
    return Snapshot(page, number, changes, **common)


def _attach(fields: dict[str, Any], **common: Any) -> Attach:
    hz = _number(fields, "hz")
    _require(hz > 0, f"'hz' cannot be {hz}")
    return Attach(_get(fields, "token", str), hz, **common)


def _command(fields: dict[str, Any], **common: Any) -> Command:
    verb = _get(fields, "verb", str)
    _require(len(verb) <= _LONGEST_VERB, "'verb' of a frame is too long")
    return Command(_count(fields, "id"), drawable(verb), _count(fields, "number"), **common)


def _reply(fields: dict[str, Any], **common: Any) -> Reply:
    return Reply(_count(fields, "id"), _get(fields, "done", bool), drawable(_get(fields, "text", str)), **common)


_DECODERS: dict[str, Callable[..., Frame]] = {
    "attach": _attach,
    "command": _command,
    "reply": _reply,
    "hello": _hello,
    "snapshot": _snapshot,
    "delta": lambda fields, **common: Delta(_changes(fields), **common),
    "gap": lambda fields, **common: Gap(_count(fields, "dropped"), **common),
    "bye": lambda fields, **common: Bye(drawable(_get(fields, "reason", str)), **common),
}
