"""The verbs on cached text, compared with the model: pins, demote, discard, clear, evict."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from radixkv.cache import CacheStats
from radixkv.errors import PinBudgetExceeded, PrefixHeld
from tests.cache.fuzz import inside
from tests.cache.fuzz.tracked import Announced, Pinned, common, leaves
from tests.cache.naive import Texts

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World


# Pins


def pin(world: World, namespace: Hashable, prompt: Sequence[int], ttl: float | None = None) -> None:
    world.cache.stats()
    found = world.match(namespace, prompt)
    budget = world.cache.stats().num_blocks * 0.5
    pinned, before = world.cache.stats().pinned_blocks, world.state()
    try:
        pin = world.cache.pin(world.shaped(prompt), namespace, ttl)
    except PinBudgetExceeded:
        assert pinned + len(found.blocks) > budget
        world.assert_unchanged(before)
        return
    assert pin.length == found.length
    assert pin.complete == (found.length == len(prompt))
    assert pin.blocks == len(found.blocks)
    expires = float("inf") if ttl is None else world.now + ttl
    world.pins.append(Pinned(pin, namespace, list(prompt[: found.length]), expires))
    assert pinned <= world.cache.stats().pinned_blocks <= budget


def release(world: World, pinned: Pinned) -> None:
    pinned.pin.release()
    world.pins.remove(pinned)


def unpin(world: World, namespace: Hashable, prompt: Sequence[int]) -> None:
    """Release exactly the pins whose text is this one, and leave those on its parts and continuations."""
    world.cache.stats()
    text = list(prompt)
    here = [each for each in world.pins if (each.namespace, each.tokens) == (namespace, text) and each.tokens]
    assert world.cache.unpin(world.shaped(text), namespace) == len(here)
    assert not any(each.pin.active for each in here)
    world.pins = [each for each in world.pins if each not in here]
    assert all(each.pin.active for each in world.pins if each.tokens)


def wait(world: World, seconds: float) -> None:
    """Let time pass; the next `stats` releases expired pins."""
    world.now += seconds
    world.cache.stats()
    world.pins = [pinned for pinned in world.pins if world.now < pinned.expires]


# Announcements


def announce(world: World, namespace: Hashable, prompt: Sequence[int], limit: int | None) -> None:
    """Change the order of eviction, and nothing else that is visible."""
    before = world.cache.stats()
    made = world.cache.announce(world.shaped(prompt), namespace, limit)
    assert world.cache.stats() == before
    world.waiting.append((made, namespace, list(prompt[:limit])))


def end_an_announcement(world: World, announced: Announced) -> None:
    world.waiting.remove(announced)
    announced[0].close()
    announced[0].close()


def assert_announced(world: World) -> None:
    """Check that each announcement ends where the cached prefix of its text does, also if its moves are pending."""
    for announcement, namespace, text in world.waiting:
        least, most = world.reach(namespace, text), world.texts_of(namespace).longest_prefix(text)
        assert least <= announcement.end <= (most if world.host else least)


# Demoting and discarding


def demote(world: World, namespace: Hashable, prompt: Sequence[int], start: int) -> None:
    """Change the order of eviction, and nothing else that is visible."""
    before, hit = world.cache.stats(), world.match(namespace, prompt).length
    world.cache.demote(world.shaped(prompt), namespace, start)
    after = world.cache.stats()
    assert (after.free_blocks, after.cached_blocks) == (before.free_blocks, before.cached_blocks)
    assert world.match(namespace, prompt).length == hit


def discard(world: World, namespace: Hashable, prompt: Sequence[int], start: int) -> bool:
    """Forget exactly the tokens of a text from `start` on, or return False because they are held."""
    if world.host and world.host.refuses_discard(namespace, prompt, start):
        return False
    world.cache.stats()
    before, state = world.cache.stats(), world.state()
    wrong = list(prompt[: world.match(namespace, prompt).length])
    found = [(text, world.match(namespace, text)) for text in leaves(world.texts_of(namespace))]
    below = [(text, match) for text, match in found if common(text, wrong) > start]
    blocks = {int(block) for _, match in below for block in match.blocks[start // world.block_size :]}
    try:
        freed = world.cache.discard(world.shaped(prompt), namespace, start)
    except PrefixHeld:
        world.assert_unchanged(state)
        assert somebody_has(world, namespace, wrong, start, blocks)
        return False
    assert not somebody_has(world, namespace, wrong, start, blocks)
    after = world.cache.stats()
    assert freed == after.free_blocks - before.free_blocks
    assert (after.evicted_blocks, after.ghosts) == (before.evicted_blocks, before.ghosts)
    gone = list(prompt) if world.host else wrong  # with a host, tokens after the match leave their tier too
    world.texts[namespace] = Texts()
    for text, _ in found:
        world.texts[namespace].add(text[:start] if common(text, gone) > start else text)
    for text, match in found:
        left = start if common(text, wrong) > start else match.length
        assert world.match(namespace, text[: match.length]).length == left
        reached = match.length + match.host
        left = min(start, reached) if common(text, gone) > start else reached
        assert world.reach(namespace, text) == left
    if world.states:
        world.states.discarded(namespace, gone, start)
    return True


def somebody_has(world: World, namespace: Hashable, wrong: Sequence[int], start: int, blocks: set[int]) -> bool:
    """Whether a token of `wrong` from `start` on is protected, or read in these blocks."""
    if world.held_length(namespace, wrong) > start:
        return True
    first = start // world.block_size
    for one in world.live:
        if one.namespace == namespace and len(one.tokens) > start:
            read = one.table[first : -(-len(one.tokens) // world.block_size)]
            read += [source for source, _ in one.plan.copies] if one.plan else []
            if blocks.intersection(read):
                return True
    return False


# Clearing


def clear(world: World, *, pins: bool = False) -> None:
    world.cache.stats()
    world.cache.clear(pins=pins)
    if pins:
        assert not any(pinned.pin.active for pinned in world.pins)
        assert world.cache.stats().pinned_blocks == 0
        world.pins.clear()
    world.texts = world.held_texts()
    assert world.cache.evictable_blocks == 0
    if world.host:
        world.host.assert_empty()
    if world.states:
        world.states.forget_lost()


def clear_namespace(world: World, namespace: Hashable) -> None:
    """Forget exactly what nothing holds in one namespace; every other text stays as it is, on the same blocks."""
    world.cache.stats()
    before = world.cache.stats()
    others = [(each, text) for each, texts in world.texts.items() if each != namespace for text in leaves(texts)]
    found = [(world.match(each, text), world.cache.explain(text, each)) for each, text in others]
    gone = leaves(world.texts_of(namespace))
    freed = world.cache.clear_namespace(namespace)
    after = world.cache.stats()
    assert freed == after.free_blocks - before.free_blocks
    assert after.evicted_blocks == before.evicted_blocks
    for (each, text), (match, explanation) in zip(others, found, strict=True):
        again = world.match(each, text)
        assert (again.length, again.matched, again.host) == (match.length, match.matched, match.host)
        assert again.blocks.tolist() == match.blocks.tolist()
        assert world.cache.explain(text, each) == explanation
    world.texts[namespace] = world.held_texts().get(namespace, Texts())
    for text in gone:
        left = world.match(namespace, text)
        assert left.matched <= world.texts[namespace].longest_prefix(text)
        assert left.host == left.idle_blocks == 0
        explanation = world.cache.explain(text, namespace)
        assert "evicted" not in (explanation.reason, explanation.kv_reason), "a ghost of it is left"
    if world.states:
        world.states.forget_lost()


def forget_what_is_gone(world: World) -> None:
    """Shrink the model to the cached texts, so that long runs do not slow down."""
    if world.host:
        world.host.forget_what_is_gone()
    else:
        world.texts = {namespace: cached_texts(world, namespace, texts) for namespace, texts in world.texts.items()}
    if world.states:
        world.states.forget_lost()


def cached_texts(world: World, namespace: Hashable, texts: Texts) -> Texts:
    """The parts of some texts that are resident on the device."""
    cached = Texts()
    for text in leaves(texts):
        cached.add(text[: world.match(namespace, text).length])
    return cached


# Evicting


def evict(world: World, count: int) -> None:
    """Evict until `count` blocks are free; the result says whether they are, and held texts stay."""
    world.cache.stats()
    before = world.cache.stats()
    _evict(world, count, before)
    if world.exact:
        forget_evicted(world)


def forget_evicted(world: World) -> None:
    """Shrink the model of an ample pool to the texts that an eviction by name has left."""
    for namespace, texts in world.texts.items():
        world.texts[namespace] = Texts()
        for text in leaves(texts):
            left = inside.cached_kv(world.cache, text, namespace).length
            assert left >= world.held_length(namespace, text)
            world.texts[namespace].add(text[:left])
    if world.states:
        world.states.forget_lost()


def _evict(world: World, count: int, before: CacheStats) -> None:
    enough = world.cache.evict(count)
    after = world.cache.stats()
    assert enough == (after.free_blocks >= count)
    assert enough or not after.leaves, "stopped although there was a leaf to evict"
    assert_counted(world, before, after)
    assert enough or count > before.free_blocks + before.cached_blocks, "evictable_blocks promised more"


def assert_counted(world: World, before: CacheStats, after: CacheStats) -> None:
    """Check that an eviction counted the blocks that it freed, in the last tier that had them."""
    freed = after.free_blocks - before.free_blocks + after.host_evicted_blocks - before.host_evicted_blocks
    counted = after.evicted_blocks - before.evicted_blocks
    assert 0 <= counted <= freed if world.host else counted == freed


def drain(world: World) -> None:
    """Take every block that a sequence can take, and check what is left."""
    said = world.texts
    if world.host:
        world.host.faults = False
    take_all(world)
    if world.host:
        world.texts = said
        forget_what_is_gone(world)
    elif world.states:
        world.states.forget_lost()


def take_all(world: World) -> None:
    """Take exactly the blocks that are reported as free or evictable.

    This evicts all unheld tokens except those inside held blocks: evicting these would free nothing. Examples are
    tails inside such blocks, and tokens that a closed twin has published while the other reads them unpublished.
    """
    flood, taken = world.open("flood", []), 0
    first, nodes = world.available(), world.cache.stats().nodes
    while available := world.available():
        world.commit(flood, publish=False)
        assert not world.extend(flood, [0] * (available * world.block_size + 1))
        assert world.extend(flood, [0] * (available * world.block_size))
        taken += available
    stranded = max(len(world.live) - 1 + len(world.pins), nodes - world.cache.stats().nodes)
    assert first <= taken <= first + stranded
    held, said, world.texts = world.held_texts(), world.texts, world.held_texts()
    for namespace, texts in said.items():
        for text in leaves(texts):
            kept = held.get(namespace, Texts()).longest_prefix(text)
            match = inside.cached_kv(world.cache, text, namespace)
            left = match.length
            assert kept <= left
            assert left <= -(-kept // world.block_size) * world.block_size or match.blocks[-1] in world.read_blocks()
            if left > kept:
                world.texts[namespace].add(text[:left])
    world.close(flood)
    assert world.cache.free_blocks == taken
