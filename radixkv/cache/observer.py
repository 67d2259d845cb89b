"""What the cache tells whoever listens: telemetry and recordings hang here. Costs nothing while nobody does."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from radixkv.cache.purpose import Purpose


class Observer(Protocol):
    """Called synchronously, after the fact, with plain numbers; node ids are never used twice.

    It must not call the cache, and must not raise.
    """

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        """A sequence was opened: `hit` of `asked` tokens were cached; only a "request" counts in the stats."""

    def forked(self, sequence: int, parent: int) -> None:
        """A sequence was forked off another."""

    def closed(self, sequence: int, length: int) -> None:
        """A sequence of `length` committed tokens was closed."""

    def rooted(self, node: int, namespace: Hashable) -> None:
        """A namespace has its root now."""

    def uprooted(self, node: int) -> None:
        """Nothing is left below a root, and nobody holds it: it is gone."""

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        """A node was published that covers tokens [start, start + tokens) below `parent`."""

    def grown(self, node: int, tokens: int) -> None:
        """The node's end moved down by `tokens`."""

    def split(self, node: int, upper: int, tokens: int) -> None:
        """The first `tokens` of the node became a new node above it."""

    def merged(self, node: int, upper: int) -> None:
        """The node took over the tokens of `upper`, which is gone."""

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        """The last `tokens` of the node were evicted, which freed `blocks`; `gone` if nothing is left of it."""

    def copied(self, sequence: int, source: int, target: int) -> None:
        """A plan of the sequence copies one block before it writes."""
