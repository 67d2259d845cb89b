"""The index of a folder: a table of (parent record, tokens of a block) to (slot, checksum of the image).

Tokens are compared, never only hashed. The record of a namespace is the parent of its first blocks, and has no image.
A record has a checksum of its own, which binds its text to its slot: a database does not detect most flipped bits. A
record that fails it is dropped, with all records after it.
"""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import Hashable, Iterable
from math import inf
from pathlib import Path
from random import Random
from struct import error, pack
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

VERSION = 1
ROOT = 0
"""The parent of the records of namespaces."""

NO_SLOT = -1
_TABLE = """
create table record(
    id integer primary key, parent integer not null, tokens blob not null, slot integer not null,
    image integer not null, checksum integer not null, used real not null, children integer not null
) strict;
create unique index text on record(parent, tokens);
create index leaf on record(used) where children = 0;
"""
_BELOW = """
with recursive below(id) as (values(?) union select record.id from record join below on record.parent = below.id)
select id, slot from record where id in below
"""


class Damaged(Exception):
    """A record, or its image, differs from what was written: the record with this id is to be dropped."""

    def __init__(self, record: int) -> None:
        super().__init__(f"record {record} is damaged")
        self.record = record


class Record(NamedTuple):
    """A block of a text: the image lies in `slot`, and `image` is its checksum."""

    id: int
    slot: int
    image: int


def encode_namespace(value: Hashable) -> bytes | None:
    """Encode a namespace so that equal values are equal; None for one that stays in memory.

    Encoded are None, str, bytes, int, bool and tuples of them, but no subclasses. In memory 1.0 and 1 are equal, and
    the one that came first names the namespace.

    >>> encode_namespace(("tenant", 1)) == encode_namespace(("tenant", True)), encode_namespace(1.0) is None
    (True, True)
    """
    try:
        encoded = ascii(_plain(value)).encode()
        return encoded if decode_namespace(encoded) == value else None
    except (TypeError, ValueError, RecursionError, MemoryError):  # too deep, or an int of thousands of digits
        return None


def decode_namespace(encoded: bytes) -> Hashable:
    """Return the namespace of a code."""
    value: Hashable = ast.literal_eval(encoded.decode())
    return value


def _plain(value: Hashable) -> Hashable:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if value is not None and type(value) not in (bool, int, str, bytes):
        raise TypeError
    return int(value) if type(value) is bool else value


class Index:
    """The records of one folder; a connection is used by one thread at a time. Raises sqlite3.Error.

    Changes are durable after `commit`.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        """Open a database, and create it if it is new and this connection `writes`.

        Raises sqlite3.DatabaseError for a file that is none, or that has another version.
        """
        self._db = sqlite3.connect(path, isolation_level="IMMEDIATE", check_same_thread=False, timeout=5.0)
        try:
            self._db.execute("pragma mmap_size = 0")
            if writes:
                self._db.execute("pragma journal_mode = wal")
                self._db.execute("pragma synchronous = full")
                self._db.execute("pragma secure_delete = on")
            (version,) = self._db.execute("pragma user_version").fetchone()
            if not version and writes:
                self._db.executescript(f"begin; {_TABLE} pragma user_version = {VERSION}; commit;")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"version {version} of the index, not {VERSION}")
            (self._last,) = self._db.execute("select coalesce(max(id), 0) from record").fetchone()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close; a connection that writes also empties the log of changes."""
        self._db.close()

    def __len__(self) -> int:
        """How many blocks have records. O(records)."""
        (count,) = self._db.execute("select count(*) from record where slot >= 0").fetchone()
        return int(count)

    # ---- reading

    def find(self, parent: int, tokens: bytes) -> Record | None:
        """Return the record of the block `tokens` after a parent; raises Damaged. O(log records)."""
        query = "select id, slot, image, checksum from record where parent = ? and tokens = ?"
        row = self._db.execute(query, (parent, tokens)).fetchone()
        if row is None:
            return None
        found = Record(*row[:3])
        try:
            is_right = row[3] == _checksum(found, parent, tokens)
        except (error, TypeError):  # a flipped bit may change the type of a cell
            is_right = False
        if not is_right:
            raise Damaged(found.id)
        return found

    def holds(self, record: Record) -> bool:
        """Whether a record is still there."""
        query = "select 1 from record where id = ? and slot = ? and image = ?"
        return self._db.execute(query, record).fetchone() is not None

    def slots(self) -> NDArray[np.int64]:
        """The slots of all records. O(records)."""
        rows = self._db.execute("select slot from record where slot >= 0 and typeof(slot) = 'integer'").fetchall()
        return np.fromiter((slot for (slot,) in rows), np.int64, len(rows))

    def random_text(self, rng: Random) -> list[bytes]:
        """Return the encoded namespace and the blocks of a text that ends at a random record; empty if there is none.

        Raises Damaged. O(blocks * log records).
        """
        (last,) = self._db.execute("select coalesce(max(id), 0) from record").fetchone()
        query, text = "select id from record where id >= ? and slot >= 0 limit 1", list[bytes]()
        row = self._db.execute(query, (rng.randint(0, last),)).fetchone()
        while row is not None:
            row = self._db.execute("select parent, tokens from record where id = ?", row[:1]).fetchone()
            if row is not None:
                self.find(*row)
                text.append(row[1])
                if row[0] == ROOT:
                    return text[::-1]
        return []  # none, or its namespace is missing

    # ---- writing: by one thread

    def add(self, parent: int, tokens: bytes, slot: int, image: int, now: float) -> Record:
        """Add the record of a block; no number is given twice."""
        self._last += 1
        record = Record(self._last, slot, image)
        fields = "(id, parent, tokens, slot, image, checksum, used, children)"
        row = (record.id, parent, tokens, slot, image, _checksum(record, parent, tokens), now)
        self._db.execute(f"insert into record {fields} values (?, ?, ?, ?, ?, ?, ?, 0)", row)
        self._db.execute("update record set children = children + 1 where id = ?", (parent,))
        return record

    def touch(self, uses: Iterable[tuple[float, int]]) -> None:
        """Note uses of records: a time and a record each."""
        self._db.executemany("update record set used = max(used, ?) where id = ?", uses)

    def evict(self, count: int, keep: int, before: float = inf) -> list[int]:
        """Delete up to `count` leaves with images that were last used up to a time, and return their slots.

        They go in order of their last use, except record `keep`. A record whose children are all deleted is a leaf.
        Namespaces without records go, too.
        """
        freed: list[int] = []
        query = "select id from record where children = 0 and id != ? and used <= ? order by used limit 1"
        while len(freed) < count and (row := self._db.execute(query, (keep, before)).fetchone()):
            freed += self.drop(row[0])
        return freed

    def drop(self, record: int) -> list[int]:
        """Delete a record and all records after it; returns their slots."""
        rows = self._db.execute(_BELOW, (record,)).fetchall()
        query = "update record set children = children - 1 where id = (select parent from record where id = ?)"
        self._db.execute(query, (record,))
        self._db.executemany("delete from record where id = ?", [(each,) for each, _ in rows])
        return [slot for _, slot in rows if type(slot) is int and slot >= 0]

    def drop_beyond(self, slots: int) -> None:
        """Delete the records whose slots are not below `slots`, with all records after them."""
        for (each,) in self._db.execute("select id from record where slot >= ?", (slots,)).fetchall():
            self.drop(each)

    def clear(self) -> None:
        """Delete all records."""
        self._db.execute("delete from record")

    def empty_log(self) -> None:
        """Empty the log of committed changes, which has deleted text."""
        (is_busy, _, _) = self._db.execute("pragma wal_checkpoint(truncate)").fetchone()
        if is_busy:
            raise sqlite3.OperationalError("the log of changes is in use")

    def commit(self) -> None:
        """Make all changes durable."""
        self._db.commit()

    def rollback(self) -> None:
        """Undo the changes since the last commit."""
        self._db.rollback()


def _checksum(record: Record, parent: int, tokens: bytes) -> int:
    return crc32(pack("<qqqq", *record, parent), crc32(tokens))
