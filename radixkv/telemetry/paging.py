"""Changes cut into pages that fit into frames.

Knows roughly how many bytes a record takes. Knows no frame and no wire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from radixkv.telemetry.records import Changes

_log = logging.getLogger(__name__)

PAGE_BYTES = 32 * 1024
"""About how long a page gets at most: far below the cap of a frame, and cut and encoded in half a millisecond."""
LONGEST_LIST = 65_536
LONGEST_TEXT = 16_384
"""Most numbers and characters of one value; what is longer is cut, which no honest engine comes near."""

LISTS = ("gone_nodes", "gone_sequences", "nodes", "sequences", "requests", "sessions", "evictions")
_NUMBER, _RECORD = 5, 100  # bytes of a packed block id, and of a record without its lists and texts


def _never() -> None:
    """Whoever has few pages does not rest between them."""


def paginate(changes: Changes, rest: Callable[[], None] = _never) -> list[Changes]:
    """The same changes in pieces, at least one, to be applied in order. Only the first resets; only the last has
    the stats and the next victims, so a reader that has them has everything. O(changes); `rest` is called between two.
    """
    found: list[dict[str, list[Any]]] = [{}]
    room = PAGE_BYTES
    for name, item in _items(changes):
        size = _size(item)
        if size > room and found[-1]:
            found.append({})
            room = PAGE_BYTES
            rest()
        found[-1].setdefault(name, []).append(_cut(item) if size > LONGEST_TEXT else item)
        room -= size
    cut = [Changes(changes.time, **{name: tuple(items) for name, items in page.items()}) for page in found]  # type: ignore[arg-type]  # the names are LISTS
    cut[0] = replace(cut[0], reset=changes.reset)
    cut[-1] = replace(cut[-1], stats=changes.stats, next_victims=changes.next_victims)
    return cut


def _items(changes: Changes) -> Iterator[tuple[str, Any]]:
    for name in LISTS:
        for item in getattr(changes, name):
            yield name, item


def _size(item: Any) -> int:
    """About its packed bytes, rather too many."""
    if isinstance(item, int):
        return _NUMBER
    texts = (getattr(item, "namespace", None), getattr(item, "text", None))
    return _RECORD + _NUMBER * len(_runs(item)) + 4 * sum(len(text or "") for text in texts)


def _runs(item: Any) -> tuple[int, ...]:
    blocks = getattr(item, "blocks", ())
    return blocks if isinstance(blocks, tuple) else ()  # an eviction's are a count


def _cut(item: Any) -> Any:
    """The record with nothing longer than what a frame may hold."""
    shorter: dict[str, Any] = {}
    if len(_runs(item)) > LONGEST_LIST:
        shorter["blocks"] = item.blocks[:LONGEST_LIST]
    for name in ("namespace", "text"):
        if len(getattr(item, name, None) or "") > LONGEST_TEXT // 4:
            shorter[name] = getattr(item, name)[: LONGEST_TEXT // 4]
    if shorter:
        _log.warning("telemetry cuts %s of a %s: longer than a frame may hold", sorted(shorter), type(item).__name__)
    return replace(item, **shorter) if shorter else item
