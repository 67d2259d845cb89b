"""The world of a cache with a host tier: host blocks with content, steps with moves and loads, batches that fail.

A step runs moves, copies, loads and writes in this order. The naive model is the set of published texts: each is cached
on the device up to one position, on the host up to another one, and not after it.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from radixkv.cache import CacheStats, Hint, Match, PrefixCache, WritePlan
from radixkv.cache.host import HostPrefixCache, HostSequence
from radixkv.cache.types import Load, Node
from radixkv.errors import InvalidInput, PrefixHeld
from tests.cache.naive import Texts, Values, kv
from tests.cache.quota_world import QuotaWorld
from tests.cache.verbs import Ids
from tests.cache.world import Tracked, World, common, leaves

GARBAGE = np.uint64(13)  # in free blocks, and in those that a failed move has written
ROOM = 4096  # blocks of a host that never evicts
HOST_COUNTERS = ("offloaded_blocks", "loaded_tokens", "host_evicted_blocks")
Facts = tuple[str, int | None, int, bytes, tuple[int, ...]]


class HostWorld(World):
    """A world whose cache has a host tier, mostly a small one; see World."""

    cache: HostPrefixCache
    roomy = False  # whether the host has room for all texts, and nothing is put at the cold end

    def make_cache(self, eviction: str) -> PrefixCache:
        few = self.rng.choice((1, 3, self.num_blocks, 4 * self.num_blocks))
        self.host_blocks = ROOM if self.roomy else few
        self.host = np.full((self.host_blocks, self.block_size), GARBAGE)
        self.batch: list[tuple[int, int]] = []  # moves that ran and are not confirmed yet
        self.intact = True  # whether they may be confirmed
        self.faults = True
        self.loads: dict[int, Load] = {}  # the pending ones, by sequence id
        self.has_failed = False
        cache = HostPrefixCache(
            self.num_blocks,
            self.block_size,
            eviction,
            clock=lambda: self.now,
            host_blocks=self.host_blocks,
            namespace_limits=self.limits(),
        )
        self.tracker = cache.watch() if self.rng.random() < 0.5 else None
        self.mirror: dict[int, Facts] = {}
        return cache

    # Reading

    @property
    def pending(self) -> bool:
        """Whether some moves did not run or are not confirmed: their tokens are not matchable."""
        return bool(self.batch) or bool(self.cache.tier.moves)

    def match(self, namespace: Hashable, prompt: Sequence[int]) -> Match:
        found = super().match(namespace, prompt)
        reach, most = found.length + found.host, self.bounds(namespace, prompt)[1]
        assert found.length <= reach <= most, "the host has tokens that were never published, or were discarded"
        assert reach == most or self.pending or not self.roomy, f"{most - reach} tokens are lost"
        return found

    def explain(self, namespace: Hashable, prompt: Sequence[int], limit: int | None = None) -> None:
        """As for one tier; while moves are pending, `explain` counts tokens that cannot be matched yet."""
        if not self.pending:
            super().explain(namespace, prompt, limit)
            return
        found, explanation = self.match(namespace, prompt), self.cache.explain(self.shaped(prompt), namespace, limit)
        most = min(self.bounds(namespace, prompt)[1], len(prompt) if limit is None else limit)
        assert explanation.length == min(found.length, most)
        assert min(found.host, most - explanation.length) <= explanation.host <= most - explanation.length

    def reaches(self, namespace: Hashable) -> list[tuple[list[int], int]]:
        """The texts of a namespace, each with the length that is cached in both tiers."""
        return [(text, self.reach(namespace, text)) for text in leaves(self.texts_of(namespace))]

    def loadable(self, one: Tracked, tokens: Sequence[int]) -> int:
        """How many of the next tokens a sequence can load: none if a device block has the next one."""
        found = self.match(one.namespace, [*one.tokens, *tokens])
        due = one.plan is None and one.published == len(one.tokens) == found.length
        before = self.state() if self.rng.random() < 0.1 else None
        count = self.sequence(one).loadable(self.shaped(tokens))
        self.assert_unchanged(before)
        assert count == due * found.host
        return count

    def sequence(self, one: Tracked) -> HostSequence:
        assert isinstance(one.seq, HostSequence)
        return one.seq

    def random_host_run(self) -> None:
        """Check that `random_host_run` returns a text that ends on the host, and changes nothing."""
        before = self.state()
        run = self.cache.random_host_run(self.rng)
        self.assert_unchanged(before)
        if run is None:
            assert self.pending or not self.cache.stats().host_nodes
            return
        found = self.match(run.namespace, run.tokens.tolist())
        assert 0 < found.host == len(run.tokens) - found.length

    # Steps

    def execute(self, some: Sequence[Tracked]) -> None:
        if any(one.plan is not None and not one.executed for one in some):
            self.run_moves()
        super().execute(some)

    def values(self, one: Tracked) -> Values:
        """The values to write; those of a load are read from the host."""
        values = super().values(one)
        if one.seq.id in self.loads:
            assert np.array_equal(self.host.reshape(-1)[self.loads[one.seq.id].sources], values)
        return values

    def run_moves(self) -> None:
        """Run the moves that are due, in any order. Sometimes they fail, or are confirmed later.

        An unconfirmed batch has failed if the next one is asked for.
        """
        if self.intact:
            self.confirm_moves()
        failed = bool(self.batch)
        self.has_failed |= failed
        known = {each: self.reaches(each) for each in self.texts} if failed else {}
        self.batch = self.cache.moves()
        self.assert_moves()
        fate = self.rng.choices(("done", "late", "fails"), (16, 2, 1))[0] if self.faults and not failed else "done"
        for source, target in self.rng.sample(self.batch, len(self.batch)):
            torn = fate == "fails" and self.rng.random() < 0.5
            self.host[target] = GARBAGE if torn else self.pool.slots[source]
        self.intact = fate != "fails"
        if fate == "done":
            due, before = len(self.batch), self.cache.stats()
            self.confirm_moves()
            assert self.cache.stats().offloaded_blocks - before.offloaded_blocks == due
        for namespace, reaches in known.items():
            self.forget_lost(namespace, reaches)

    def forget_lost(self, namespace: Hashable, reaches: Sequence[tuple[list[int], int]]) -> None:
        """Forget the tokens of a failed batch; `reaches` are the texts and their matchable lengths before it failed."""
        self.texts[namespace] = Texts()
        for text, length in reaches:
            found = self.cache.match(self.shaped(text), namespace)
            assert length <= found.length + found.host, "a failed batch took tokens that were matchable"
            self.texts[namespace].add(text[: found.length + found.host])

    def confirm_moves(self) -> None:
        """Confirm the last batch, unless it has failed."""
        if self.intact:
            self.cache.moves_done()
            self.batch = []

    def finish_moves(self) -> None:
        """Run and confirm all moves."""
        self.faults = False
        self.run_moves()
        self.faults = True
        assert not self.pending

    def assert_moves(self) -> None:
        """Check that moves write host blocks that no other move and no load uses."""
        targets = {target for _, target in self.batch}
        assert len(targets) == len(self.batch), "two moves of one batch write the same host block"
        assert targets <= set(range(self.host_blocks))
        assert {source for source, _ in self.batch} <= set(range(self.num_blocks))
        assert not targets & self.read_host_blocks(), "a move writes a host block that a load reads"

    def read_host_blocks(self) -> set[int]:
        return {int(slot) // self.block_size for load in self.loads.values() for slot in load.sources}

    # Verbs

    def extend(self, one: Tracked, tokens: Sequence[int]) -> bool:
        """Plan `tokens`, or mostly, if they begin on the host, a load of some of them."""
        count = self.loadable(one, tokens) if tokens else 0
        if count and self.rng.random() < 0.7:
            return self.load(one, tokens[: self.rng.choice((1, count, count))])
        return super().extend(one, tokens)

    def load(self, one: Tracked, tokens: Sequence[int]) -> bool:
        """Plan a load of `tokens`; return False if it is refused, after checking the reason."""
        seq = self.sequence(one)
        if one.plan is None and self.loadable(one, tokens) < len(tokens):
            self.assert_refused(InvalidInput, lambda: seq.load(self.shaped(tokens)))
            return False

        def verb(asked: Ids) -> WritePlan:
            load = seq.load(asked)
            places = np.arange(len(one.tokens), len(one.tokens) + len(tokens))
            assert load.sources.dtype == np.int64
            assert np.array_equal(load.sources % self.block_size, places % self.block_size)
            self.loads[seq.id] = load
            return load.plan

        return self.plan(one, tokens, verb)

    def plan(self, one: Tracked, tokens: Sequence[int], verb: Callable[[Ids], WritePlan]) -> bool:
        pending, before = len(self.cache.tier.moves), self.cache.stats()
        if not super().plan(one, tokens, verb):
            return False
        assert one.plan is not None
        after = self.cache.stats()
        if self.taken(one, one.plan) <= before.free_blocks:
            assert after.host_free_blocks == before.host_free_blocks, "offloaded without need"
            assert len(self.cache.tier.moves) == pending
        if self.roomy:
            assert after.host_evicted_blocks == before.host_evicted_blocks, "evicted, although the host has room"
            assert after.evicted_blocks == before.evicted_blocks, "evicted, although the host has room"
        return True

    def commit(self, one: Tracked, publish: bool = True) -> None:
        self.execute([one])
        before = self.cache.stats()
        super().commit(one, publish)
        load, after = self.loads.pop(one.seq.id, None), self.cache.stats()
        loaded = 0 if load is None else len(load.sources)
        assert after.loaded_tokens - before.loaded_tokens == loaded
        assert after.hit_tokens - before.hit_tokens == loaded * (one.purpose == "request")

    def close(self, one: Tracked, hint: Hint | None = None) -> None:
        if self.roomy and hint is not None and hint.done:
            hint = None
        super().close(one, hint)
        self.loads.pop(one.seq.id, None)

    def demote(self, namespace: Hashable, prompt: Sequence[int], start: int) -> None:
        if not self.roomy:
            super().demote(namespace, prompt, start)

    def discard(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        """Forget the tokens of a text in both tiers; a load of some of them holds them."""
        if self.pending and self.loads:
            return False  # it is unclear which host nodes the loads read
        if self.is_loading(namespace, prompt, start):
            self.assert_refused(PrefixHeld, lambda: self.cache.discard(self.shaped(prompt), namespace, start))
            return False
        reaches = self.reaches(namespace)
        if not super().discard(namespace, prompt, start):
            return False
        self.texts[namespace] = Texts()
        for text, _ in reaches:
            self.texts[namespace].add(text[:start] if common(text, prompt) > start else text)
        for text, length in reaches:
            left = min(start, length) if common(text, prompt) > start else length
            assert self.reach(namespace, text) == left
        return True

    def is_loading(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        """Whether a pending load reads host-resident tokens of a text from `start` on."""
        for one in self.live:
            if one.seq.id in self.loads and one.namespace == namespace:
                found = self.match(namespace, prompt[: common(one.tokens + one.planned, prompt)])
                if found.host and found.length + found.host > max(start, len(one.tokens)):
                    return True
        return False

    def clear(self, *, pins: bool = False) -> None:
        super().clear(pins=pins)
        stats = self.cache.stats()
        assert (stats.host_nodes, len(self.cache.tier.moves)) == (0, 0)
        assert stats.host_free_blocks == self.host_blocks - len(self.read_host_blocks())

    def drain(self) -> None:
        said = self.texts
        self.faults = False
        super().drain()
        self.texts = said
        self.finish_moves()
        self.forget_what_is_gone()

    def forget_what_is_gone(self) -> None:
        """Shrink the model to the texts that are cached in a tier; with a roomy host that is all of them."""
        self.finish_moves()
        for namespace in self.texts:
            self.forget_lost(namespace, self.reaches(namespace))

    def wind_down(self) -> None:
        super().wind_down()
        self.finish_moves()
        self.verify()
        self.clear()
        assert self.cache.stats().host_free_blocks == self.host_blocks

    # Invariants

    def assert_gauges(self) -> None:
        before = self.before
        super().assert_gauges()
        assert self.before.host_blocks == self.host_blocks
        assert 0 <= self.before.host_free_blocks <= self.host_blocks
        assert all(getattr(before, name) <= getattr(self.before, name) for name in HOST_COUNTERS)
        if self.roomy and not self.has_failed:
            lost = self.before.evicted_tokens, self.before.evicted_blocks, self.before.ghosts, self.before.regret_tokens
            assert lost == (0, 0, 0, 0), "nothing has left the last tier"

    def assert_counted(self, before: CacheStats, after: CacheStats) -> None:
        """Check that an eviction counted no more blocks than it freed in both tiers."""
        freed = after.free_blocks - before.free_blocks + after.host_evicted_blocks - before.host_evicted_blocks
        assert 0 <= after.evicted_blocks - before.evicted_blocks <= freed

    def assert_little_is_stranded(self) -> None:
        self.finish_moves()
        super().assert_little_is_stranded()
        if self.loads:
            return
        size, images = self.block_size, set()
        for namespace, texts in self.texts.items():
            for text in leaves(texts):
                found = self.match(namespace, text)
                reach = found.length + found.host
                ends = [min(end + size, reach) for end in range(found.length // size * size, reach, size)]
                images |= {(namespace, *text[:end]) for end in ends if found.host}
        stats = self.cache.stats()
        used = stats.host_blocks - stats.host_free_blocks
        assert used <= len(images) + stats.host_nodes, f"{used} host blocks for {len(images)} images"

    def assert_images(self) -> None:
        """Check the content of each host node, and put garbage into all free blocks."""
        tier, size = self.cache.tier, self.block_size
        for node in tier.nodes():
            if not tier.is_resident(node):
                continue
            path = self.cache.state.tree.path(node)
            text = np.frombuffer(b"".join(bytes(each.key) for each in path), np.int32)
            values = kv(self.cache.state.tree.namespace(node), text)[node.start // size * size :]
            found = self.host[node.blocks.tolist()].reshape(-1)[: len(values)]
            assert np.array_equal(found, values), f"host node {node.id} has other content"
        self.host[tier.free.tolist()] = GARBAGE
        needed = set(tier.moves.values())
        self.pool.slots[[block for block in self.cache.state.pool.free if block not in needed]] = GARBAGE

    def assert_mirror(self) -> None:
        """Check that a mirror which reads the changes only has all nodes of both tiers."""
        if self.tracker is not None:
            changed, gone = self.tracker.look()
            for number in gone:
                del self.mirror[number]
            self.mirror |= {node.id: facts(node) for node in changed}
            assert self.mirror == {node.id: facts(node) for node in self.cache.state.tree.residents()}

    def verify(self) -> None:
        super().verify()
        self.assert_images()
        self.assert_mirror()
        for one in self.live:
            if one.seq.id in self.loads and not one.executed:
                self.values(one)


def facts(node: Node) -> Facts:
    """The part of a node that a mirror shows."""
    above = None if node.parent is None else node.parent.id
    return node.residence, above, node.start, bytes(node.key), tuple(node.blocks)


class RoomyHostWorld(HostWorld):
    """A host with room for all texts: each token that was published is found in one of both tiers."""

    roomy = True


class HostQuotaWorld(QuotaWorld, HostWorld):
    """A world with both: limits decide which device blocks are offloaded, and the host has none."""

    last_victim = -1

    def evicted(self, node: int, blocks: int) -> None:
        """Check a victim of the device once, though one part of it may be evicted and another one offloaded."""
        if node in self.before_eviction.groups and node != self.last_victim:
            super().evicted(node, blocks)
        self.last_victim, self.before_eviction = node, self.recount()
