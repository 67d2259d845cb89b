"""Bytes to frames, as `protocol` writes them.

Knows the wire, and how much a frame may claim. Knows no socket and no file. Believes nothing that it reads: whatever is
wrong with it is a ProtocolError that says so, and a frame costs bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, TypeVar

import msgpack

from radixkv.errors import ProtocolError
from radixkv.telemetry.frames import Attach, Bye, Delta, Frame, Gap, Hello, Snapshot
from radixkv.telemetry.pages import LISTS, LONGEST_LIST, LONGEST_TEXT
from radixkv.telemetry.records import (
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    Record,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
)
from radixkv.telemetry.shapes import MOST_INT
from radixkv.telemetry.texts import drawable

VERSION = 1
MAX_FRAME = 4 * 1024 * 1024
"""The most bytes behind a length."""
MOST_POOL = 2**24
"""The most blocks of an engine that can be told of."""
PREFIX = 4
"""Bytes of a length."""
_MOST_ARRAYS = 65_536  # in one frame: empty ones take 1 byte on the wire, and 80 in memory
_MOST_MAPS = 3  # the frame, its body, its stats
_MOST_STATS = 4096

RECORDS: dict[str, type[Record]] = {
    "nodes": NodeRecord,
    "sequences": SequenceRecord,
    "requests": RequestRecord,
    "sessions": SessionRecord,
    "evictions": EvictionRecord,
}
"""What the lists of changes hold, but for those of ids."""
Kind = TypeVar("Kind")


class Decoder:
    """Bytes in, in any pieces; frames out. Holds less than one frame between two calls."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        """`limit` is the most bytes behind a length."""
        self._limit = limit
        self._bytes = bytearray()
        self._broken: ProtocolError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._bytes)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole with `data`; those not taken come with the next call.

        Raises ProtocolError, behind the frames before it, for bytes that are no frame, and ever after: nobody knows
        where the next frame would begin.
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
    """The frame of a body. ProtocolError for all that can be wrong with it."""
    try:
        said = _unpack(body)
        _demand(isinstance(said, dict), "a frame is a map")
        version = _take(said, "v", int)
        _demand(version == VERSION, f"this speaks version {VERSION}, the other side {version}: use the same release")
        name = _take(said, "t", str)
        _demand(name in _READ, f"there are no {name[:40]!r} frames in version {VERSION}")
        return _READ[name](said, seq=_count(said, "seq"), ts=_number(said, "ts"))
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a frame that makes no sense: {str(error)[:200] or type(error).__name__}") from error


def _unpack(body: bytes) -> Any:
    """The plain values of a body, within bounds: nothing that a few bytes say makes much memory."""
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
        _demand(maps <= _MOST_MAPS, f"a frame has at most {_MOST_MAPS} maps")
        made = dict(pairs)
        _demand(len(made) == len(pairs) and set(map(type, made)) <= {str}, "the keys of a map are texts, once each")
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


def _demand(right: bool, otherwise: str) -> None:
    if not right:
        raise ProtocolError(otherwise)


def _take(said: dict[str, Any], key: str, *kinds: type[Kind]) -> Kind:
    value = said.get(key)
    if type(value) not in kinds:  # no _demand: a body is long, and saying it takes longer than all the rest
        raise ProtocolError(f"{key!r} of a frame cannot be {str(value)[:40]!r}")
    return value  # type: ignore[return-value]  # just looked at


def _count(said: dict[str, Any], key: str) -> int:
    value = _take(said, key, int)
    _demand(0 <= value <= MOST_INT, f"{key!r} of a frame cannot be {value}")
    return value


def _number(said: dict[str, Any], key: str) -> float:
    value = _take(said, key, float, int)
    _demand(isfinite(value), f"{key!r} of a frame cannot be {value}")
    return float(value)


def _tuple(said: dict[str, Any], key: str) -> tuple[Any, ...]:
    return _take(said, key, tuple)


def _changes(said: dict[str, Any]) -> Changes:
    body = _take(said, "body", dict)
    parts: dict[str, Any] = {}
    for name in LISTS:
        if name in body:
            parts[name] = _list(name, _tuple(body, name))
    if "stats" in body:
        parts["stats"] = _stats(_take(body, "stats", dict))
    return Changes(_number(body, "time"), _take(body, "reset", bool) if "reset" in body else False, **parts)


def _list(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    record = RECORDS.get(name)
    if record is not None:
        _demand(set(map(type, values)) <= {tuple}, f"{name!r} is a list of records")
        return tuple(map(record.unpack, values))
    _demand(set(map(type, values)) <= {int} and min(values, default=0) >= 0, f"{name!r} is a list of ids")
    return values


def _stats(said: dict[str, Any]) -> dict[str, float]:
    for key in said:
        _number(said, key)
    return said


def _hello(said: dict[str, Any], **common: Any) -> Hello:
    facts = EngineFacts.unpack(_tuple(said, "engine"))
    # Whoever shows a pool has an entry for each block, and divides by their size.
    _demand(0 < facts.num_blocks <= MOST_POOL, f"a pool cannot have {facts.num_blocks} blocks")
    _demand(facts.block_size > 0, f"a block cannot have {facts.block_size} tokens")
    return Hello(facts, **common)


def _snapshot(said: dict[str, Any], **common: Any) -> Snapshot:
    page, number = _count(said, "page"), _count(said, "pages")
    _demand(page < number, f"there is no page {page} of {number}")
    changes = _changes(said)
    _demand(changes.reset == (page == 0), "the first page of a snapshot resets, and no other")
    return Snapshot(page, number, changes, **common)


def _attach(said: dict[str, Any], **common: Any) -> Attach:
    hz = _number(said, "hz")
    _demand(hz > 0, f"'hz' cannot be {hz}")
    return Attach(_take(said, "token", str), hz, **common)


_READ: dict[str, Callable[..., Frame]] = {
    "attach": _attach,
    "hello": _hello,
    "snapshot": _snapshot,
    "delta": lambda said, **common: Delta(_changes(said), **common),
    "gap": lambda said, **common: Gap(_count(said, "dropped"), **common),
    "bye": lambda said, **common: Bye(drawable(_take(said, "reason", str)), **common),
}
