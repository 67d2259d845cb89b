"""Host nodes in telemetry: they are sent, change and go like others, and the view of the tree names their tier."""

from __future__ import annotations

from typing import cast

from radixkv.cache import PrefixCache
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import NodeRecord
from radixkv.telemetry.tree_view import tree_view
from tests.cache.verbs import prompt, publish
from tests.telemetry.expected import watched


def step(cache: PrefixCache) -> None:
    """Run the moves of a step."""
    cache.moves()
    cache.moves_done()


def offloaded() -> tuple[PrefixCache, Recorder, Mirror, list[float]]:
    """A cache whose first text is on the host, but for its first tokens."""
    cache, recorder, mirror, now = watched(6, 4, host_blocks=8)
    publish(cache, prompt(1, 20), "a")
    publish(cache, prompt(2, 12))
    step(cache)
    return cast(PrefixCache, cache), recorder, mirror, now


def test_the_view_of_the_tree_counts_the_tiers_apart() -> None:
    cache, _, _, _ = offloaded()
    view = tree_view(cache)
    assert (len(view), view.tokens, view.blocks, view.host_blocks) == (3, 32, 6, 2)
    assert str(view).splitlines() == [
        "3 nodes, 32 tokens, 6 blocks, 2 blocks on the host",
        "(a)",
        "└─ [0, 12) 1001 0 1 2 3 4 5 6 …: 3 blocks",
        "   └─ [12, 20) 11 12 13 14 15 16 17 18: 2 blocks on the host",
        "(no namespace)",
        "└─ [0, 12) 1002 0 1 2 3 4 5 6 …: 3 blocks",
    ]
    assert "style=dashed" in view.to_dot()
    one, other = tree_view(cache, "a"), tree_view(cache, None)
    assert (one.host_blocks, one.blocks, len(one)) == (2, 3, 2) and (other.host_blocks, len(other)) == (0, 1)
    assert len(tree_view(cache, "unknown")) == 0


def test_an_old_reader_ignores_the_tier_and_a_new_one_reads_old_nodes() -> None:
    _, recorder, mirror, _ = offloaded()
    mirror.apply(recorder.collect())
    packed = next(node for node in mirror.nodes.values() if node.residence == "host").pack()
    assert packed[-2] == "host" and NodeRecord.unpack(packed).residence == "host"
    assert NodeRecord.unpack(packed[:-1]).reused is None
    assert NodeRecord.unpack(packed[:-2]).residence == "device"
