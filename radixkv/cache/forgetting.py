"""Remove cached text that was not evicted: KV that is wrong, or that must not be used any more. It leaves no ghosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from radixkv.cache.namespaces import Namespace
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node
from radixkv.errors import PrefixHeld


def discard(state: CacheState, node: Node, raw: bytes, matched: int, start: int) -> int:
    """Forget the tokens of a text from `start` on, and everything after them; see `PrefixCache.discard`.

    `matched` bytes of it are on the device, and end in `node`. Returns the blocks that this freed there.
    """
    if matched > start * WIDTH:
        while node.start > start:
            node = cast(Node, node.parent)
        _refuse_held(state, node, start)
        if node.start < start:
            state.tree.split(node, start - node.start)
        return _forget(state, state.tree.walk(node))
    if state.host is not None and matched == node.end * WIDTH:
        path = state.host.follow(node, raw, matched, pending=True)
        first = next((host for host, count in path if host.start + count > start), None)
        if first is not None:
            _refuse_loads(state, state.tree.walk(first), start)
            state.host.discard(first, start)
    return 0


def clear(state: CacheState, *, pins: bool) -> None:
    """Forget everything that no sequence or pin holds; with `pins`, release all pins first."""
    if state.host is not None:
        state.host.forget()
    if pins:
        state.pins.release()
    state.ghosts.clear()
    state.index.clear()
    while len(state.index):
        state.tree.remove(state.index.victim())


def clear_namespace(state: CacheState, space: Namespace) -> int:
    """Forget everything of a namespace that no sequence or pin holds; returns the blocks freed on the device."""
    root = state.tree.find_root(space)
    nodes = [] if root is None else list(state.tree.residents(root))
    state.ghosts.drop([space.number, *(node.ghost_owner for node in nodes)])
    return _forget(state, (node for node in nodes if node.parent is not None and not node.locks))


def _forget(state: CacheState, nodes: Iterable[Node]) -> int:
    """Remove unlocked nodes, each before its children here, with all that follow; returns the blocks freed."""
    free = len(state.pool.free)
    for node in reversed(list(nodes)):
        state.index.forget(node.policy_data, node.start)
        state.tree.remove(node)
    return len(state.pool.free) - free


def _refuse_held(state: CacheState, node: Node, start: int) -> None:
    """Raise PrefixHeld if KV of `node` from `start` on, or after it, is held.

    It is held by a lock, as a fork's own block, or by a load that reads it from the host.
    """
    held = node.locks > 0
    if not held and state.open:
        blocks = {block for below in state.tree.walk(node) for block in below.blocks}
        held = any(sequence.reads(blocks, start) for sequence in state.open.values())
    if held:
        raise PrefixHeld(
            f"tokens from {start} on are held: close the sequences and release the pins that have them first"
        )
    _refuse_loads(state, (below for below in state.tree.residents(node) if below.residence == "host"), start)


def _refuse_loads(state: CacheState, nodes: Iterable[Node], start: int) -> None:
    """Raise PrefixHeld if a pending load reads tokens of these host nodes from `start` on."""
    if state.host is not None and state.host.blocks.reading:
        blocks = {block for node in nodes for block in node.blocks}
        if any(each.loading is not None and each.loading.reaches(blocks, start) for each in state.open.values()):
            raise PrefixHeld(f"tokens from {start} on are being loaded: commit or close these sequences first")
