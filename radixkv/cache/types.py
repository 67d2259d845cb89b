"""The values that callers exchange with the cache, and the node of its tree.

Results are named tuples or frozen dataclasses. A `Node` holds data only: `radix_tree` keeps its invariants.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from radixkv.cache.namespaces import Namespace
from radixkv.cache.reuse import Reuse
from radixkv.figures import counter, described, gauge
from radixkv.sizing.recurrent_state import StateStep

# A request; a request that comes back after it was preempted; a reader of cached KV that must leave no trace.
Purpose = Literal["request", "resume", "audit"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
Tier = Literal["device", "host"]  # the tier that a node's blocks belong to
KVReason = Literal["full", "never_seen", "diverged", "evicted", "limit"]
Reason = Literal[KVReason, "no_state"]


class Match(NamedTuple):
    """The longest cached prefix."""

    length: int  # tokens
    blocks: npt.NDArray[np.int32]  # [ceil(length / block_size)]; safe to read only while a sequence or pin holds them
    idle_blocks: int  # blocks of the path that are evictable now: opening it takes no more from free + evictable
    matched: int = 0  # tokens with cached KV: more than `length` if a model's recurrent state is kept up to there only
    host: int = 0  # tokens after `matched` with KV in host memory; 0 without that tier
    loadable: int = (
        0  # tokens after `length` that a sequence could load: `host`, or up to the last recurrent state there
    )


class Pressure(NamedTuple):
    """The cause of an eviction: `wanted` blocks were asked for at once when only `free` were free."""

    wanted: int
    free: int

    def __str__(self) -> str:
        return f"to make room for {self.wanted} block{'s' * (self.wanted != 1)} when {self.free} were free"


class WritePlan(NamedTuple):
    """The work to do before `commit`: copy whole blocks (source, target), then write the new tokens' KV to `slots`."""

    slots: npt.NDArray[np.int64]  # [new tokens], block * block_size + offset
    copies: list[tuple[int, int]]  # at most one; a step's copies may run together, in any order, before its writes
    state: StateStep | None = None  # of models with recurrent state


class Load(NamedTuple):
    """A plan whose KV is copied from host memory instead of being computed."""

    plan: WritePlan
    sources: npt.NDArray[np.int64]  # [new tokens], host block * block_size + offset: the KV of `plan.slots`


class CachedRun(NamedTuple):
    """Tokens [start, end) of a cached text."""

    tokens: npt.NDArray[np.int32]  # [end]: the text from its beginning to the end of the run
    start: int
    namespace: Hashable
    blocks: npt.NDArray[np.int32]  # [ceil(end / block_size)] of the text; safe to read only while a sequence holds it


class CachedNode(NamedTuple):
    """A node of the tree, and the cached text that ends with it."""

    tokens: npt.NDArray[np.int32]  # [end]: the text from its beginning to the end of the node; [0] for a root
    start: int  # the position of the node's first token
    namespace: Hashable
    residence: Tier
    locks: int  # holders that end at the node, and locked children; a node with 0 locks is evictable
    children: int  # nodes that follow its end, in any tier


@dataclass(frozen=True, slots=True)
class Hint:
    """Facts about the future of a sequence, given when it is closed."""

    done: bool = False  # evict the unshared tail first
    kind: str | None = None  # why the turn ended ("tool_call", "end_turn", ...), for policies that learn
    output_length: int | None = None  # generated tokens, for policies that learn
    returns_in: float | None = None  # seconds until the session is expected back, for policies that learn
    priority: int = 0  # higher stays longer


@dataclass(frozen=True, slots=True)
class Explanation:
    """The prefix that `open` would find now, and why the match ends there. `str()` is one plain sentence.

    Of the `tokens` asked for, `matched` are cached, and `open` would hold `length`: at most `limit`, and up to a
    recurrent state. `reason` says why the match ends; with "no_state", `kv_reason` says why the cached KV ends.
    `diverged_at` is the first token that differs from the cached text. `evicted_tokens` more would have matched before
    an eviction, which began `evicted_ago` seconds ago for the request for blocks that `pressure` names. `host` tokens
    after `length` could be loaded from host memory, and `reached` tokens have cached KV in memory. An engine with a
    disk could read `disk` more tokens from it. `reloaded_ago` is given where nothing was seen: the model was loaded
    again that many seconds ago, and its KV of before is gone. `prefix` describes a compressed prefix,
    whose slots are the first of the tokens.
    """

    tokens: int
    matched: int
    length: int
    reason: Reason
    diverged_at: int | None = None
    evicted_tokens: int = 0
    evicted_ago: float | None = None
    pressure: str | None = None
    kv_reason: KVReason | None = None
    host: int = 0
    reached: int = 0
    disk: int = 0
    reloaded_ago: float | None = None
    prefix: str = ""

    def __str__(self) -> str:
        head = f"{self.length} of {self.tokens} tokens are cached"
        if self.prefix:
            head += f", with {self.prefix}"
        if self.host:
            head += f", and {self.host} more on the host"
        if self.disk:
            head += f", and {self.disk} more on disk"
        match self.reason:
            case "full":
                return f"{head}: the whole prompt."
            case "limit":
                return f"{head}: {self.matched} match, held back by limit={self.length + self.host}."
            case "no_state":
                kept = self.length + self.host
                return f"{head}: {self.reached} match, but recurrent state is kept up to token {kept} only."
            case "evicted":
                return (
                    f"{head}: the next {self.evicted_tokens} were evicted {self.evicted_ago:.1f} s ago {self.pressure}."
                )
            case "diverged":
                return f"{head}: at token {self.diverged_at} the prompt diverges from what is cached."
            case "never_seen" if self.reloaded_ago is not None:
                return f"{head}: the model was loaded again {self.reloaded_ago:.1f} s ago."
            case "never_seen":
                return f"{head}: what follows was never seen (or went so long ago that it is forgotten)."


_BLOCKS = "Blocks of the pool: free, cached (evictable) or held by requests"


@described
@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache at one moment. Figures of options that are off are 0."""

    query_tokens: int = counter("tokens", "Tokens that were looked up", hidden="radixkv:prompt_tokens counts requests")
    hit_tokens: int = counter("tokens", "Looked up tokens that hit", hidden="radixkv:cached_tokens counts requests")
    committed_tokens: int = counter("tokens", "Committed tokens", hidden="radixkv:computed_tokens counts requests")
    evicted_blocks: int = counter("blocks", "Blocks that were evicted, from the last tier that had their tokens")
    evicted_tokens: int = counter("tokens", "Tokens that were evicted")
    copied_blocks: int = counter("blocks", "Blocks that were copied on write")
    regret_tokens: int = counter("tokens", "Tokens that were requested again after their eviction")
    opened_sequences: int = counter("sequences", "Sequences that were opened", hidden="radixkv:requests_ended has ends")
    closed_sequences: int = counter("sequences", "Sequences that were closed", hidden="radixkv:requests_ended has ends")
    num_blocks: int = gauge("blocks", "Blocks of the pool", hidden="the sum of radixkv:blocks")
    block_size: int = gauge("tokens", "Tokens of a block", hidden="it never changes")
    free_blocks: int = gauge("blocks", _BLOCKS, "blocks", state="free")
    cached_blocks: int = gauge("blocks", _BLOCKS, "blocks", state="cached")
    held_blocks: int = gauge("blocks", _BLOCKS, "blocks", state="held")
    pinned_blocks: int = gauge("blocks", "Held blocks that a pin holds")
    nodes: int = gauge("nodes", "Nodes of the radix tree", "tree_nodes")
    leaves: int = gauge("nodes", "Evictable leaves of the radix tree", "tree_leaves")
    namespaces: int = gauge("namespaces", "Namespaces with cached tokens")
    ghosts: int = gauge("runs", "Evicted runs of tokens that are still recorded")
    state_rows: int = gauge("rows", "Recurrent states that sequences may have", hidden="the sum of radixkv:state_rows")
    state_rows_used: int = gauge("rows", "Recurrent states of open sequences", hidden="in radixkv:state_rows")
    state_slots: int = gauge("slots", "Slots of cached recurrent states", hidden="the sum of radixkv:state_slots")
    state_slots_used: int = gauge("slots", "Cached recurrent states", hidden="in radixkv:state_slots")
    evicted_states: int = counter("states", "Cached recurrent states that were evicted to make room")
    host_blocks: int = gauge("blocks", "Blocks of the second tier", hidden="the sum of radixkv:host_blocks")
    host_free_blocks: int = gauge("blocks", "Free blocks of the second tier", hidden="in radixkv:host_blocks")
    host_nodes: int = gauge("nodes", "Nodes of the radix tree that are resident on the host")
    offloaded_blocks: int = counter("blocks", "Blocks that left the pool and were copied to the host")
    loaded_tokens: int = counter("tokens", "Tokens whose KV was loaded from the host")
    host_evicted_blocks: int = counter(
        "blocks", "Blocks that were evicted on the host to make room there; part of the evicted blocks"
    )
    host_state_slots: int = gauge("slots", "Slots of recurrent states on the host")
    host_state_slots_used: int = gauge("slots", "Recurrent states on the host")

    @property
    def sequences(self) -> int:
        """Sequences that are open now."""
        return self.opened_sequences - self.closed_sequences

    @property
    def hit_rate(self) -> float:
        """hit_tokens / query_tokens; 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


EvictionKey: TypeAlias = "tuple[int, int, int, int, Node]"  # priority, standing, rank, tick; then the leaf itself
NO_CHILDREN: dict[bytes, Node] = {}


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of tokens and its blocks, which belong to one tier. All children of a host node are host nodes."""

    id: int
    parent: Node | None
    start: int  # the position of its first token
    end: int  # the position after its last token
    key: bytearray  # its tokens
    blocks: array[int]
    ghost_owner: int  # names one text: while it stays the same, the node only grows. A root's is its namespace's number
    children: dict[bytes, Node]  # first token -> child of the same tier; `NO_CHILDREN` if there are none
    below: dict[bytes, Node]  # first token -> host child of a device node; `NO_CHILDREN` if there are none
    namespace: Namespace | None = None  # of a root
    residence: Tier = "device"
    locks: int = 0
    direct_holders: int = 0
    tick: int = 0  # of the last use, counted by the eviction index
    born: int = 0  # the tick of its insertion
    used_at: float = 0.0  # as `tick`, in seconds: kept only while a change tracker is attached
    born_at: float = 0.0
    hits: int = 0  # requests that were opened at its end
    reuse: Reuse | None = None  # how many requests found its tokens: kept only while a change tracker is attached
    priority: int = 0  # higher stays longer
    demoted: bool = False  # leaves its tier before other nodes of its priority
    done: bool = False  # demoted by a hint that its text is not needed again: evicted, not offloaded
    announced: int = 0  # the end of its last block that a waiting request would hit, or its own end; 0 for none
    may_share_any_block: bool = False  # with a fork; otherwise only its first and last block can be shared
    eviction_key: EvictionKey | None = None  # its place in an eviction index while it is an unlocked leaf
    policy_data: Any = None  # the eviction policy's own

    @property
    def standing(self) -> int:
        """Its place among the leaves of its priority: 0 if demoted, else 1; 2 more if its last block is announced."""
        return (not self.demoted) + 2 * (0 < self.announced >= self.end)

    def trim_limit(self, blocks: int, size: int) -> int:
        """Return how many blocks, at most `blocks`, to take off the tail at once: first the ones not announced."""
        return min(blocks, -(-(self.end - self.announced) // size)) if 0 < self.announced < self.end else blocks

    def __lt__(self, other: Node) -> bool:
        """Order leaves of equal recency, such as parts of a run that were offloaded at different times."""
        return self.id < other.id


class LeafIndex(Protocol):
    """The part of an eviction index that the tree calls; see `eviction.EvictionIndex`."""

    def __len__(self) -> int: ...

    def at(self, number: int) -> Node:
        """Return a leaf by its number in the order."""

    def touch(self, node: Node) -> None:
        """Note a use."""

    def date(self, node: Node) -> None:
        """Note a use's time."""

    def add(self, node: Node) -> None:
        """Insert an unlocked leaf."""

    def remove(self, node: Node) -> None:
        """Remove a leaf."""

    def inherit(self, parent: Node, child: Node) -> None:
        """Let a new leaf have the uses of the child that was removed."""

    def forget(self, policy_data: Any, start: int) -> None:
        """Note that the text from `start` on of a node is forgotten."""


class Residence(Protocol):
    """The part of a lower tier that the tree calls; see `host.tier.HostTier`."""

    def follow(self, node: Node, raw: bytes, at: int = 0, *, pending: bool = False) -> list[tuple[Node, int]]:
        """Return the nodes along `raw[at:]` after the end of a device node, each with its matching tokens."""

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Yield all nodes of this tier, or those after the end of a device node."""

    def forget_below(self, node: Node) -> None:
        """Drop all nodes of this tier after the end of a device node, without ghosts."""

    def detach(self, node: Node) -> int:
        """Take a leaf of this tier out of the tree. Returns its blocks."""

    def give_back(self, blocks: array[int]) -> None:
        """Free blocks of this tier that have no node any more."""


class NodesById(Protocol):
    """The part of a change tracker that finds nodes; see `change_tracker.ChangeTracker`."""

    def find(self, number: int) -> Node | None:
        """Return the node of an id, None if it is gone."""


@dataclass(slots=True)
class Loading:
    """A load that is pending. The host keeps its blocks unchanged until the sequence commits or closes."""

    start: int  # the length of the sequence before the load
    reads: dict[int, int]  # host block -> the end of the tokens that are read there

    def reaches(self, blocks: Set[int], start: int) -> bool:
        """Whether it reads tokens from `start` on in one of these host blocks."""
        return any(end > start and block in blocks for block, end in self.reads.items())


class OpenSequence(Protocol):
    """The part of a sequence that other modules read; see `sequence.Sequence`."""

    id: int
    node: Node
    loading: Loading | None
    length: int
    cached_length: int
    asked: int
    namespace: Hashable
    purpose: Purpose

    def own_blocks(self) -> array[int]:
        """Return the blocks that the sequence references itself."""

    def reads(self, blocks: Set[int], start: int) -> bool:
        """Say whether it has committed tokens from `start` on in one of these blocks."""
