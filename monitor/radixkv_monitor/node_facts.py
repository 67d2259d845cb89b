"""What there is to say of a node: its facts, who holds it, and when eviction would come to it.

Knows records and rows. Knows no screen; every function is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor.account import Account
from radixkv_monitor.formatting import duration, size, some
from radixkv_monitor.runs import count_blocks, runs
from radixkv_monitor.session_tracker import path
from radixkv_monitor.state import State
from radixkv_monitor.tree_rows import Branch

MOST_NAMED = 3
"""How many sequences, children and so on are named one by one."""

RANKS: Mapping[str, Callable[[NodeRecord], float]] = {
    "lru": lambda node: 0,
    "fifo": lambda node: node.born,
    "lfu": lambda node: node.hits,
    "slru": lambda node: node.hits >= 2,
}
"""What a policy looks at before recency, lowest first: as radixkv.cache.eviction's, by records."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The leaves that nobody holds, the next victim first."""

    leaves: tuple[NodeRecord, ...]

    def place(self, node: int) -> int | None:
        """How many go before this one; None if it is not among them."""
        return next((place for place, leaf in enumerate(self.leaves) if leaf.id == node), None)


def eviction_queue(state: State) -> Queue:
    """In which order eviction would take leaves, if nothing changed. O(nodes + leaves log leaves)."""
    parents = {node.parent for node in state.nodes.values()}
    rank = RANKS.get(state.facts.eviction, RANKS["lru"])
    leaves = [node for node in state.nodes.values() if not node.locks and node.parent and node.id not in parents]
    leaves.sort(key=lambda node: (node.priority, not node.demoted, rank(node), node.used, node.id))
    return Queue(tuple(leaves))


def next_to_go(queue: Queue, now: float) -> str:
    """What eviction would take first, in a few words."""
    if not queue.leaves:
        return "nothing is evictable"
    leaf = queue.leaves[0]
    why = "first to go: done" if leaf.demoted else f"idle {duration(now - leaf.used)}"
    return f"next to go: node {leaf.id} ({some(count_blocks(leaf.blocks), 'block')}, {why})"


def holder_name(state: State, sequence: SequenceRecord) -> str:
    """Who a sequence is, for a person."""
    if sequence.request is None:
        return f"sequence {sequence.id}, which no request opened"
    request = state.live.get(sequence.request)
    phase = f" ({request.phase})" if request is not None else ""
    return f"request {sequence.request}, stream {sequence.index}{phase}"


def why_held(state: State, branch: Branch) -> list[str]:
    """Who keeps a node from being evicted, one sentence each; one that says so if nobody does."""
    node = branch.node
    here = [sequence for sequence in state.sequences.values() if sequence.node == node.id]
    reasons = [f"Held by {holder_name(state, sequence)}." for sequence in here[:MOST_NAMED]]
    if len(here) > MOST_NAMED:
        reasons.append(f"Held by {some(len(here) - MOST_NAMED, 'more sequence')} that end here.")
    if node.pins:
        reasons.append("Held by a pin." if node.pins == 1 else f"Held by {node.pins} pins.")
    unknown = node.holders - len(here) - node.pins
    if unknown > 0:
        reasons.append(f"Held by {some(unknown, 'holder')} that this monitor was not told of.")
    return reasons + _held_from_below(state, branch) or [_not_held(branch)]


def _held_from_below(state: State, branch: Branch) -> list[str]:
    locked = [child for child in branch.children.values() if child.node.locks]
    if not locked:
        return []
    through = [
        sequence
        for sequence in state.sequences.values()
        if sequence.node != branch.node.id and branch.node.id in path(state, sequence.node)
    ]
    children = ", ".join(str(child.node.id) for child in locked[:MOST_NAMED])
    more = f" and {len(locked) - MOST_NAMED} more" if len(locked) > MOST_NAMED else ""
    noun = "a locked child, node" if len(locked) == 1 else "locked children, nodes"
    named = "; ".join(f"{holder_name(state, each)}, at node {each.node}" for each in through[:MOST_NAMED])
    rest = f"; {len(through) - MOST_NAMED} more" if len(through) > MOST_NAMED else ""
    return [f"Held by {noun} {children}{more}" + (f": {named}{rest}." if named else ": by a pin below.")]


def _not_held(branch: Branch) -> str:
    if branch.is_root:
        return "A namespace: it holds no blocks itself."
    if branch.children:
        return f"Held by nobody: evictable once what is below it is gone ({some(branch.nodes - 1, 'node')})."
    return "Held by nobody: evictable now."


def node_detail(state: State, branch: Branch, queue: Queue) -> Account:
    """All that there is to say of a node."""
    node = branch.node
    if branch.is_root:
        return _account_of_root(state, branch)
    notes = why_held(state, branch)
    place = queue.place(node.id)
    if place is not None:
        notes.append(
            f"Eviction takes it next, block by block off its end ({state.facts.eviction})."
            if place == 0
            else f"Eviction takes {some(place, 'leaf') if place == 1 else f'{place:,} leaves'} before it."
        )
    if node.demoted:
        notes.append("Its user said that it is done: first to go.")
    return Account(f"Node {node.id}", _facts(state, branch), notes)


def _facts(state: State, branch: Branch) -> list[tuple[str, str]]:
    node, per = branch.node, state.facts.bytes_per_block
    blocks = count_blocks(node.blocks)
    facts = [
        ("tokens", f"{node.start:,} to {node.start + node.tokens:,} ({node.tokens:,})"),
        ("namespace", branch.namespace or "default"),
        ("references", f"{node.holders} here, {node.locks - node.holders} below"),
        ("hits", f"{node.hits:,}"),
        ("last used", f"{duration(state.now - node.used)} ago"),
        ("born", f"{duration(state.now - node.born)} ago"),
        ("blocks", f"{blocks:,} ({size(blocks * per)})"),
        ("block ids", block_ids(node)),
        ("parent", str(node.parent)),
        ("below", _below(branch)),
        ("begins with", " ".join(map(str, node.head)) + (" …" if node.tokens > len(node.head) else "")),
    ]
    if node.priority:
        facts.append(("priority", str(node.priority)))
    if node.text is not None:
        facts.append(("text", repr(node.text)))
    return facts


def _below(branch: Branch) -> str:
    below = branch.nodes - 1
    if not below:
        return "nothing: a leaf"
    return f"{some(below, 'node')}, {some(branch.tokens - branch.node.tokens, 'token')}"


def _account_of_root(state: State, branch: Branch) -> Account:
    facts = [
        ("children", f"{len(branch.children):,}"),
        ("nodes", f"{branch.nodes - 1:,}"),
        ("tokens", f"{branch.tokens:,}"),
        ("last used", f"{duration(state.now - branch.newest)} ago"),
    ]
    return Account(f"Namespace {branch.namespace or 'default'}", facts, why_held(state, branch))


def block_ids(node: NodeRecord, most: int = 4) -> str:
    """Its blocks as ranges, the first few of them."""
    named = [f"{first}-{first + count - 1}" if count > 1 else str(first) for first, count in runs(node.blocks)]
    return ", ".join(named[:most]) + (f", … ({len(named)} runs)" if len(named) > most else "")
