"""What there is to say of a block: whose it is, where in a text, who reads it. Knows records and block owners."""

from __future__ import annotations

from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor.account import Account
from radixkv_monitor.block_map import Owner, is_node
from radixkv_monitor.block_modes import STATE_NAMES, Blocks
from radixkv_monitor.formatting import duration, some
from radixkv_monitor.node_facts import MOST_NAMED, holder_name
from radixkv_monitor.runs import count_blocks, place_of
from radixkv_monitor.session_tracker import SHARED, UNKNOWN, path
from radixkv_monitor.state import State


def block_detail(blocks: Blocks, block: int, per: int) -> Account:
    """All that there is to say of a block, the first of `per` that its cell shows."""
    state = blocks.state
    if state is None or not 0 <= block < blocks.map.num_blocks:
        return Account("No block")
    states = blocks.map.states(block, block + per).tolist()
    facts = [("state", STATE_NAMES[states[0]])]
    owners = blocks.map.all_owners(block)
    if owners:
        facts += _facts_of_owner(state, blocks, block, owners)
    notes = [_readers(state, blocks, owners)] if owners else ["Free: the next to be taken, or some other time."]
    if per > 1:
        notes.append(_neighbours(states))
    title = f"Block {block:,}" if per == 1 else f"Block {block:,}, first of {per} in its cell"
    return Account(title, facts, notes)


def _facts_of_owner(state: State, blocks: Blocks, block: int, owners: list[Owner]) -> list[tuple[str, str]]:
    tip = owners[0]
    facts = [("owners", ", ".join(_name(owner) for owner in owners[:MOST_NAMED]))]
    span = token_span(state, tip, block)
    if span is not None:
        facts.append(("tokens", f"{span[0]:,} to {span[1]:,} of its text"))
    session = blocks.sessions.of(tip)
    facts.append(("session", {SHARED: "several", UNKNOWN: "none that was seen"}.get(session, str(session))))
    node = state.nodes.get(tip)
    if node is not None:
        facts += [("hits", f"{node.hits:,}"), ("last used", f"{duration(state.now - node.used)} ago")]
    return facts


def token_span(state: State, owner: Owner, block: int) -> tuple[int, int] | None:
    """The tokens [first, end) of the owner's text that lie in this block; None if it is not its block.

    A node's block also holds what its parents have before its start; that is part of the span.
    """
    size = state.facts.block_size
    record: NodeRecord | SequenceRecord | None
    record = state.nodes.get(owner) if is_node(owner) else state.sequences.get(-owner)
    place = None if record is None else place_of(record.blocks, block)
    if record is None or place is None:
        return None
    if isinstance(record, NodeRecord):
        first, end = record.start // size + place, record.start + record.tokens
    else:  # the last blocks of its table are its own
        first, end = -(-record.length // size) - count_blocks(record.blocks) + place, record.length
    return first * size, min((first + 1) * size, end)


def _name(owner: Owner) -> str:
    return f"node {owner}" if is_node(owner) else f"sequence {-owner}"


def _readers(state: State, blocks: Blocks, owners: list[Owner]) -> str:
    """Who reads the tip of a block."""
    tip = owners[0]
    if not is_node(tip):
        named = [holder_name(state, state.sequences[-each]) for each in owners if -each in state.sequences]
        return f"Private to {'; '.join(named)}: not in the tree (yet)."
    through = [each for each in state.sequences.values() if tip in path(state, each.node)]
    pins = sum(1 for end in blocks.map.pin_ends if tip in path(state, end))
    named = [holder_name(state, each) for each in through[:MOST_NAMED]]
    if len(through) > MOST_NAMED:
        named.append(f"{len(through) - MOST_NAMED:,} more")
    if pins:
        named.append(some(pins, "pin"))
    return f"Its node is held by {'; '.join(named)}." if named else "Held by nobody: eviction may take it."


def _neighbours(states: list[int]) -> str:
    counts = [(states.count(state), name) for state, name in enumerate(STATE_NAMES)]
    return "This cell: " + ", ".join(f"{count} {name}" for count, name in counts if count) + "."
