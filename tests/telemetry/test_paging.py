"""Pages add up to the changes that were cut, are of one moment, and fit into frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.paging import LONGEST_LIST, paginate
from radixkv.telemetry.protocol import Decoder, Delta, encode, snapshot_frames
from radixkv.telemetry.records import Changes
from tests.telemetry.wire import CHANGES, eviction, node, request


def mirror_of(nodes: int, **other: object) -> Mirror:
    mirror = Mirror()
    mirror.apply(
        Changes(9.0, stats={"steps": 3.0}, nodes=tuple(node(at, at - 1, (at, 1)) for at in range(1, nodes)), **other)  # type: ignore[arg-type]
    )
    return mirror


@pytest.mark.parametrize("nodes", [0, 1, 2, 5000])
def test_a_snapshot_in_pages_is_everything(nodes):
    mirror = mirror_of(nodes, requests=(request(1), request(2, "finished")), evictions=(eviction(1), eviction(2, 7.0)))
    frames = list(snapshot_frames(mirror, 5, 6.0))
    assert [frame.page for frame in frames] == list(range(frames[0].pages))
    assert [frame.last for frame in frames].count(True) == 1
    assert {frame.seq for frame in frames} == {5}
    assert (len(frames) > 1) == (nodes == 5000)
    copy = Mirror()
    copy.apply(Changes(1.0, nodes=(node(10**6),)))  # the earlier state is dropped
    for sent in frames:
        (got,) = Decoder().feed(encode(sent))
        copy.apply(got.changes)
    assert vars(copy) == vars(mirror)


def test_what_is_cut_into_pages_is_one_moment():
    mirror = mirror_of(5000)
    frames = snapshot_frames(mirror, 0, 0.0)
    mirror.apply(Changes(10.0, gone_nodes=tuple(range(1, 5000))))
    assert sum(len(frame.changes.nodes) for frame in frames) == 4999


@settings(max_examples=20, deadline=None)
@given(CHANGES)
def test_pages_lose_nothing_and_only_the_first_resets(changes):
    cut = paginate(changes)
    assert cut == [changes]  # small enough for one page


def test_pages_stay_below_the_cap_whatever_is_in_them():
    fragmented = tuple(number for at in range(LONGEST_LIST) for number in (2**31 - 1 - at, 1))
    changes = Changes(
        0.0,
        reset=True,
        gone_nodes=tuple(range(2**62, 2**62 + 100_000)),
        nodes=(node(1, blocks=fragmented), node(2, text="\N{GRINNING FACE}" * 100_000, namespace="n" * 10_000)),
        requests=tuple(replace(request(at), namespace="x" * 1000) for at in range(1000)),
    )
    cut = paginate(changes)
    assert [page.reset for page in cut] == [True] + [False] * (len(cut) - 1)
    got = [next(Decoder().feed(encode(Delta(page)))).changes for page in cut]
    assert sum((page.gone_nodes for page in got), ()) == changes.gone_nodes
    assert sum((page.requests for page in got), ()) == changes.requests
    whole = [record for page in got for record in page.nodes]
    assert whole[0].blocks == fragmented[:LONGEST_LIST]
    assert (whole[1].namespace, len(whole[1].text)) == ("n" * 4096, 4096)
