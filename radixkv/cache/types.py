"""What a sequence is opened for. Knows no more than the words; PrefixCache.open says what follows from each.

Why a prefix was found, or not: the miss explainer's answer. Knows what one namespace shows of itself.

Counters that only grow, and the frozen picture of them that callers get. Knows numbers only.

A node of the radix tree: a run of tokens, its blocks, who holds it. Knows no rule: the tree keeps those.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from radixkv.cache.tokens import WIDTH

if TYPE_CHECKING:
    from radixkv.cache.eviction import Entry
    from radixkv.cache.ghosts import Owner
    from radixkv.cache.predictive.access_records import AccessRecord

# A request; a request that comes back after it was preempted; a look at what is cached.
Purpose = Literal["request", "resume", "audit"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


Reason = Literal["full", "never_seen", "diverged", "evicted", "limit"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `open` would find now, and why it stops there. `str()` is one plain sentence."""

    tokens: int  # asked for
    matched: int  # longest cached prefix
    length: int  # what `open` would hold: `matched`, but at most `limit`
    reason: Reason
    diverged_at: int | None = None  # the first token that differs from what is cached there
    evicted_tokens: int = 0  # how many more would have matched
    evicted_ago: float | None = None  # seconds since the first of them went
    pressure: str | None = None  # what they made room for

    def __str__(self) -> str:
        head = f"{self.length} of {self.tokens} tokens are cached"
        match self.reason:
            case "full":
                return f"{head}: the whole prompt."
            case "limit":
                return f"{head}: {self.matched} match, held back by limit={self.length}."
            case "evicted":
                return (
                    f"{head}: the next {self.evicted_tokens} were evicted {self.evicted_ago:.1f} s ago {self.pressure}."
                )
            case "diverged":
                return f"{head}: at token {self.diverged_at} the prompt diverges from what is cached."
            case "never_seen":
                return f"{head}: what follows was never seen (or went so long ago that it is forgotten)."


class Counters:
    """What the cache counts as it goes; see CacheStats for the meanings."""

    __slots__ = (
        "closed_sequences",
        "committed_tokens",
        "copied_blocks",
        "evicted_blocks",
        "evicted_tokens",
        "hit_tokens",
        "opened_sequences",
        "query_tokens",
        "regret_tokens",
    )

    def __init__(self) -> None:
        self.query_tokens = self.hit_tokens = self.committed_tokens = self.regret_tokens = 0
        self.evicted_blocks = self.evicted_tokens = self.copied_blocks = 0
        self.opened_sequences = self.closed_sequences = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache at one moment: counters, which only grow, and gauges: free + cached + held = num_blocks."""

    query_tokens: int  # asked for in `open`, once each
    hit_tokens: int  # of these, found in the cache
    committed_tokens: int  # computed by users and committed
    evicted_blocks: int  # freed to make room
    evicted_tokens: int
    copied_blocks: int  # copy-on-write instructions handed out
    regret_tokens: int  # asked for again after they were evicted
    opened_sequences: int
    closed_sequences: int
    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int  # in the tree, held by nobody: evictable
    held_blocks: int  # of open sequences, plans and pins
    pinned_blocks: int  # part of held_blocks
    nodes: int  # of the tree, roots not counted
    leaves: int  # evictable ones
    namespaces: int
    ghosts: int  # evicted runs that are remembered

    @property
    def sequences(self) -> int:
        """Sequences that are open now."""
        return self.opened_sequences - self.closed_sequences

    @property
    def hit_rate(self) -> float:
        """hit_tokens / query_tokens; 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


NO_CHILDREN: dict[bytes, Node] = {}


class Node:
    """A run of tokens and its blocks."""

    __slots__ = (
        "blocks",
        "born",
        "born_at",
        "children",
        "demoted",
        "direct_holders",
        "eviction_key",
        "ghost_owner",
        "hits",
        "id",
        "key",
        "locks",
        "may_share_any_block",
        "parent",
        "priority",
        "shown",
        "start",
        "tick",
        "use",
        "used_at",
        "worth_key",
    )

    def __init__(self, id: int, parent: Node | None, start: int, key: bytearray, blocks: array[int]) -> None:
        self.id = id
        self.ghost_owner: Owner = (
            id  # the owner of the ghosts that hang here; between two changes of it the node only grows
        )
        self.parent = parent
        self.start = start
        self.key = key
        self.blocks = blocks
        self.children = NO_CHILDREN  # first token -> child; made on demand
        self.locks = 0
        self.direct_holders = 0
        self.tick = 0
        self.born = 0
        self.used_at = self.born_at = 0.0  # as tick and born, on a clock: kept only while somebody watches
        self.hits = 0
        self.priority = 0
        self.demoted = False
        self.may_share_any_block = False  # a fork may share any of its blocks, not only the first and the last
        self.shown = False  # to whoever watches: see `changes`
        self.eviction_key: tuple[int, bool, int, int, Entry] | None = None
        self.worth_key: tuple[int, bool, float, int, Entry] | None = None
        self.use: AccessRecord | None = None  # kept only by a policy that learns, as its seat

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.key) // WIDTH

    def boundary(self) -> array[int]:
        """The blocks that it may share with others."""
        blocks = self.blocks
        return blocks if self.may_share_any_block or len(blocks) < 3 else blocks[:: len(blocks) - 1]
