"""How many requests found the tokens of a node in the cache: counted while a change tracker is attached.

A node has a map `Reuse` from positions to counts, or None. A position is the end of the part of the node that these
requests found. Requests that found text below the node are counted at the node's own end. So the sum is the number of
requests that found the node or its first tokens, and it stays exact when nodes are split, joined and trimmed.

A request costs one count at each node of its path. A node has at most one position for each of its tokens, and usually
one for each turn of a conversation.
"""

from __future__ import annotations

Reuse = dict[int, int]


def count(reuse: Reuse | None, end: int, requests: int = 1) -> Reuse:
    """Count requests up to the position `end`, and return the map, which is new if there was none.

    >>> count(count(None, 40), 64)
    {40: 1, 64: 1}
    """
    reuse = {} if reuse is None else reuse
    found = reuse.get(end, 0) + requests
    if found:
        reuse[end] = found
    else:
        reuse.pop(end, None)
    return reuse


def total(reuse: Reuse | None) -> int:
    """Return the number of requests that found at least the first token."""
    return sum(reuse.values()) if reuse else 0


def split(reuse: Reuse | None, cut: int) -> tuple[Reuse | None, Reuse | None]:
    """Return the maps of the parts before and after the position `cut`. O(positions).

    >>> split({40: 2, 64: 3}, 50)
    ({40: 2, 50: 3}, {64: 3})
    """
    if not reuse:
        return None, None
    upper = {end: found for end, found in reuse.items() if end < cut}
    lower = {end: found for end, found in reuse.items() if end > cut}
    return count(upper, cut, total(reuse) - total(upper)), lower or None


def join(upper: Reuse | None, cut: int, lower: Reuse | None) -> Reuse | None:
    """Undo a split at `cut`: requests that found the lower part were counted at the end of the upper one too.

    O(positions).

    >>> join({40: 2, 50: 4}, 50, {64: 3})
    {40: 2, 50: 1, 64: 3}
    """
    return count(upper, cut, -total(lower)) | lower if lower else upper
