"""Cut changes into pages that fit into frames. The sizes of records are estimated, never below the real ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from radixkv.telemetry.records import Changes

_log = logging.getLogger(__name__)

PAGE_BYTES = 32 * 1024
"""The target size of a page: far below the limit of a frame, and encoded in half a millisecond."""
LONGEST_LIST = 65_536
LONGEST_TEXT = 16_384
"""The most numbers or characters of one value; longer ones, which no real engine produces, are cut."""

LISTS = ("gone_nodes", "gone_sequences", "nodes", "sequences", "requests", "sessions", "evictions")
_NUMBER, _RECORD = 5, 100  # bytes of a packed block id, and of a record without its lists and texts


def paginate(changes: Changes, pause: Callable[[], None] = lambda: None) -> list[Changes]:
    """Cut changes into pages, at least one, which are applied in order. O(changes); `pause` is called between two
    pages.

    Only the first page resets. Only the last has the stats, the next victims and `what_if`: its reader has everything.
    """
    found: list[dict[str, list[Any]]] = [{}]
    room = PAGE_BYTES
    for name, item in _items(changes):
        size = _size(item)
        if size > room and found[-1]:
            found.append({})
            room = PAGE_BYTES
            pause()
        found[-1].setdefault(name, []).append(_cut(item) if size > LONGEST_TEXT else item)
        room -= size
    cut = [Changes(changes.time, **{name: tuple(items) for name, items in page.items()}) for page in found]  # type: ignore[arg-type]  # the names are LISTS
    cut[0] = replace(cut[0], reset=changes.reset)
    cut[-1] = replace(cut[-1], stats=changes.stats, next_victims=changes.next_victims, what_if=changes.what_if)
    return cut


def _items(changes: Changes) -> Iterator[tuple[str, Any]]:
    for name in LISTS:
        for item in getattr(changes, name):
            yield name, item


def _size(item: Any) -> int:
    """Estimate the packed size in bytes, rather too high."""
    if isinstance(item, int):
        return _NUMBER
    texts = (getattr(item, "namespace", None), getattr(item, "text", None))
    return _RECORD + _NUMBER * len(_runs(item)) + 4 * sum(len(text or "") for text in texts)


def _runs(item: Any) -> tuple[int, ...]:
    blocks = getattr(item, "blocks", ())
    return blocks if isinstance(blocks, tuple) else ()  # an eviction's `blocks` is a count


def _cut(item: Any) -> Any:
    """Cut values that are longer than a frame may hold."""
    shorter: dict[str, Any] = {}
    if len(_runs(item)) > LONGEST_LIST:
        shorter["blocks"] = item.blocks[:LONGEST_LIST]
    for name in ("namespace", "text"):
        if len(getattr(item, name, None) or "") > LONGEST_TEXT // 4:
            shorter[name] = getattr(item, name)[: LONGEST_TEXT // 4]
    if shorter:
        _log.warning("telemetry cuts %s of a %s: longer than a frame may hold", sorted(shorter), type(item).__name__)
    return replace(item, **shorter) if shorter else item
