"""Describe one node or one block: its facts, its holders, its tier, and its place in the eviction order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor.block_map import Owner, count_blocks, is_node, place_of, runs
from radixkv_monitor.block_modes import HOST_STATE_NAMES, STATE_NAMES, Blocks
from radixkv_monitor.formatting import duration, plural, size
from radixkv_monitor.state import SHARED, UNKNOWN, State, path
from radixkv_monitor.tree_branch import Branch


@dataclass(frozen=True, slots=True)
class Detail:
    """A description: a title, named facts, and sentences."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The description in plain lines."""
        return "\n".join((self.title, *self.notes, *(f"{name}: {value}" for name, value in self.facts)))


MOST_NAMED = 3
"""How many sequences, children and so on are named one by one."""


def next_to_go(state: State) -> str:
    """Name the node that eviction takes first, in a few words."""
    victims = state.next_victims
    if victims is None:
        return "eviction order unknown"
    if not victims:
        return "nothing is evictable"
    node = state.nodes.get(victims[0])
    if node is None:
        return f"next victim: node {victims[0]}"
    why = "marked as done" if node.demoted else f"idle {duration(state.now - node.used)}"
    return f"next victim: node {node.id} ({plural(count_blocks(node.blocks), 'block')}, {why})"


def _place_in_order(state: State, branch: Branch) -> list[str]:
    """Say how many nodes eviction takes before this one, if it is a leaf that nothing holds and the order is known."""
    victims = state.next_victims
    if branch.node.residence == "host" or _nodes_below(branch) or branch.node.locks:
        return []
    if victims is None:
        return ["The eviction order is unknown: the engine or recording is too old to send it."]
    if branch.node.id not in victims:
        return [f"Eviction takes at least {plural(len(victims), 'node')} before it."] if victims else []
    place = victims.index(branch.node.id)
    if place == 0:
        target = ", and offloads it to the host" if state.facts.host_blocks and not branch.node.demoted else ""
        return [f"Eviction takes it next, block by block off its end ({state.facts.eviction}){target}."]
    return [f"Eviction takes {plural(place, 'node')} before it."]


def holder_name(state: State, sequence: SequenceRecord) -> str:
    """Name a sequence by its request and stream."""
    if sequence.request is None:
        return f"sequence {sequence.id} without a request"
    request = state.live.get(sequence.request)
    phase = f" ({request.phase})" if request is not None else ""
    return f"request {sequence.request}, stream {sequence.index}{phase}"


def why_held(state: State, branch: Branch) -> list[str]:
    """Say why a node is not evicted, a sentence for each holder; or that it is evictable or on the host."""
    node = branch.node
    if node.residence == "host":
        return [_on_host(state, node)]
    here = [sequence for sequence in state.sequences.values() if sequence.node == node.id]
    reasons = [f"Held by {holder_name(state, sequence)}." for sequence in here[:MOST_NAMED]]
    if len(here) > MOST_NAMED:
        reasons.append(f"Held by {plural(len(here) - MOST_NAMED, 'more sequence')} that end here.")
    if node.pins:
        reasons.append("Held by a pin." if node.pins == 1 else f"Held by {node.pins} pins.")
    unknown = node.holders - len(here) - node.pins
    if unknown > 0:
        reasons.append(f"Held by {plural(unknown, 'holder')} that the engine did not report.")
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
    return [f"Held by {noun} {children}{more}" + (f": {named}{rest}." if named else ", because of a pin below.")]


def _not_held(branch: Branch) -> str:
    if branch.is_root:
        return "A namespace: it holds no blocks itself."
    if below := _nodes_below(branch):
        return f"Not held. Evictable after its descendants ({plural(below, 'node')})."
    return "Not held. Evictable now."


def _nodes_below(branch: Branch) -> int:
    """Count the descendants of a node that are resident in the pool."""
    return branch.nodes - 1 - branch.host_nodes


def _on_host(state: State, node: NodeRecord) -> str:
    """Say that a node is on the host, with the times of loading and of computing its tokens if they were sent."""
    blocks = count_blocks(node.blocks)
    place = f"On the host: {plural(blocks, 'block')}, {size(blocks * state.facts.bytes_per_block)}"
    load, prefill = (state.stats.get(f"{name}_seconds_per_token") for name in ("load", "prefill"))
    if load is None or prefill is None:
        return f"{place}, to be copied to the pool when a prompt needs them."
    times = (duration(node.tokens * seconds) for seconds in (load, prefill))
    return "{}. Loading costs about {}, computing {}.".format(place, *times)


def node_detail(state: State, branch: Branch) -> Detail:
    """Describe a node."""
    node = branch.node
    if branch.is_root:
        return _account_of_root(state, branch)
    notes = why_held(state, branch) + _place_in_order(state, branch)
    if node.demoted:
        notes.append("Marked as done by its user, so it is evicted first.")
    return Detail(f"Node {node.id}", _facts(state, branch), notes)


def _facts(state: State, branch: Branch) -> list[tuple[str, str]]:
    node, per = branch.node, state.facts.bytes_per_block
    blocks = count_blocks(node.blocks)
    facts = [
        ("tokens", f"{node.start:,} to {node.start + node.tokens:,} ({node.tokens:,})"),
        ("namespace", branch.namespace or "default"),
        *([("residence", "host memory" if node.residence == "host" else "device")] if state.facts.host_blocks else []),
        ("references", f"{node.holders} here, {node.locks - node.holders} below"),
        *_reuse(node),
        ("last used", f"{duration(state.now - node.used)} ago"),
        ("created", f"{duration(state.now - node.born)} ago"),
        ("blocks", f"{blocks:,} ({size(blocks * per)})"),
        ("block ids", block_ids(node)),
        ("parent", str(node.parent)),
        ("descendants", _below(branch)),
        *_host_below(state, branch),
        ("begins with", " ".join(map(str, node.head)) + (" …" if node.tokens > len(node.head) else "")),
    ]
    if node.priority:
        facts.append(("priority", str(node.priority)))
    if node.text is not None:
        facts.append(("text", repr(node.text)))
    return facts


def _reuse(node: NodeRecord) -> list[tuple[str, str]]:
    """Count the requests whose cached prefix includes the node, and those whose cached prefix ended at it."""
    sent = "not sent by this engine" if node.reused is None else f"by {plural(node.reused, 'request')}"
    return [("reused", sent), ("ended here", plural(node.hits, "request"))]


def _below(branch: Branch) -> str:
    below = branch.nodes - 1
    if not below:
        return "none (a leaf)"
    return f"{plural(below, 'node')}, {plural(branch.tokens - branch.node.tokens, 'token')}"


def _host_below(state: State, branch: Branch) -> list[tuple[str, str]]:
    """Count the host-resident descendants of a node of the pool; no fact without any."""
    if not branch.host_nodes or branch.node.residence == "host":
        return []
    memory = size(branch.host_blocks * state.facts.bytes_per_block)
    return [("on the host", f"{plural(branch.host_nodes, 'node')}, {plural(branch.host_blocks, 'block')} ({memory})")]


def _account_of_root(state: State, branch: Branch) -> Detail:
    facts = [
        ("children", f"{len(branch.children):,}"),
        ("nodes", f"{branch.nodes - 1:,}"),
        ("tokens", f"{branch.tokens:,}"),
        *_host_below(state, branch),
        ("last used", f"{duration(state.now - branch.newest)} ago"),
    ]
    return Detail(f"Namespace {branch.namespace or 'default'}", facts, why_held(state, branch))


def block_ids(node: NodeRecord, most: int = 4) -> str:
    """Write a node's blocks as ranges, the first few of them."""
    named = [f"{first}-{first + count - 1}" if count > 1 else str(first) for first, count in runs(node.blocks)]
    return ", ".join(named[:most]) + (f", … ({len(named)} runs)" if len(named) > most else "")


def block_detail(blocks: Blocks, block: int, per: int) -> Detail:
    """Describe a block of the pool or of host memory, the first of `per` that its cell shows."""
    state, on_host = blocks.state, blocks.residence == "host"
    if state is None or not 0 <= block < blocks.map.num_blocks:
        return Detail("No block")
    states = blocks.map.states(block, block + per).tolist()
    names = HOST_STATE_NAMES if on_host else STATE_NAMES
    facts = [("state", names[states[0]])]
    owners = blocks.map.all_owners(block)
    if owners:
        facts += _facts_of_owner(state, blocks, block, owners)
    notes = [_readers(state, blocks, owners)] if owners else ["Free: available for new tokens."]
    if per > 1:
        notes.append(_neighbours(states, names))
    name = f"{'Host block' if on_host else 'Block'} {block:,}"
    title = name if per == 1 else f"{name}, first of {per} in its cell"
    return Detail(title, facts, notes)


def _facts_of_owner(state: State, blocks: Blocks, block: int, owners: list[Owner]) -> list[tuple[str, str]]:
    tip = owners[0]
    facts = [("owners", ", ".join(_name(owner) for owner in owners[:MOST_NAMED]))]
    span = token_span(state, tip, block)
    if span is not None:
        facts.append(("tokens", f"{span[0]:,} to {span[1]:,} of the sequence"))
    session = blocks.sessions.of(tip)
    facts.append(("session", {SHARED: "several", UNKNOWN: "none seen"}.get(session, str(session))))
    node = state.nodes.get(tip)
    if node is not None:
        facts += [*_reuse(node), ("last used", f"{duration(state.now - node.used)} ago")]
    return facts


def token_span(state: State, owner: Owner, block: int) -> tuple[int, int] | None:
    """Return the tokens [first, end) of the owner's text that lie in this block; None if the owner lacks the block.

    A node's first block also holds the last tokens of its parents; they are part of the span.
    """
    size = state.facts.block_size
    record: NodeRecord | SequenceRecord | None
    record = state.nodes.get(owner) if is_node(owner) else state.sequences.get(-owner)
    place = None if record is None else place_of(record.blocks, block)
    if record is None or place is None:
        return None
    if isinstance(record, NodeRecord):
        first, end = record.start // size + place, record.start + record.tokens
    else:  # the last blocks of the sequence's table are its own
        first, end = -(-record.length // size) - count_blocks(record.blocks) + place, record.length
    return first * size, min((first + 1) * size, end)


def _name(owner: Owner) -> str:
    return f"node {owner}" if is_node(owner) else f"sequence {-owner}"


def _readers(state: State, blocks: Blocks, owners: list[Owner]) -> str:
    """Name the readers of a block's tip."""
    tip = owners[0]
    if blocks.residence == "host":
        return "Loaded when a prompt needs it."
    if not is_node(tip):
        named = [holder_name(state, state.sequences[-each]) for each in owners if -each in state.sequences]
        return f"Private to {'; '.join(named)}: not in the tree (yet)."
    through = [each for each in state.sequences.values() if tip in path(state, each.node)]
    pins = sum(1 for end in blocks.map.pin_ends if tip in path(state, end))
    named = [holder_name(state, each) for each in through[:MOST_NAMED]]
    if len(through) > MOST_NAMED:
        named.append(f"{len(through) - MOST_NAMED:,} more")
    if pins:
        named.append(plural(pins, "pin"))
    return f"Its node is held by {'; '.join(named)}." if named else "Not held: eviction may take it."


def _neighbours(states: list[int], names: Sequence[str]) -> str:
    counts = [(states.count(state), name) for state, name in enumerate(names)]
    return "This cell: " + ", ".join(f"{count} {name}" for count, name in counts if count) + "."
