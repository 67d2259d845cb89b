"""How many requests found the tokens of a node. `fuzz.mirror` counts them for each token."""

from radixkv.cache import PrefixCache
from radixkv.cache.reuse import count, join, split, total


def test_an_open_costs_nothing_without_a_tracker() -> None:
    cache = PrefixCache(8, 4)
    for _ in range(3):
        with cache.open([1, 2, 3, 4, 5]) as sequence:
            sequence.extend([1, 2, 3, 4, 5][sequence.length :])
            sequence.commit()
    assert all(node.reuse is None for node in cache.state.tree.walk())


def test_requests_that_go_on_below_count_at_the_shared_prefix() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    system = list(range(20))
    for user in range(5):
        with cache.open([*system, 100 + user, 7]) as sequence:
            sequence.extend([*system, 100 + user, 7][sequence.length :])
            sequence.commit()
    (shared,) = (node for node in cache.state.tree.walk() if node.end == 20)
    assert total(shared.reuse) == 4, "all requests but the first one"
    assert [total(child.reuse) for child in shared.children.values()] == [0] * 5
    assert shared.hits == 4
    cache.open([*system, 102, 7, 8]).close()
    assert total(shared.reuse) == 5
    assert sum(total(child.reuse) for child in shared.children.values()) == 1


def test_a_conversation_counts_each_turn() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    text: list[int] = []
    for turn in range(4):
        text += [turn] * 5
        with cache.open(text) as sequence:
            sequence.extend(text[sequence.length :])
            sequence.commit()
    (node,) = (node for node in cache.state.tree.walk() if node.parent is not None)
    assert node.reuse == {5: 1, 10: 1, 15: 1}
    cache.open(text[:8]).close()
    assert [(each.end, each.reuse) for each in cache.state.tree.walk()] == [
        (0, None),
        (8, {5: 1, 8: 3}),
        (20, {10: 1, 15: 1}),
    ]


def test_an_evicted_child_changes_nothing_at_its_parent() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    for text in ([1] * 8, [1] * 8 + [2] * 4, [1] * 8 + [3] * 4, [1] * 8 + [3] * 4):
        with cache.open(text) as sequence:
            sequence.extend(text[sequence.length :])
            sequence.commit()
    (top,) = (node for node in cache.state.tree.walk() if node.end == 8)
    assert total(top.reuse) == 3
    cache.evict(64 - 2)
    assert not top.children
    assert total(top.reuse) == 3


def test_a_split_and_a_join_keep_each_token() -> None:
    whole = {3: 2, 5: 1, 9: 4}
    for cut in range(1, 9):
        upper, lower = split(dict(whole), cut)
        assert total(upper) == total(whole)
        assert join(upper, cut, lower) == whole
    assert split(None, 3) == (None, None)
    assert join(None, 3, None) is None
    assert count({4: 1}, 4, -1) == {}
