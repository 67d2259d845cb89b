"""Compare the rows of the tree with a plain recursion, after any change, order, closing and filter."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor import tree_rows
from radixkv_monitor.tree_branch import SORTS, Branch, InvalidFilter, NodeFilter, parse_filter, states_of
from radixkv_monitor.tree_rows import TreeRows
from tests.monitor.random_cache import STEPS, RandomCache

Nodes = dict[int, NodeRecord]


def node(number: int, parent: int = 0, **values: object) -> NodeRecord:
    usual = {
        "start": 0, "tokens": 4, "blocks": (number, 1), "holders": 0, "locks": 0, "pins": 0, "hits": 0, "priority": 0,
        "demoted": False, "born": float(number), "used": float(number),
    }  # fmt: skip
    return NodeRecord(id=number, parent=parent, **{**usual, **values})  # type: ignore[arg-type]


class Naive:
    """The expected rows, by a plain recursion over all nodes."""

    def __init__(self, nodes: Nodes, sort: str, closed: set[int], matching: set[int] | None) -> None:
        self.nodes, self.sort, self.closed, self.matching = nodes, sort, closed, matching
        self.rows: list[tuple[int, str]] = []
        for root in self.children(0):
            self.walk(root, "", "")

    def below(self, number: int) -> list[NodeRecord]:
        """Return a node and its descendants."""
        kids = [each.id for each in self.nodes.values() if each.parent == number]
        return [self.nodes[number], *(below for kid in kids for below in self.below(kid))]

    def key(self, number: int) -> tuple[float, int]:
        below = self.below(number)
        return {
            "recency": -max(each.used for each in below),
            "size": -self.nodes[number].tokens,
            "reused": -(self.nodes[number].reused or 0),
            "ended-here": -self.nodes[number].hits,
            "subtree": -sum(each.tokens for each in below),
            "birth": self.nodes[number].born,
        }[self.sort], number

    def children(self, number: int) -> list[int]:
        kids = [each.id for each in self.nodes.values() if each.parent == number]
        if self.matching is not None:
            kids = [kid for kid in kids if any(each.id in self.matching for each in self.below(kid))]
        return sorted(kids, key=self.key)

    def walk(self, number: int, lead: str, below: str) -> None:
        self.rows.append((number, lead))
        if number in self.closed:
            return
        kids = self.children(number)
        for kid in kids:
            if len(kids) == 1 and self.nodes[number].parent:
                self.walk(kid, below + "↳", below)
            else:
                last = kid == kids[-1]
                self.walk(kid, below + ("╰─" if last else "├─"), below + ("  " if last else "│ "))


def expanded(each: NodeRecord) -> list[int]:
    runs = zip(each.blocks[::2], each.blocks[1::2], strict=True)
    return [block for first, count in runs for block in range(first, first + count)]


def goes_on(nodes: Nodes, each: NodeRecord) -> bool:
    """Return whether a node begins in the block in which its parent ends."""
    above = nodes.get(each.parent)
    return above is not None and bool(each.blocks) and expanded(above)[-1:] == expanded(each)[:1]


def drawn(rows: TreeRows) -> list[tuple[int, str]]:
    return [(branch.number, rows.lead(branch)) for branch in rows.rows]


def check(rows: TreeRows, nodes: Nodes, matching: set[int] | None = None) -> None:
    naive = Naive(nodes, rows.sort, rows.closed, matching)
    assert drawn(rows) == naive.rows
    assert rows.index == {number: place for place, (number, _) in enumerate(naive.rows)}
    for number, each in nodes.items():
        below, branch = naive.below(number), rows.branches[number]
        assert branch.record is each
        assert (branch.nodes, branch.tokens) == (len(below), sum(one.tokens for one in below))
        assert branch.blocks == sum(sum(one.blocks[1::2]) - goes_on(nodes, one) for one in below)
        if each.parent == 0:
            assert branch.blocks == len({block for one in below for block in expanded(one)})
        assert branch.newest == max(one.used for one in below)
        assert branch.matching == sum(matching is None or one.id in matching for one in below)
    assert rows.branches.keys() == {0, *nodes}
    assert rows.matching == len(nodes if matching is None else matching)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.sampled_from(sorted(SORTS)), st.integers(1, 4), st.booleans())
def test_rows_of_a_living_cache_match_a_walk(
    steps: list[tuple[str, int]], sort: str, told_every: int, is_filtered: bool
) -> None:
    life, rows = RandomCache(), TreeRows(sort)
    last = None
    if is_filtered:
        rows.filter(lambda branch, _: branch.node.locks > 0)
    for index, step in enumerate(steps):
        life.step(*step)
        if index % told_every:
            continue
        state = life.state()
        touched = state.touched_since(last)
        before = drawn(rows)
        moved = rows.update(state.nodes, None if touched is None else touched.nodes)
        last = state
        held = {number for number, each in state.nodes.items() if each.locks} if is_filtered else None
        check(rows, dict(state.nodes), held)
        assert moved or drawn(rows) == before
        rows.open([step[1] % 40], is_open=step[1] % 3 == 0)
        check(rows, dict(state.nodes), held)


FORESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=25)


@settings(max_examples=150, deadline=None)
@example(links=[(1, 2, 0), (2, 1, 0), (1, 0, 0)], sort="birth", cut=0)  # a cycle becomes a root in its place
@example(
    links=[(1, 2, 0), (2, 1, 0), (2, 0, 0)], sort="birth", cut=0
)  # and the node that was at the top is attached to it
@given(FORESTS, st.sampled_from(sorted(SORTS)), st.integers(0, 30))
def test_rows_follow_any_forest_to_any_other(links: list[tuple[int, int, int]], sort: str, cut: int) -> None:
    """Use any forest: parents below children, nodes that leave before their children, and changing orders."""
    rows = TreeRows(sort)
    nodes: Nodes = {}
    for number, parent, size in links:
        if number == parent:
            nodes = {kept: each for kept, each in nodes.items() if kept != number}
        else:
            nodes = {**nodes, number: node(number, parent, tokens=size, hits=size, reused=9 - size, used=float(size))}
        rows.update(nodes)
        reachable = [number for number in nodes if _reaches_top(nodes, number)]
        if len(reachable) == len(nodes):
            check(rows, nodes)
        assert rows.index.keys() == nodes.keys(), "no node is lost, even where parents are missing or go round"
    rows.update({}, touched=list(nodes))
    assert not rows.rows and rows.branches.keys() == {0} and rows.branches[0].tokens == rows.matching == 0


@settings(max_examples=150, deadline=None)
@example(parents={1: 2, 2: 1, 3: 1, 4: 9}, sort="birth", slice_=1, is_filtered=False)  # a ring, and a missing parent
@example(parents={1: 0, 2: 1, 3: 2, 5: 5}, sort="size", slice_=2, is_filtered=True)
@given(
    st.dictionaries(st.integers(1, 12), st.integers(0, 12), max_size=12),
    st.sampled_from(sorted(SORTS)),
    st.integers(1, 20),
    st.booleans(),
)
def test_a_forest_that_is_loaded_at_once_has_the_rows_of_one_that_grew(
    parents: dict[int, int], sort: str, slice_: int, is_filtered: bool
) -> None:
    """Rings and missing parents included: nothing is lost, and later changes find the sums right."""
    nodes = {
        number: node(number, parent, tokens=number % 5, used=float(number * 7 % 10), locks=number % 2,
                     blocks=(3 * number, 1 + number % 3))
        for number, parent in parents.items()
    }  # fmt: skip
    rows = TreeRows(sort)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_rows, "SLICE", slice_)
        shares = []
        for share in rows.load(nodes):
            shares.append(share)
            assert rows.is_empty and not rows.rows, "keys find an empty tree until all is there"
            if is_filtered:  # also in the middle
                rows.filter(lambda branch, _: branch.node.locks > 0)
    assert shares == sorted(shares) and all(0 <= share < 1 for share in shares)
    held = {number for number, each in nodes.items() if each.locks} if is_filtered else None
    if all(_reaches_top(nodes, number) for number in nodes):
        check(rows, nodes, held)
    assert rows.branches.keys() == {0, *nodes}
    assert is_filtered or rows.index.keys() == nodes.keys()
    for number in list(nodes):
        nodes = {**nodes, number: node(number, 0, tokens=1)}  # rings and orphans become roots
        rows.update(nodes)
    check(rows, nodes, set() if is_filtered else None)
    rows.update({})
    assert rows.is_empty and not rows.rows
    top = rows.branches[0]
    assert not (top.nodes or top.tokens or top.blocks or top.matching)


def _reaches_top(nodes: Nodes, number: int) -> bool:
    seen = set()
    while number in nodes and number not in seen:
        seen.add(number)
        number = nodes[number].parent
    return number == 0


@pytest.fixture
def small() -> tuple[TreeRows, Nodes]:
    """1 (team) -> 2 -> (3 -> 5, 4); 6 (another root) -> 7."""
    nodes = {
        1: node(1, 0, tokens=0, blocks=(), namespace="team", used=0.0), 2: node(2, 1, used=2.0),
        3: node(3, 2, start=4, used=9.0), 4: node(4, 2, start=4, used=5.0), 5: node(5, 3, start=8, used=3.0),
        6: node(6, 0, tokens=0, blocks=(), used=0.0), 7: node(7, 6, used=4.0),
    }  # fmt: skip
    rows = TreeRows("recency")
    rows.update(nodes)
    return rows, nodes


def ids(rows: TreeRows) -> list[int]:
    return [branch.number for branch in rows.rows]


def test_the_hottest_path_ends_where_something_was_used_last(small: tuple[TreeRows, Nodes]) -> None:
    rows, nodes = small
    most_recent = rows.most_recent()
    assert most_recent is not None and most_recent.node.id == 3
    nodes[7] = node(7, 6, used=50.0)
    rows.update(nodes, [7])
    most_recent = rows.most_recent()
    assert most_recent is not None and most_recent.node.id == 7 and ids(rows)[0] == 6
    assert TreeRows().most_recent() is None


def test_closing_hides_what_is_below_and_opening_to_a_node_shows_it(small: tuple[TreeRows, Nodes]) -> None:
    rows, _ = small
    rows.open([2, 6], is_open=False)
    assert ids(rows) == [1, 2, 6]
    assert rows.open_to(5) and ids(rows) == [1, 2, 3, 5, 4, 6]
    assert not rows.open_to(77)


def test_a_filter_shows_matches_and_their_paths_and_opens_them(small: tuple[TreeRows, Nodes]) -> None:
    rows, nodes = small
    rows.open([1], is_open=False)
    rows.filter(lambda branch, _: branch.node.id in (5, 7))
    assert ids(rows) == [1, 2, 3, 5, 6, 7] and rows.matching == 2 and rows.is_filtered
    assert not rows.open_to(4)
    assert rows.next_match(0, 1) == 3 and rows.next_match(3, 1) == 5 and rows.next_match(5, 1) == 3
    assert rows.next_match(3, -1) == 5
    check(rows, nodes, {5, 7})
    rows.filter(None)
    assert ids(rows) == [1, 6, 7], "closed branches are closed again"


def test_a_filter_of_a_long_chain_walks_it_once() -> None:
    length = 10_000
    nodes = {number: node(number, number - 1, namespace="team") for number in range(1, length)}
    rows = TreeRows()
    rows.update(nodes)
    began = time.process_time()
    for line in ("team", "nobody", "min:1"):
        matching = parse_filter(line)
        assert matching is not None
        rows.filter(lambda branch, namespace, terms=matching: terms.matches(branch.node, namespace, None))  # type: ignore[misc]
        assert rows.matching == len(rows.rows) == (0 if line == "nobody" else length - 1)
    rows.apply_filter(nodes)
    assert {rows.lead(branch) for branch in rows.rows[1:]} == {"╰─", "  ↳"}
    assert time.process_time() - began < 4.0, "0.2 s; a walk to the root for each node takes minutes"


def test_a_node_that_shrinks_as_it_stops_matching_goes_under_every_sort() -> None:
    for sort in SORTS:
        nodes = {1: node(1, tokens=0), 2: node(2, 1, locks=1)}
        rows = TreeRows(sort)
        rows.filter(lambda branch, _: branch.node.locks > 0)
        rows.update(nodes)
        assert ids(rows) == [1, 2]
        nodes[2] = node(2, 1, tokens=3, locks=0)
        assert rows.update(nodes, [2]) and ids(rows) == [], sort


def test_namespaces_come_from_roots(small: tuple[TreeRows, Nodes]) -> None:
    rows, _ = small
    assert rows.branches[5].namespace == "team" and rows.branches[7].namespace is None
    assert rows.branches[1].is_root and not rows.branches[5].is_root
    assert isinstance(rows.branches[0], Branch)


# ---- the filter's line


@pytest.mark.parametrize(
    ("line", "fits", "not_fit"),
    [
        ("team", {"namespace": "TEAM-a"}, {"namespace": None}),
        ("default", {"namespace": None}, {"namespace": "team"}),
        ("ns:red hello", {"namespace": "red", "text": "Say Hello"}, {"namespace": "red", "text": "bye"}),
        ("session:3", {"session": 3}, {"session": 4}),
        ("s:3 s:5", {"session": 5}, {"session": None}),
        ("ids:8,9", {"head": (7, 8, 9)}, {"head": (8, 7, 9)}),
        ("min:100", {"tokens": 100}, {"tokens": 99}),
        ("active", {"locks": 1}, {"locks": 0}),
        ("cached", {"locks": 0}, {"locks": 1}),
        ("pinned done", {"pins": 1}, {"locks": 1}),
        ("done", {"demoted": True}, {"demoted": False}),
        ("min:9 active", {"tokens": 9, "locks": 2}, {"tokens": 9}),
        ("reused:20", {"reused": 20, "hits": 1}, {"reused": 19, "hits": 20}),
        ("reused:1", {"reused": 1}, {"hits": 5}),  # an older engine does not send it
    ],
)
def test_terms_of_a_filter(line: str, fits: dict[str, object], not_fit: dict[str, object]) -> None:
    matching = parse_filter(line)
    assert matching is not None
    for facts, answer in ((fits, True), (not_fit, False)):
        values = {name: value for name, value in facts.items() if name not in ("namespace", "session")}
        assert matching.matches(node(2, 1, **values), facts.get("namespace"), facts.get("session")) is answer  # type: ignore[arg-type]


def test_a_root_fits_by_its_name_only() -> None:
    root = node(1, tokens=0)
    assert NodeFilter(words=("team",)).matches(root, "team", None)
    for line in ("min:1", "cached", "ids:1", "session:1", "reused:1"):
        matching = parse_filter(line)
        assert matching is not None and not matching.matches(root, "team", 1)


def test_an_empty_line_is_no_filter() -> None:
    assert parse_filter("  ") is None


@pytest.mark.parametrize("line", ["min:x", "ids:1,b", "session:", "reused:many", "color:red"])
def test_an_unknown_term_is_named(line: str) -> None:
    with pytest.raises(InvalidFilter, match=line.split(":")[0]):
        parse_filter(line)


def test_states_of_a_node() -> None:
    assert states_of(node(1)) == {"cached"}
    assert states_of(node(1, locks=1, pins=1)) == {"active", "pinned"}
    assert states_of(node(1, demoted=True)) == {"cached", "done"}
