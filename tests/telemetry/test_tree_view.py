"""The frozen view of the tree: its values, its text, and valid input for Graphviz."""

from __future__ import annotations

import re

import pytest

from radixkv.cache import PrefixCache
from radixkv.telemetry.tree_view import tree_view
from tests.cache.verbs import held, prompt, publish


def test_paths_and_children_lead_through_the_tree() -> None:
    cache = PrefixCache(64, 4)
    one, other = prompt(1, 6) + [50] * 4, prompt(1, 6) + [60] * 4
    for text in (one, other, one):
        publish(cache, text)
    view = tree_view(cache)
    (root,) = view.roots
    (trunk,) = view.children(root)
    leaves = view.children(trunk)
    assert [leaf.tokens for leaf in leaves] == [4, 4]
    for leaf, text in zip(leaves, (one, other), strict=True):
        assert view.path(leaf) == (trunk, leaf) and view[leaf.id] is leaf
        assert [*trunk.head, *leaf.head] == text
    assert (len(view), view.tokens, view.blocks) == (3, 14, cache.stats().cached_blocks)
    assert [node.id for node in view] == [root.id, trunk.id, *(leaf.id for leaf in leaves)]
    with pytest.raises(KeyError):
        view[999]


def test_what_holds_a_node_is_said() -> None:
    cache = PrefixCache(64, 4)
    publish(cache, prompt(1, 6))
    sequence, pin = held(cache, prompt(1, 6), priority=2), cache.pin(prompt(1, 6))
    assert str(tree_view(cache)).splitlines()[-1] == (
        "└─ [0, 6) 1001 0 1 2 3 4: 2 blocks, 1 sequence, 1 pin, 1 hit, priority 2"
    )
    sequence.close(), pin.release()
    cache.demote(prompt(1, 6))
    assert str(tree_view(cache)).endswith("1 hit, priority 2, first to go")
    assert str(tree_view(PrefixCache(4, 4))) == "0 nodes, 0 tokens, 0 blocks"


def test_a_long_tree_is_cut_in_repr_only_and_depth_is_no_limit() -> None:
    cache = PrefixCache(5000, 1)
    for length in range(1500, 0, -1):  # a chain: each is a prefix of the one before
        publish(cache, list(range(length)))
    view = tree_view(cache)
    assert len(str(view).splitlines()) == 1502
    assert len(repr(view).splitlines()) == 42 and "1461 more" in repr(view)


def test_dot_names_each_node_and_each_edge_once() -> None:
    cache = PrefixCache(64, 4)
    for text in ([1, 2, 3], [1, 2, 4], [9]):
        publish(cache, text, 'a "tenant"')
    held(cache, [9, 9])
    cache.pin([1, 2, 3], 'a "tenant"')
    view = tree_view(cache)
    dot = view.to_dot()
    assert dot.startswith("digraph tree {") and dot.endswith("}")
    assert sorted(re.findall(r"^  (\d+) \[", dot, re.M)) == sorted(str(node.id) for node in view)
    edges = {(int(a), int(b)) for a, b in re.findall(r"(\d+) -> (\d+);", dot)}
    assert edges == {(node.parent, node.id) for node in view if node.parent}
    assert r"a \"tenant\"" in dot and "peripheries=2" in dot and "penwidth=2" in dot
