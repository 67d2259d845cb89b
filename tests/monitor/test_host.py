"""Test the screens of an engine with a host tier: tree, pool, overview and their descriptions, and none without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot
from textual.widgets import Static

from radixkv.telemetry.records import NodeRecord, RequestRecord
from radixkv_monitor import detail, tree_branch
from radixkv_monitor.block_map import CACHED, FREE, PINNED
from radixkv_monitor.block_modes import Blocks
from radixkv_monitor.formatting import size
from radixkv_monitor.print_once import to_dict, to_text
from radixkv_monitor.state import Sample, State
from radixkv_monitor.summary import summarise, verdict
from radixkv_monitor.tree_rows import TreeRows
from radixkv_monitor.views import HostBlockSelected, NodeSelected, Selection, View
from radixkv_monitor.views.pool import PoolView
from radixkv_monitor.views.requests import miss_sentence
from radixkv_monitor.widgets import heat_map
from radixkv_monitor.widgets.detail_pane import DetailPane
from radixkv_monitor.widgets.heat_map import GUTTER
from tests.monitor.fake_feed import FACTS
from tests.monitor.random_cache import STEPS, RandomCache
from tests.monitor.samples import DISK, HOST, HOST_BLOCKS, node, request
from tests.monitor.view_host import hosted, screen, state

both_sizes = pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)], ids=["80x24", "160x48"]
)
NODES = [
    node(id=1, parent=0, tokens=0, blocks=(), namespace="team", locks=1, head=()),
    node(id=2, parent=1, tokens=40, blocks=(0, 3), locks=1, holders=1),
    node(id=3, parent=2, start=40, tokens=40, blocks=(2, 3)),  # it begins in the last block of node 2
    node(id=4, parent=3, start=80, tokens=64, blocks=(2, 4), residence="host"),  # host blocks with ids of the pool's
    node(id=5, parent=4, start=144, tokens=16, blocks=(30, 1), residence="host"),
    node(id=6, parent=2, start=40, tokens=60, blocks=(6, 4), residence="host", demoted=True),
]
"""2 is held; 3 is a leaf of the pool; 4, 5 and 6 are on the host."""


def with_host(nodes: list[NodeRecord] = NODES, **values: object) -> State:
    shown = state(nodes=nodes, stats=HOST, next_victims=(3,), **values)
    return replace(shown, facts=replace(shown.facts, host_blocks=HOST_BLOCKS))


def run(
    view: View, script: Callable[[Pilot[None]], Awaitable[None]], shown: State, size: tuple[int, int]
) -> list[object]:
    return list(hosted(view, shown, script, size).selections)


def text(view: View, part: str) -> str:
    return str(view.query_one(part, Static).content).replace("\N{NO-BREAK SPACE}", " ")


def notes(shown: State, number: int) -> list[str]:
    return list(described(shown, number).notes)


def described(shown: State, number: int) -> detail.Detail:
    rows = TreeRows()
    rows.update(shown.nodes)
    return detail.node_detail(shown, rows.branches[number])


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 4))
def test_both_maps_and_the_sums_of_the_tree_match_a_recount(steps: list[tuple[str, int]], every: int) -> None:
    life, device, host, rows, last = RandomCache(12, 4, 6), Blocks(), Blocks("host"), TreeRows(), None
    for index, step in enumerate(steps):
        life.step(*step)
        if index % every and index < len(steps) - 1:
            continue
        shown = life.state()
        device.update(shown)
        host.update(shown)
        touched = shown.touched_since(last)
        rows.update(shown.nodes, None if touched is None else touched.nodes)
        last = shown
        stats = life.cache.stats()
        counts = Counter(device.map.states().tolist())
        assert (counts[FREE], counts[CACHED], counts[PINNED]) == (
            stats.free_blocks, stats.cached_blocks, stats.pinned_blocks,
        )  # fmt: skip
        images = [
            block for each in life.cache.state.tree.residents() if each.residence == "host" for block in each.blocks
        ]
        assert np.flatnonzero(host.map.states()).tolist() == sorted(images)
        top = rows.branches[0]
        assert (top.host_nodes, top.host_blocks) == (stats.host_nodes, len(images))
        assert top.blocks == len({block for each in life.cache.state.tree.walk() for block in each.blocks})
        for each in life.cache.state.tree.residents():
            below = rows.branches[each.id]
            assert below.host_nodes == sum(child.host_nodes for child in below.children.values()) + (
                each.residence == "host"
            )


# ---- tree


def test_the_filter_finds_nodes_on_the_host() -> None:
    matching = tree_branch.parse_filter("host")
    assert matching is not None and [matching.matches(each, "team", None) for each in NODES] == [False] * 3 + [True] * 3
    cached = tree_branch.parse_filter("cached")
    assert cached is not None and [each.id for each in NODES if cached.matches(each, "team", None)] == [3]


def test_a_node_on_the_host_is_described_with_its_costs() -> None:
    shown = with_host()
    assert notes(shown, 4) == ["On the host: 4 blocks, 4.0 KiB, to be copied to the pool when a prompt needs them."]
    costs = {"load_seconds_per_token": 1e-4, "prefill_seconds_per_token": 1e-3}
    told = replace(shown, stats={**shown.stats, **costs})
    assert notes(told, 4) == ["On the host: 4 blocks, 4.0 KiB. Loading costs about 6 ms, computing 64 ms."]
    facts = dict(described(shown, 4).facts)
    assert (facts["residence"], facts["blocks"], facts["block ids"]) == ("host memory", "4 (4.0 KiB)", "2-5")
    assert "on the host" not in facts


def test_a_leaf_of_the_pool_is_evictable_although_nodes_on_the_host_follow_it() -> None:
    shown = with_host()
    assert notes(shown, 3) == [
        "Not held. Evictable now.",
        "Eviction takes it next, block by block off its end (lru), and offloads it to the host.",
    ]
    assert dict(described(shown, 3).facts)["on the host"] == "2 nodes, 5 blocks (5.0 KiB)"
    assert dict(described(shown, 1).facts)["on the host"] == "3 nodes, 9 blocks (9.0 KiB)"


# ---- pool


@both_sizes
def test_the_host_has_a_map_with_a_scale_of_its_own(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_map, "TALLEST", 1)
    view = PoolView()

    async def script(pilot: Pilot[None]) -> None:
        assert text(view, "#device-headline").startswith("Device: 64 blocks, 8% in use · by state · 1 block per cell")
        headline = text(view, "#host-headline")
        assert headline.startswith("Host: 40.0 KiB, 40 blocks, 22% in use · by state · 1 block per cell (fits)")
        assert "on the host 9" in text(view, ".legend") and "cached 2" in text(view, ".legend")
        first = view.host.region.y
        cells = "".join(line[GUTTER : GUTTER + view.host.map.columns] for line in screen(pilot.app)[first : first + 2])
        assert cells[:11] == "··□□□□□□□□·" and cells[30] == "□"
        await pilot.press("tab", "right", "right")
        assert view.pane is view.host and view.block == 2
        assert "Host block 2" in description(view) and "Loaded when a prompt needs it." in description(view)
        assert "tokens: 80 to 96 of the sequence" in description(view), "its first token is at 80"
        await pilot.press("n", "n", "n")
        assert view.block == 30 and view.device.block == 0
        await pilot.press("c")
        assert "· by idle time ·" in text(view, "#host-headline")
        assert {row["residence"] for row in view.export().rows} == {"device", "host"}
        assert len(view.export().rows) == 64 + 40
        view.sort_by("session")
        assert "· by state ·" in text(view, "#host-headline")
        await pilot.press("tab")
        assert view.pane is view.device and "Block 0" in description(view)

    selections = run(view, script, with_host(), size)
    assert [each.number for each in selections if isinstance(each, HostBlockSelected)] == [1, 2, 6, 10, 30]
    assert [each.number for each in selections if isinstance(each, NodeSelected)] == [4, 6, 5]


def description(view: PoolView) -> str:
    shown = view.query_one(DetailPane).detail
    assert shown is not None
    return "\n".join([shown.title, *(f"{name}: {value}" for name, value in shown.facts), *shown.notes])


def test_a_selected_node_on_the_host_is_found_there_and_not_in_the_pool() -> None:
    view = PoolView()

    async def script(pilot: Pilot[None]) -> None:
        view.select(Selection(node=6, host_block=6))
        view.take_focus()
        await pilot.pause()
        assert view.pane is view.host and view.block == 6 and view.device.block == 0
        assert np.flatnonzero(view.host.map._shown & 0x40).tolist() == [6, 7, 8, 9]
        assert not (view.device.map._shown & 0x40).any()
        view.select(Selection(node=3, host_block=6))
        view.take_focus()
        await pilot.pause()
        assert view.pane is view.device and view.block == 2

    run(view, script, with_host(), (80, 24))


# ---- overview and summary


STATS = {**HOST, "prompt_tokens": 8000.0, "cached_tokens": 6000.0, "cache.nodes": 5.0}


def history(stats: dict[str, float]) -> tuple[Sample, ...]:
    """Return a minute of samples; all that was counted happened in its last ten seconds."""
    return tuple(Sample(time, FACTS.engine, counted) for time, counted in ((942.0, {}), (992.0, {}), (1002.0, stats)))


REQUEST = request(admitted=1001.0, cached_tokens=60, host_tokens=16)


def engine(stats: dict[str, float] = STATS, ended: Sequence[RequestRecord] = (REQUEST,)) -> State:
    shown = state(stats=stats, history=history(stats), ended=list(ended))
    return replace(shown, facts=replace(FACTS, host_blocks=HOST_BLOCKS))


def test_prompt_tokens_are_divided_by_their_source() -> None:
    host = summarise(engine()).host
    assert host is not None and (host.from_device, host.from_host, host.computed) == (4400, 1600, 2000)
    assert (host.offloaded_per_second, host.loaded_per_second) == (30.0, 160.0)
    lines = to_text(engine()).splitlines()
    assert lines[3] == "host        25/40 blocks, 300 offloaded, 1,600 tokens loaded"
    assert lines[4] == ("prompts     55% of the tokens from the device, 20% from the host, 25% computed, in 1 min")
    assert to_dict(engine())["summary"]["host"]["blocks"] == {"part": 25.0, "whole": 40, "share": 25 / 40}


def test_failed_transfers_are_a_warning() -> None:
    shown = engine({**STATS, "failed_loads": 1.0, "failed_offloads": 2.0})
    judged = verdict(shown, summarise(shown))
    assert judged.level == "warn" and judged.sentence.startswith("3 transfers to or from the host failed in the last")


def test_a_disk_is_one_line_and_its_faults_are_a_warning() -> None:
    shown = engine({**STATS, **DISK})
    line = f"500/2,000 blocks, {size(2000 * FACTS.bytes_per_block)}, read at 1,250 MB/s, 3 faults"
    assert to_text(shown).splitlines()[5] == f"disk        {line}"
    disk = to_dict(shown)["summary"]["disk"]
    assert (disk["blocks"], disk["faults_minute"]) == ({"part": 500.0, "whole": 2000, "share": 0.25}, 3)
    judged = verdict(shown, summarise(shown))
    assert judged.level == "warn" and judged.sentence.startswith("3 faults of the disk cache in the last")
    assert "disk" not in to_dict(engine())["summary"]


def test_a_request_names_the_tokens_that_were_read_from_disk() -> None:
    text = miss_sentence(replace(REQUEST, disk_tokens=16))
    assert "60 of 100 prompt tokens (60%) were cached, 16 of them on the host. 16 were read from disk." in text
