"""The model of announcements: waiting requests, and the rule that their cached prefixes leave the device last."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.cache.fuzz import inside
from tests.cache.fuzz.tracked import common

if TYPE_CHECKING:
    from radixkv.cache.announcements import Announcement
    from tests.cache.fuzz.world import World


@dataclass
class Waiting:
    """The model of one announcement."""

    announcement: Announcement
    namespace: Hashable
    text: list[int]


def announce(world: World, namespace: Hashable, prompt: Sequence[int], limit: int | None) -> None:
    """Announce a text; nothing else changes that is visible."""
    if len(world.waiting) == 6:
        end_an_announcement(world, world.waiting[0])
    before = world.cache.stats()
    made = world.cache.announce(world.shaped(prompt), namespace, limit)
    world.waiting.append(Waiting(made, namespace, list(prompt[:limit])))
    assert world.cache.stats() == before


def end_an_announcement(world: World, waiting: Waiting) -> None:
    world.waiting.remove(waiting)
    waiting.announcement.close()
    waiting.announcement.close()


def assert_ends(world: World) -> None:
    """Each announcement ends where the cached prefix of its text does; moves to the host may be pending."""
    for each in world.waiting:
        most = world.texts_of(each.namespace).longest_prefix(each.text)
        reach = world.reach(each.namespace, each.text)
        assert reach <= each.announcement.end <= (most if world.host else reach)


@contextmanager
def announced_last(world: World) -> Iterator[None]:
    """Check that announced tokens leave the device only where no leaf of their priority and group ends unannounced."""
    leaves = inside.evictable_leaves(world.cache)
    before = [(each, inside.priorities(world.cache, each.text, each.namespace)) for each in world.waiting]
    yield
    left = inside.evictable_leaves(world.cache)
    for each, priorities in before:
        lost = priorities[len(inside.priorities(world.cache, each.text, each.namespace)) :]
        for number in left.keys() & leaves.keys() if lost else ():
            namespace, priority, text = left[number]
            start = (len(text) - 1) // world.block_size * world.block_size
            announced = any(common(text, one.text) > start for one in world.waiting if one.namespace == namespace)
            alike = world.shares is None or world.shares.group(namespace) == world.shares.group(each.namespace)
            assert announced or not alike or priority > max(lost), "an unannounced block stays, an announced one left"
