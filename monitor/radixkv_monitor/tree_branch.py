"""A node of the shown tree with the sums of its descendants, the orders of its children, and the filter of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor.block_map import count_blocks

TOP = 0
"""The id of the parent of all roots; no node has it."""
NOT_ON_HOST = (0, 0)
"""The host nodes and host blocks that a node of the pool counts for itself."""
NO_CHILDREN: dict[int, Branch] = {}
"""The children of every leaf. It is shared to save memory, and never changes."""


class Branch:
    """A node and its descendants; `nodes`, `tokens`, `blocks`, `matching` and `newest` are of all of them.

    `matching` counts nodes that match the filter, and `newest` is the latest time of use. A block in which a node ends
    and a child continues counts for the node, not for the child. `blocks` are the pool's. `host_nodes` and
    `host_blocks` are the nodes on the host among them, and their blocks.
    """

    __slots__ = (
        "blocks", "children", "host_blocks", "host_nodes", "is_match", "matching", "newest", "nodes", "number", "order",
        "own_blocks", "own_host", "parent", "record", "tokens",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.record: NodeRecord | None = None  # None for the top
        self.parent: Branch | None = None
        self.children = NO_CHILDREN
        self.order: list[Branch] | None = None  # the children as they are shown; None if unknown
        self.nodes = self.tokens = self.blocks = self.own_blocks = self.matching = 0
        self.host_nodes = self.host_blocks = 0
        self.own_host = NOT_ON_HOST
        self.is_match = False
        self.newest = 0.0

    @property
    def node(self) -> NodeRecord:
        """The record; only the top has none."""
        assert self.record is not None
        return self.record

    @property
    def is_root(self) -> bool:
        """Return whether it is a namespace."""
        return self.record is not None and self.record.parent == TOP

    def up(self) -> Iterator[Branch]:
        """Yield the ancestors, nearest first, up to the top if the branch is linked to it."""
        branch = self.parent
        while branch is not None:
            yield branch
            branch = branch.parent

    def adopt(self, child: Branch) -> None:
        """Add a child."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.number] = child
        child.parent = self

    @property
    def namespace(self) -> str | None:
        """The namespace of the branch. O(depth)."""
        branch = self
        while branch.parent is not None and branch.parent.record is not None:
            branch = branch.parent
        return branch.record.namespace if branch.record is not None else None


Key = Callable[[Branch], tuple[float, int]]

SORTS: dict[str, Key] = {
    "birth": lambda branch: (branch.node.born, branch.node.id),
    "recency": lambda branch: (-branch.newest, branch.number),
    "size": lambda branch: (-branch.node.tokens, branch.node.id),
    "reused": lambda branch: (-(branch.node.reused or 0), branch.node.id),
    "ended-here": lambda branch: (-branch.node.hits, branch.node.id),
    "subtree": lambda branch: (-branch.tokens, branch.node.id),
}
"""The orders of children, applied below each node separately. The first one is the default, because it is stable."""
SUMS = ("recency", "subtree")
"""The orders that depend on descendants; the others depend on a node's own record only."""


def leaf(node: NodeRecord) -> Branch:
    """Return a branch of one node that matches, without its blocks."""
    branch = Branch(node.id)
    branch.record, branch.nodes, branch.tokens, branch.newest = node, 1, node.tokens, node.used
    branch.is_match, branch.matching = True, 1
    return branch


def descending(top: Branch) -> list[Branch]:
    """Return the branches below the top and the top itself, parents before their children."""
    order, stack = [], [top]
    while stack:
        branch = stack.pop()
        order.append(branch)
        stack += branch.children.values()
    return order


def ordered(branch: Branch, key: Key) -> list[Branch]:
    """Return the children in the order of `key`."""
    children = list(branch.children.values())
    if len(children) > 1:
        children.sort(key=key)
    return children


def add_to_parent(branch: Branch) -> None:
    """Count the branch's own blocks, and add its sums to its parent's."""
    assert branch.parent is not None
    branch.own_blocks = own_blocks(branch)
    branch.blocks += branch.own_blocks
    if branch.node.residence == "host":
        branch.own_host = (1, count_blocks(branch.node.blocks))
        branch.host_nodes += branch.own_host[0]
        branch.host_blocks += branch.own_host[1]
    parent = branch.parent
    parent.nodes += branch.nodes
    parent.tokens += branch.tokens
    parent.blocks += branch.blocks
    parent.matching += branch.matching
    parent.host_nodes += branch.host_nodes
    parent.host_blocks += branch.host_blocks
    parent.newest = max(parent.newest, branch.newest)


def own_blocks(branch: Branch) -> int:
    """Count the branch's own blocks of the pool, without a first block in which its parent ends."""
    node = branch.node
    if node.residence == "host":
        return 0
    parent = None if branch.parent is None else branch.parent.record
    above = () if parent is None else parent.blocks
    goes_on = bool(node.blocks and above) and above[-2] + above[-1] - 1 == node.blocks[0]
    return count_blocks(node.blocks) - goes_on


# ---- the filter


STATES = ("active", "cached", "pinned", "done", "host")
FILTER_EXAMPLES = "team-a  session:12  ids:15,42  min:500  reused:20  active | cached | pinned | done | host"


class InvalidFilter(ValueError):
    """A filter that cannot be parsed; the message says why, and which terms are allowed."""


def states_of(node: NodeRecord) -> frozenset[str]:
    """Return the node's states: active, cached or host; pinned if a pin ends here; done if its user said so.

    "host" is a node in host memory; the two others are nodes of the pool.
    """
    states = {"host" if node.residence == "host" else "active" if node.locks else "cached"}
    if node.pins:
        states.add("pinned")
    if node.demoted:
        states.add("done")
    return frozenset(states)


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """All of these must match; empty fields match every node."""

    words: tuple[str, ...] = ()  # in the namespace or the text
    sessions: frozenset[int] = field(default_factory=frozenset)
    ids: tuple[int, ...] = ()  # a run within the first token ids
    least: int = 0  # tokens
    least_reused: int = 0  # requests that found the node in the cache
    states: frozenset[str] = field(default_factory=frozenset)  # any of them

    def matches(self, node: NodeRecord, namespace: str | None, session: int | None) -> bool:
        """Return whether a node matches, by its namespace and the session that held it last. A root matches only by its
        name.
        """
        if not node.tokens and (self.ids or self.least or self.least_reused or self.states or self.sessions):
            return False
        if self.sessions and session not in self.sessions:
            return False
        if node.tokens < self.least or (node.reused or 0) < self.least_reused:
            return False
        if self.states and self.states.isdisjoint(states_of(node)):
            return False
        if self.ids and not _has_run(node.head, self.ids):
            return False
        searched = f"{namespace or 'default'}\n{node.text or ''}".lower()
        return all(word in searched for word in self.words)


def parse_filter(line: str) -> NodeFilter | None:
    """Parse a line; None if it is empty. InvalidFilter names the term that is wrong."""
    terms = line.lower().split()
    if not terms:
        return None
    words: list[str] = []
    ids: tuple[int, ...] = ()
    sessions, least, least_reused, states = set[int](), 0, 0, set[str]()
    for term in terms:
        name, colon, value = term.partition(":")
        if not colon:
            states |= {term} & set(STATES)
            words += [] if term in STATES else [term]
        elif name in ("session", "s"):
            sessions.add(_number(term, value))
        elif name in ("ids", "id"):
            ids = tuple(_number(term, part) for part in value.split(","))
        elif name in ("min", "tokens"):
            least = _number(term, value)
        elif name == "reused":
            least_reused = _number(term, value)
        elif name in ("ns", "namespace"):
            words.append(value)
        else:
            raise InvalidFilter(
                f"unknown filter {term!r}; use words, session:N, ids:N,N, min:N, reused:N, {', '.join(STATES)}"
            )
    return NodeFilter(tuple(words), frozenset(sessions), ids, least, least_reused, frozenset(states))


def _number(term: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidFilter(f"{term!r}: {value!r} is not a whole number") from None


def _has_run(head: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return any(head[at : at + len(ids)] == ids for at in range(len(head) - len(ids) + 1))
