"""The model of a host tier: blocks with content, moves that run in steps, are late or fail, and loads.

Each text is cached on the device up to one position, on the host up to another one, and not after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache import CacheStats, WritePlan
from radixkv.cache.types import Load
from radixkv.disk import SCRATCH
from radixkv.errors import InvalidInput, PrefixHeld
from tests.cache.fuzz import inside
from tests.cache.fuzz.options import Sizes
from tests.cache.fuzz.tracked import Tracked, common, leaves
from tests.cache.naive import Texts, Values, kv
from tests.cache.verbs import Ids

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

GARBAGE = np.uint64(13)  # in free blocks, and in those that a failed move has written
ROOM = 4096  # blocks of a host that never evicts


class HostModel:
    """The host blocks of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        few = world.rng.choice((1, 3, world.num_blocks, 4 * world.num_blocks))
        self.num_blocks = ROOM if world.options.ample else few
        self.blocks = np.full((self.num_blocks + SCRATCH, world.block_size), GARBAGE)
        self.batch: list[tuple[int, int]] = []  # moves that ran and are not confirmed yet
        self.intact = True  # whether they may be confirmed
        self.faults = True
        self.has_failed = False
        self.loads: dict[int, Load] = {}  # the pending ones, by sequence id
        self.skipped: dict[int, int] = {}  # the tokens of their texts that are on the device, of hybrids

    def sized(self, sizes: Sizes) -> Sizes:
        return replace(sizes, host_blocks=self.num_blocks)

    # Reading

    @property
    def is_pending(self) -> bool:
        """Whether some moves did not run or are not confirmed: their tokens are not matchable."""
        return bool(self.batch) or bool(self.pending_moves())

    def pending_moves(self) -> int:
        return len(inside.pending_moves(self.world.cache))

    def assert_reach(self, reach: int, most: int) -> None:
        assert reach <= most, "the host has tokens that were never published, or were discarded"
        assert reach == most or self.is_pending or not self.world.options.ample, f"{most - reach} tokens are lost"

    def reaches(self, namespace: Hashable) -> list[tuple[list[int], int]]:
        """The texts of a namespace, each with the length that is cached in both tiers."""
        texts = leaves(self.world.texts_of(namespace))
        return [(text, self.world.reach(namespace, text)) for text in texts]

    def loadable(self, one: Tracked, tokens: Sequence[int]) -> int:
        """How many of the next tokens a sequence can load.

        Without recurrent state these are the tokens on the host, if no device block has the next one.
        """
        world = self.world
        text = [*one.tokens, *tokens]
        found = world.match(one.namespace, text)
        due = one.plan is None and one.published == len(one.tokens)
        before = world.state() if world.rng.random() < 0.1 else None
        count: int = one.seq.loadable(world.shaped(tokens))
        world.assert_unchanged(before)
        if world.states and one.purpose != "audit":
            world.states.assert_loadable(one, text, found, count if due else -count)
        else:
            assert count == (due and found.length == len(one.tokens)) * found.host
        return count

    def load_length(self, count: int) -> int:
        """How many of `count` loadable tokens to load: all, if the load ends at a snapshot."""
        return count if self.world.states else self.world.rng.choice((1, count, count))

    def random_run(self) -> None:
        """Check that `random_host_run` returns a text that ends on the host, and changes nothing."""
        world = self.world
        before = world.state()
        run = world.cache.state.host and world.cache.state.host.random_run(world.rng)
        world.assert_unchanged(before)
        if run is None:
            assert self.is_pending or not world.cache.stats().host_nodes
            return
        found = world.match(run.namespace, run.tokens.tolist())
        assert 0 < found.host == len(run.tokens) - found.length

    # Steps

    def run_moves(self) -> None:
        """Run the moves that are due, in any order. Sometimes they fail, or are confirmed later.

        An unconfirmed batch has failed if the next one is asked for.
        """
        world = self.world
        if self.intact:
            self.confirm_moves()
        failed = bool(self.batch)
        self.has_failed |= failed
        known = {each: self.reaches(each) for each in world.texts} if failed else {}
        self.batch = world.cache.moves()
        self.assert_moves()
        fates = world.rng.choices(("done", "late", "fails"), (16, 2, 1))
        fate = fates[0] if self.faults and not failed else "done"
        for source, target in world.rng.sample(self.batch, len(self.batch)):
            torn = fate == "fails" and world.rng.random() < 0.5
            self.blocks[target] = GARBAGE if torn else world.pool.slots[source]
        self.intact = fate != "fails"
        if fate == "done":
            due, before = len(self.batch), world.cache.stats()
            self.confirm_moves()
            assert world.cache.stats().offloaded_blocks - before.offloaded_blocks == due
        for namespace, reaches in known.items():
            self.forget_lost(namespace, reaches)

    def forget_lost(self, namespace: Hashable, reaches: Sequence[tuple[list[int], int]]) -> None:
        """Forget the tokens of a failed batch; `reaches` are the texts and their matchable lengths before it failed."""
        world = self.world
        world.texts[namespace] = Texts()
        for text, length in reaches:
            found = inside.cached_kv(world.cache, text, namespace)
            assert length <= found.length + found.host, "a failed batch took tokens that were matchable"
            world.texts[namespace].add(text[: found.length + found.host])
        if world.states:
            world.states.forget_lost()

    def forget_what_is_gone(self) -> None:
        """Shrink the model to the texts that are cached in a tier; with an ample host that is all of them."""
        self.finish_moves()
        for namespace in self.world.texts:
            self.forget_lost(namespace, self.reaches(namespace))

    def confirm_moves(self) -> None:
        """Confirm the last batch, unless it has failed."""
        if self.intact:
            self.world.cache.moves_done()
            self.batch = []

    def finish_moves(self) -> None:
        """Run and confirm all moves."""
        self.faults = False
        self.run_moves()
        self.faults = True
        assert not self.is_pending

    def assert_moves(self) -> None:
        """Check that moves write host blocks that no other move and no load uses."""
        targets = {target for _, target in self.batch}
        assert len(targets) == len(self.batch), "two moves of one batch write the same host block"
        assert targets <= set(range(self.num_blocks))
        assert {source for source, _ in self.batch} <= set(range(self.world.num_blocks))
        assert not targets & self.read_blocks(), "a move writes a host block that a load reads"

    def read_blocks(self) -> set[int]:
        """The host blocks that pending loads read."""
        return {int(slot) // self.world.block_size for load in self.loads.values() for slot in load.sources}

    # Verbs

    def load(self, one: Tracked, tokens: Sequence[int]) -> bool:
        """Plan a load of `tokens`; return False if it is refused, after checking the reason."""
        world, seq = self.world, one.seq
        if one.plan is None and self.loadable(one, tokens) < len(tokens):
            world.assert_refused(InvalidInput, lambda: seq.load(world.shaped(tokens)))
            return False
        before = one.tokens, one.published, one.table
        skipped, held = self._skip_to_the_host(one, tokens) if world.states and one.plan is None else ([], None)

        def verb(asked: Ids) -> WritePlan:
            load = seq.load([*skipped, *asked] if skipped else asked)
            places = np.arange(len(one.tokens), len(one.tokens) + len(asked))
            assert load.sources.dtype == np.int64
            assert np.array_equal(load.sources % world.block_size, places % world.block_size)
            self.loads[seq.id], self.skipped[seq.id] = load, len(skipped)
            if skipped:  # holding them may have replaced copies of part-filled blocks by those of other texts
                one.table = seq.block_table[: len(one.table)].tolist()
                one.table[-1:] = [source for source, _ in load.plan.copies] or one.table[-1:]
            return load.plan

        if world.plan(one, tokens[len(skipped) :], verb, held):
            return True
        one.tokens, one.published, one.table = before
        return False

    def _skip_to_the_host(self, one: Tracked, tokens: Sequence[int]) -> tuple[Sequence[int], int | None]:
        """Let a hybrid hold the tokens up to the host, whose KV is on the device.

        Return these tokens, and how many evictable blocks it holds then; None without any.
        """
        text = [*one.tokens, *tokens]
        found = self.world.match(one.namespace, text)
        skipped = tokens[: found.length - len(one.tokens)]
        if not skipped:
            return [], None
        one.tokens, one.published, one.table = text[: found.length], found.length, found.blocks.tolist()
        return skipped, found.idle_blocks

    def assert_needed(self, before: CacheStats, moving: int, taken: int) -> None:
        """Check that a plan of `taken` blocks has offloaded and evicted only what it needed."""
        after = self.world.cache.stats()
        if taken <= before.free_blocks:
            assert after.host_free_blocks == before.host_free_blocks, "offloaded without need"
            assert self.pending_moves() == moving
        if self.world.options.ample:
            assert after.host_evicted_blocks == before.host_evicted_blocks, "evicted, although the host has room"
            assert after.evicted_blocks == before.evicted_blocks, "evicted, although the host has room"

    def assert_loads(self, one: Tracked, values: Values) -> None:
        """Check that a load, if the sequence has one, reads the values that it is to write."""
        if one.seq.id in self.loads:
            assert np.array_equal(self.blocks.reshape(-1)[self.loads[one.seq.id].sources], values)

    def committed(self, one: Tracked, before: CacheStats) -> int:
        """Check what a commit counted; returns the number of loaded tokens, and of those that were skipped for them."""
        load, after = self.loads.pop(one.seq.id, None), self.world.cache.stats()
        loaded = 0 if load is None else len(load.sources)
        assert after.loaded_tokens - before.loaded_tokens == loaded
        found = loaded + self.skipped.pop(one.seq.id, 0)
        assert after.hit_tokens - before.hit_tokens == found * (one.purpose == "request")
        return found

    def refuses_discard(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        """Check that text is not discarded while a load reads it."""
        if self.is_pending and self.loads:
            return True  # it is unclear which host nodes the loads read
        if not self.is_loading(namespace, prompt, start):
            return False
        world = self.world
        world.assert_refused(PrefixHeld, lambda: world.cache.discard(world.shaped(prompt), namespace, start))
        return True

    def is_loading(self, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
        """Whether a pending load reads host-resident tokens of a text from `start` on."""
        for one in self.world.live:
            if one.seq.id in self.loads and one.namespace == namespace:
                found = self.world.match(namespace, prompt[: common(one.tokens + one.planned, prompt)])
                if found.host and found.length + found.host > max(start, len(one.tokens)):
                    return True
        return False

    # Invariants

    def verify(self) -> None:
        stats = self.world.cache.stats()
        assert stats.host_blocks == self.num_blocks
        assert 0 <= stats.host_free_blocks <= self.num_blocks
        if self.world.options.ample and not self.has_failed:
            lost = stats.evicted_tokens, stats.evicted_blocks, stats.ghosts, stats.regret_tokens
            assert lost == (0, 0, 0, 0), "nothing has left the last tier"
        self.assert_images()
        for one in self.world.live:
            if not one.executed and one.seq.id in self.loads:
                self.world.values(one)

    def assert_images(self) -> None:
        """Check the content of each host node, and put garbage into all free blocks."""
        world, unwritten = self.world, inside.unwritten_nodes(self.world.cache)
        for node in inside.nodes(world.cache):
            if node.residence == "host" and node.id not in unwritten:
                first = node.start // world.block_size * world.block_size
                values = kv(node.namespace, node.text)[first:]
                found = self.blocks[node.blocks].reshape(-1)[: len(values)]
                assert np.array_equal(found, values), f"host node {node.id} has other content"
        self.blocks[inside.free_host_blocks(world.cache)] = GARBAGE
        needed = set(inside.pending_moves(world.cache).values())
        world.pool.slots[[block for block in inside.free_blocks(world.cache) if block not in needed]] = GARBAGE

    def assert_empty(self) -> None:
        stats = self.world.cache.stats()
        assert (stats.host_nodes, self.pending_moves()) == (0, 0)
        lent = sum(len(each.blocks) for each in self.world.disk.arriving) if self.world.disk else 0
        assert stats.host_free_blocks == self.num_blocks - len(self.read_blocks()) - lent

    def assert_little_is_stranded(self) -> None:
        """Check that each block of cached text has one image, and one more for each node."""
        if self.loads or (self.world.disk and self.world.disk.arriving):
            return
        world, size, images = self.world, self.world.block_size, set()
        for namespace, texts in world.texts.items():
            for text in leaves(texts):
                found = world.match(namespace, text)
                reach = found.length + found.host
                ends = [min(end + size, reach) for end in range(found.length // size * size, reach, size)]
                images |= {(namespace, *text[:end]) for end in ends if found.host}
        stats = world.cache.stats()
        used = stats.host_blocks - stats.host_free_blocks
        assert used <= len(images) + stats.host_nodes, f"{used} host blocks for {len(images)} images"
