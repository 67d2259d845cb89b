"""Readings of a tree and its tiers for callers: matches, explanations, random runs. They change nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import replace
from random import Random

import numpy as np

from radixkv.cache.ghosts import Ghost
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.recurrent.snapshots import Snapshot
from radixkv.cache.state import CacheState
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import CachedNode, CachedRun, Explanation, Match, Node


def match_in_parts(state: CacheState, node: Node, path: list[Node], raw: bytes, at: int) -> Match:
    """The match of `raw` in a cache with a host tier or recurrent state.

    `at` bytes are resident on the device; they end in `node`, to which `path` leads.
    """
    matched = at // WIDTH
    runs = host_runs(state, node, raw, at)
    host = loadable = sum(tokens for _, tokens in runs)
    length, snapshots = matched, state.snapshots
    if snapshots is not None:
        last = snapshots.last(node, matched)
        length = 0 if last is None else last.position
        path = [each for each in path if each.start < length]
        ahead = snapshots.last_of(runs)
        loadable = 0 if ahead is None else ahead.position - length
    blocks = state.tree.joined(path)
    del blocks[-(-length // state.pool.block_size) :]
    idle = idle_blocks(state.tree, path, length)
    return Match(length, np.frombuffer(blocks, np.int32), idle, matched, host, loadable)


def explain(
    state: CacheState, node: Node | None, root_owner: int | None, raw: bytes, at: int, limit: int | None
) -> Explanation:
    """Why a match of `raw` ends at byte `at`, in `node`. `root_owner` owns the ghosts of a namespace without a root."""
    asked, matched = len(raw) // WIDTH, at // WIDTH
    runs = [] if node is None else host_runs(state, node, raw, at, pending=True)
    last_node, host = (runs[-1][0], sum(tokens for _, tokens in runs)) if runs else (node, 0)
    found = Explanation(asked, matched, matched, "never_seen", host=host, reached=matched + host)
    if limit is not None and limit < matched + host:
        found = replace(found, length=min(matched, limit), reason="limit", host=max(0, limit - matched))
    elif matched + host >= asked:
        found = replace(found, reason="full")
    else:
        owner = root_owner if last_node is None else last_node.ghost_owner
        found = _with_reason(state, found, last_node, owner, raw)
    if state.snapshots is None:
        return found
    return _shortened(found, state.snapshots.last(node, found.length), state.snapshots.last_of(runs, limit))


def host_runs(state: CacheState, node: Node, raw: bytes, at: int, *, pending: bool = False) -> list[tuple[Node, int]]:
    """The host nodes along `raw[at:]`, which follows the device's part of a match, each with its matching tokens."""
    if state.host is None or at < node.end * WIDTH:
        return []
    return state.host.follow(node, raw, at, pending=pending)


def _with_reason(
    state: CacheState, explained: Explanation, node: Node | None, owner: int | None, raw: bytes
) -> Explanation:
    """Replace the reason if one is found. The match of `raw` ends in `node`, and its ghosts hang below `owner`."""
    at = explained.matched + explained.host
    ghosts: list[tuple[Ghost, int]] = [] if owner is None else state.ghosts.follow(owner, at, raw[at * WIDTH :])
    if ghosts:
        first = ghosts[0][0]
        gone = sum(tokens for _, tokens in ghosts)
        ago = max(0.0, state.clock() - first.time)
        cause = str(first.pressure)
        return replace(explained, reason="evicted", evicted_tokens=gone, evicted_ago=ago, pressure=cause)
    if at and node is not None and (at < node.end or node.children or node.below):
        return replace(explained, reason="diverged", diverged_at=at)
    return explained


def after(node: Node, at: int, most: int) -> list[int]:
    """Return the tokens that follow byte `at` of a match that ends in `node`, at most `most`."""
    raw = node.key[at - node.start * WIDTH :][: most * WIDTH]
    while len(raw) < most * WIDTH and node.children:
        node = max(node.children.values(), key=lambda child: child.used_at)
        raw += node.key[: most * WIDTH - len(raw)]
    return array("i", bytes(raw)).tolist()


def _shortened(found: Explanation, last: Snapshot | None, ahead: Snapshot | None) -> Explanation:
    """Shorten an explanation to the last recurrent states of the device's part and of the host's part."""
    usable = 0 if last is None else last.position
    loadable = 0 if ahead is None else ahead.position - usable
    if usable + loadable == found.length + found.host:
        return replace(found, length=usable, host=loadable)
    reason = "never_seen" if found.reason == "no_state" else found.reason
    return replace(found, length=usable, host=loadable, reason="no_state", kv_reason=reason)


def idle_blocks(tree: RadixTree, path: list[Node], end: int) -> int:
    """Evictable blocks of a path up to token `end` of its last node. O(depth) + O(blocks that forks may share)."""
    if not path or path[-1].locks:
        return 0
    size = tree.pool.block_size
    idle = path[bisect_left(path, True, key=lambda node: not node.locks) :] if path[0].locks else path
    first, last = idle[0].start // size, -(-end // size)
    seams = [node for node in idle if node.start % size or node.may_share_any_block]
    if not seams:
        return last - first
    # Where nodes meet inside blocks, or forks share blocks, the path may own several blocks for a logical one.
    logical: set[int] = set()
    blocks: set[int] = set()
    for node in seams:
        at = node.start // size
        touched = node.blocks[: last - at if node.may_share_any_block else 1]
        logical.update(range(at, at + len(touched)))
        blocks.update(touched)
        if node is not idle[0] and node.start % size and node.parent is not None:
            blocks.add(node.parent.blocks[-1])
    return last - first - len(logical) + sum(map(tree.pool.is_evictable, blocks))


def held_length(tree: RadixTree, node: Node, raw: bytes | bytearray) -> int:
    """Count the tokens of the path to `node`, then of `raw`, that stay held if one holder releases them.

    O(depth) + O(bytes of `raw`).
    """
    if raw and node.children:
        below, matched = tree.match(node, bytes(raw))
        while below is not node and below.parent is not None:
            if below.locks:
                return min(below.end, node.end + matched // WIDTH)
            below = below.parent
    up = node
    while up.locks == 1 and up.parent is not None:
        up = up.parent
    return up.end


def find_node(state: CacheState, number: int) -> CachedNode | None:
    """Find a node of any tier by its id; None if it is gone.

    O(tokens of its text), and O(nodes) without a change tracker.
    """
    tree = state.tree
    node = tree.find(number) if state.tracker is None else state.tracker.find(number)
    if node is None:
        return None
    tokens = np.frombuffer(bytearray().join([each.key for each in tree.path(node)]), np.int32)
    return CachedNode(tokens, node.start, tree.namespace(node), node.residence, node.locks, tree.followers(node))


def random_run(state: CacheState, rng: Random) -> CachedRun | None:
    """The run at a random token of a text that ends at a random leaf or held node; None if nothing is cached."""
    tree = state.tree
    held = [sequence.node for sequence in state.open.values()] + state.pins.nodes()
    ends = list(dict.fromkeys(node for node in held if node.parent is not None))
    choice = rng.randrange(len(tree.index) + len(ends)) if tree.index or ends else -1
    if choice < 0:
        return None
    end = ends[choice] if choice < len(ends) else tree.index.at(choice - len(ends))
    path = tree.path(end)
    run = bisect_right(path, rng.randrange(end.end), key=lambda node: node.end)
    path = path[: run + 1]
    tokens = np.frombuffer(bytearray().join([node.key for node in path]), np.int32)
    blocks = np.frombuffer(tree.joined(path), np.int32)
    return CachedRun(tokens, path[-1].start, tree.namespace(path[0]), blocks)
