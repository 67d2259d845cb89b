"""Telemetry frames, and their encoding as bytes.

A frame is a big-endian u32 length, then a msgpack map {"v": 1, "t": type, "seq": n, "ts": time, ...}.
`docs/telemetry_protocol.md` describes the format. The decoder checks everything that it reads: any fault raises
ProtocolError, and the memory of one frame is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from math import isfinite
from typing import Any, NamedTuple

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

    def check(self) -> None:
        """Raise ProtocolError for values that a frame of this kind cannot have."""


@dataclass(frozen=True, slots=True)
class Attach(Frame):
    """The first frame that a client sends: `hz` is the requested rate of deltas; TCP requires the token."""

    token: str = ""
    hz: float = 4.0

    def check(self) -> None:
        """Refuse a rate that is not positive."""
        _require(self.hz > 0, f"'hz' cannot be {self.hz}")


@dataclass(frozen=True, slots=True)
class Command(Frame):
    """A command of a client whose hello allowed `control`: one of `command_queue.VERBS`. `id` names its reply."""

    id: int
    verb: str
    number: int

    def check(self) -> None:
        """Refuse a long verb."""
        _require(len(self.verb) <= _LONGEST_VERB, "'verb' of a frame is too long")


@dataclass(frozen=True, slots=True)
class Reply(Frame):
    """The end of the command `id`: whether it was executed, and one sentence on its effect, or on why it had none."""

    id: int
    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class Hello(Frame):
    """The first frame of every connection and recording: the facts of the engine."""

    facts: EngineFacts

    def check(self) -> None:
        """Refuse sizes for which a monitor would need too much memory, or by which it could not divide."""
        facts = self.facts
        _require(0 < facts.num_blocks <= MOST_POOL, f"a pool cannot have {facts.num_blocks} blocks")
        _require(facts.host_blocks <= MOST_POOL, f"host memory cannot have {facts.host_blocks} blocks")
        _require(facts.block_size > 0, f"a block cannot have {facts.block_size} tokens")


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

    def check(self) -> None:
        """Refuse a page that there is not."""
        _require(self.page < self.pages, f"there is no page {self.page} of {self.pages}")
        _require(self.changes.reset == (self.page == 0), "the first page of a snapshot resets, and no other")


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
    name = type(frame).__name__.lower()
    values: dict[str, Any] = {"v": VERSION, "t": name}
    for attribute, key, form in _FIELDS[type(frame)]:
        values[key] = form.write(getattr(frame, attribute))
    body: bytes = msgpack.packb(values, default=_plain)
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
        try:
            while self._broken is None and (body := self._next_body()) is not None:
                yield _frame(body)
        except ProtocolError as error:
            self._broken = error
            self._bytes.clear()
        if self._broken is not None:
            raise self._broken

    def _next_body(self) -> bytes | None:
        if len(self._bytes) < PREFIX:
            return None
        length = int.from_bytes(self._bytes[:PREFIX], "big")
        _require(
            length <= self._limit,
            f"a frame claims {length} bytes, and {self._limit} is the cap: this is not our protocol",
        )
        end = PREFIX + length
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[PREFIX:end])
        del self._bytes[:end]
        return body


def _frame(body: bytes) -> Frame:
    """Decode the body of a frame. Raises ProtocolError for any fault."""
    try:
        values = _unpack(body)
        _require(isinstance(values, dict), "a frame is a map")
        version = _value(values.get("v"), "v", int)
        _require(version == VERSION, f"this speaks version {VERSION}, the other side {version}: use the same release")
        name = _value(values.get("t"), "t", str)
        _require(name in _FRAMES, f"there are no {name[:40]!r} frames in version {VERSION}")
        kind = _FRAMES[name]
        frame = kind(**{attribute: form.read(values.get(key), key) for attribute, key, form in _FIELDS[kind]})
        frame.check()
        return frame
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


def _value(value: Any, key: str, *kinds: type) -> Any:
    if type(value) not in kinds:  # not `_require`: formatting a long body takes longer than everything else
        raise ProtocolError(f"{key!r} of a frame cannot be {str(value)[:40]!r}")
    return value


def _count(value: Any, key: str) -> int:
    count: int = _value(value, key, int)
    _require(0 <= count <= MOST_INT, f"{key!r} of a frame cannot be {count}")
    return count


def _number(value: Any, key: str) -> float:
    _require(isfinite(_value(value, key, float, int)), f"{key!r} of a frame cannot be {value}")
    return float(value)


def _flag(value: Any, key: str) -> bool:
    return bool(_value(value, key, bool))


def _text(value: Any, key: str) -> str:
    return drawable(_value(value, key, str))


def _facts(value: Any, key: str) -> EngineFacts:
    return EngineFacts.unpack(_value(value, key, tuple))


def _body(changes: Changes) -> dict[str, Any]:
    """Return the changes by name, without those that are empty."""
    body: dict[str, Any] = {"time": changes.time}
    for name in _PARTS:
        if (value := getattr(changes, name)) != getattr(_NOTHING, name):
            body[name] = [each.pack() for each in value] if name in RECORDS else value
    if changes.what_if is not None:
        body["what_if"] = json.dumps(changes.what_if)  # a text: older readers refuse frames with more maps
    return body


_NOTHING = Changes(0.0)
_PARTS = ("reset", "stats", *LISTS, "next_victims", "what_if")


def _changes(value: Any, key: str) -> Changes:
    body = _value(value, key, dict)
    parts = {name: _part(name, body[name]) for name in _PARTS if name in body}
    return Changes(_number(body.get("time"), "time"), **parts)


def _part(name: str, value: Any) -> Any:
    match name:
        case "reset":
            return _flag(value, name)
        case "what_if":
            return _what_if(_value(value, name, str))
        case "stats":
            for key, number in _value(value, name, dict).items():
                _number(number, key)
            return value
    kinds = set(map(type, _value(value, name, tuple)))
    if name in RECORDS:
        _require(kinds <= {tuple}, f"{name!r} is a list of records")
        return tuple(map(RECORDS[name].unpack, value))
    _require(kinds <= {int} and min(value, default=0) >= 0, f"{name!r} is a list of ids")
    return value


def _what_if(text: str) -> dict[str, Any]:
    from radixkv.telemetry.what_if import SIZES, WhatIfReport  # numpy takes 0.1 s, which `radixkv ps` does not need

    report = WhatIfReport.from_fields(json.loads(text))
    for each in (report.recent, report.since_load):
        counts = (report.pool_blocks, report.dropped, *astuple(each)[:-1], *each.hit_tokens)
        right = all(type(count) is int and 0 <= count <= MOST_INT for count in counts)
        _require(right and len(counts) == 5 + len(SIZES), "the counts of a curve are out of range")
    return replace(report, reasons=tuple(drawable(str(each)) for each in report.reasons)).as_fields()


class _Form(NamedTuple):
    """How the values of a type are read from a frame, and written into one."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


_FORMS = {
    "int": _Form(_count),
    "float": _Form(_number),
    "bool": _Form(_flag),
    "str": _Form(_text),
    "EngineFacts": _Form(_facts, EngineFacts.pack),
    "Changes": _Form(_changes, _body),
}
_KEYS = {"facts": "engine", "changes": "body"}
"""The keys of fields that have another name in a frame."""
_FRAMES: dict[str, type[Frame]] = {
    kind.__name__.lower(): kind for kind in (Attach, Command, Reply, Hello, Snapshot, Delta, Gap, Bye)
}


_FIELDS = {
    kind: [(each.name, _KEYS.get(each.name, each.name), _FORMS[str(each.type)]) for each in fields(kind)]
    for kind in _FRAMES.values()
}
"""The name, the key and the form of each field of a frame."""
