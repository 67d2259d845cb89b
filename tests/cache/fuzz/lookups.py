"""The reads of a cache, compared with the model: `match`, `explain`, random runs, nodes by their ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache import CachedRun, Match, readings
from tests.cache.fuzz import inside
from tests.cache.fuzz.tracked import leaves
from tests.cache.naive import kv

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World


def match(world: World, namespace: Hashable, prompt: Sequence[int]) -> Match:
    """The longest prefix with KV on the device, without regard to recurrent state."""
    least, most = world.bounds(namespace, prompt)
    tokens = world.shaped(prompt)
    found = inside.cached_kv(world.cache, tokens, namespace) if world.states else world.cache.match(tokens, namespace)
    assert least <= found.length == found.matched <= most
    assert found.blocks.dtype == np.int32
    assert len(found.blocks) == -(-found.length // world.block_size)
    values = world.pool.read(found.blocks, found.length)
    assert np.array_equal(values, kv(namespace, prompt[: found.length]))
    if world.host:
        world.host.assert_reach(found.length + found.host, most)
    else:
        assert found.host == 0
    return found


def usable(world: World, namespace: Hashable, prompt: Sequence[int]) -> int:
    """The length of the prefix that a sequence can be opened with."""
    found = world.match(namespace, prompt)
    return world.states.usable(namespace, prompt, found) if world.states else found.length


def reach(world: World, namespace: Hashable, prompt: Sequence[int]) -> int:
    """The length of the prefix with KV in any tier."""
    found = world.match(namespace, prompt)
    return found.length + found.host


def explain(world: World, namespace: Hashable, prompt: Sequence[int], limit: int | None = None) -> None:
    found, explanation = world.match(namespace, prompt), world.cache.explain(world.shaped(prompt), namespace, limit)
    matched, reached = found.length, found.length + found.host
    assert explanation.tokens == len(prompt)
    assert explanation.matched == matched
    assert "\n" not in str(explanation)
    assert str(explanation)
    length, cut = (each if limit is None else min(each, limit) for each in (matched, reached))
    usable = world.usable(namespace, prompt[:length])
    assert explanation.length == usable
    both, pending = bool(world.host and world.states), bool(world.host and world.host.is_pending)
    explained, end = (usable + explanation.host, cut) if both else (usable, length)
    if not (both and pending):
        assert (explanation.reason == "no_state") == (explained < end)
    reason = explanation.kv_reason if explanation.reason == "no_state" else explanation.reason
    assert reason in {"full", "never_seen", "diverged", "evicted", "limit"}
    if pending:  # `explain` counts tokens that cannot be matched yet
        most = min(world.bounds(namespace, prompt)[1], len(prompt) if limit is None else limit)
        assert (0 if both else min(found.host, most - length)) <= explanation.host <= most - usable
        return
    assert explanation.reached == reached
    loadable = world.cache.match(prompt[:limit], namespace).loadable
    assert explanation.host == (loadable if both else cut - length)
    assert (reason == "limit") == (cut < reached)
    if cut == reached:
        assert (reason == "full") == (reached == len(prompt))


def ask_without_a_trace(world: World, namespace: Hashable, prompt: Sequence[int], limit: int | None = None) -> None:
    """`match` and `explain`, and a proof that they changed nothing at all."""
    world.cache.stats()
    before = world.state()
    world.match(namespace, prompt)
    world.usable(namespace, prompt)
    world.explain(namespace, prompt, limit)
    world.assert_unchanged(before)


def random_run(world: World) -> CachedRun | None:
    """Check that `random_run` returns a cached run with the right content, and changes nothing."""
    before = world.state()
    run = world.cache.random_run(world.rng)
    world.assert_unchanged(before)
    if run is None:
        assert world.cache.stats().nodes == 0
        return None
    assert 0 <= run.start < len(run.tokens)
    assert run.tokens.dtype == run.blocks.dtype == np.int32
    found = world.match(run.namespace, run.tokens.tolist())
    assert found.length == len(run.tokens)
    assert np.array_equal(found.blocks, run.blocks)
    return run


def find_nodes(world: World) -> None:
    """Find each node by its id: its text is cached up to its end; an id that no node has finds nothing."""
    before = world.state()
    nodes = list(inside.nodes(world.cache))
    for node in world.rng.sample(nodes, min(len(nodes), 3)):
        found = readings.find_node(world.cache.state, node.id)
        assert found is not None
        text = found.tokens.tolist()
        assert (found.start, text, found.residence) == (node.start, node.text, node.residence)
        assert (found.namespace, found.locks) == (node.namespace, node.locks)
        if node.residence == "device":
            end = len(text)
            assert world.match(found.namespace, text).length == end
            wider = [each for each in leaves(world.texts_of(found.namespace)) if each[:end] == text]
            reaching = {each[end] for each in wider if len(each) > end}
            followed = {at for at in reaching if world.reach(found.namespace, [*text, at]) > end}
            assert found.children >= len(followed)
    assert readings.find_node(world.cache.state, 0) is None
    assert readings.find_node(world.cache.state, max((each.id for each in nodes), default=0) + 1) is None
    world.assert_unchanged(before)
