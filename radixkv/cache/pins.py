"""Pins: prefixes that stay cached until they are released or their time is over.

All pins of a cache together hold at most a budget of blocks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from math import inf

from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.types import Node
from radixkv.errors import PinBudgetExceeded


class Pin:
    """Holds a cached prefix; release() it (or use `with`), or let its ttl end."""

    __slots__ = ("_node", "_pins", "blocks", "complete", "expires", "length")

    def __init__(
        self, pins: Pins | None, node: Node | None, length: int, complete: bool, blocks: int, expires: float | None
    ) -> None:
        self._pins = pins
        self._node = node
        self.length = length  # tokens held: the cached prefix of the text
        self.complete = complete  # whether that is the whole text
        self.blocks = blocks  # of its path, shared ones included
        self.expires = expires  # on the cache's clock

    @property
    def active(self) -> bool:
        """Whether it still holds a prefix."""
        return self._node is not None

    @property
    def node(self) -> Node | None:
        """The node that it holds, for the cache's own modules."""
        return self._node

    def release(self) -> None:
        """Stop holding the prefix; may be called twice, and after the ttl."""
        if self._node is not None and self._pins is not None:
            self._pins.remove(self, self._node)
            self._node = None

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Pins:
    """All pins of a cache."""

    def __init__(self, tree: RadixTree, clock: Callable[[], float], budget: int) -> None:
        self._tree = tree
        self._clock = clock
        self._budget = budget
        self._pins: dict[Pin, Node] = {}
        self._next_expiry = inf  # no pin expires before
        self._counted: tuple[int, int] | None = None  # state of the tree's tables, and the blocks

    def add(self, node: Node, length: int, complete: bool, blocks: int, ttl: float | None) -> Pin:
        """Hold `node` by a new pin."""
        pin = Pin(self, node, length, complete, blocks, None if ttl is None else self._clock() + ttl)
        self._pins[pin] = node
        self._counted = None
        if pin.expires is not None:
            self._next_expiry = min(self._next_expiry, pin.expires)
        self._tree.hold(node)
        self._tree.undo_demote(node)
        return pin

    def remove(self, pin: Pin, node: Node) -> None:
        """Release the hold of a pin on `node`, which counts as a use of it."""
        del self._pins[pin]
        self._counted = None
        self._tree.index.touch(node)
        self._tree.unhold(node)

    def release(self) -> None:
        """Release all pins."""
        for pin in list(self._pins):
            pin.release()

    def release_at(self, node: Node) -> int:
        """Release the pins that end at a node; returns their number. O(pins)."""
        found = [pin for pin, held in self._pins.items() if held is node]
        for pin in found:
            pin.release()
        return len(found)

    def expire(self) -> None:
        """Release the pins whose time is over. O(1) while there are none, else O(pins)."""
        if self._next_expiry < inf and self._next_expiry <= (now := self._clock()):
            for pin in [pin for pin in self._pins if pin.expires is not None and pin.expires <= now]:
                pin.release()
            self._next_expiry = min((pin.expires for pin in self._pins if pin.expires is not None), default=inf)

    def nodes(self) -> list[Node]:
        """The nodes that pins hold, one entry a pin."""
        return list(self._pins.values())

    def by_node(self) -> Counter[int]:
        """How many pins end at each node, by its id. O(pins)."""
        return Counter(node.id for node in self._pins.values())

    def blocks(self) -> set[int]:
        """The blocks of the pinned prefixes, each once. O(pinned blocks)."""
        return set().union(*(self._tree.table(node) for node in self._pins.values()))

    def count(self) -> int:
        """The number of pinned blocks. O(pinned blocks) if it may have changed since the last call, else O(1)."""
        # Pinned nodes are locked: their tables change only where a node takes over a child's copy of its last block.
        if not self._pins:
            return 0
        if self._counted is None or self._counted[0] != self._tree.shared.deduped_tail_blocks:
            self._counted = self._tree.shared.deduped_tail_blocks, len(self.blocks())
        return self._counted[1]

    def refuse_over_budget(self, blocks: array[int]) -> None:
        """Raise PinBudgetExceeded if these blocks and the pinned ones are more than the budget."""
        total = len(self.blocks().union(blocks))
        if total > self._budget:
            raise PinBudgetExceeded(
                f"{total} blocks would be pinned, the budget is {self._budget}: "
                "release pins, or give the cache a larger pin_budget"
            )
