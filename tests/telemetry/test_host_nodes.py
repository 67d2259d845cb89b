"""Host nodes in telemetry: they are sent, change and go like others, and the view of the tree names their tier."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import cast

import pytest

from radixkv.cache import Hint, PrefixCache, Sequence
from radixkv.errors import OutOfBlocks, PinBudgetExceeded, PrefixHeld
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import NodeRecord
from radixkv.telemetry.tree_view import tree_view
from tests.cache.verbs import prompt, publish
from tests.telemetry.expected import collect_and_check, expand, watched


def step(cache: PrefixCache) -> None:
    """Run the moves of a step."""
    cache.moves()
    cache.moves_done()


def texts(rng: Random) -> tuple[list[int], str | None]:
    """Return a text that shares prefixes of different lengths with others, and its namespace."""
    text = [*prompt(rng.randrange(3), 1 + rng.randrange(9)), *[50 + rng.randrange(3)] * rng.randrange(12)]
    return text, rng.choice((None, None, "tenant"))


class Life:
    """Random calls of a cache with a host tier."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        self.cache, self.rng = cache, Random(seed)
        self.open: list[Sequence] = []

    def live(self) -> None:
        """Make one call."""
        text, space = texts(self.rng)
        verb = self.rng.choice(("open", "open", "open", "close", "close", "pin", "demote", "discard", "moves", "lost"))
        with suppress(OutOfBlocks, PinBudgetExceeded, PrefixHeld):
            getattr(self, f"_{verb}")(text, space)

    def _open(self, text: list[int], space: str | None) -> None:
        sequence = cast(Sequence, self.cache.open(text, space, priority=self.rng.choice((0, 0, 1))))
        self.open.append(sequence)
        if found := sequence.loadable(text[sequence.length :]):
            sequence.load(text[sequence.length : sequence.length + found])
            sequence.commit()
        sequence.extend(text[sequence.length :])
        sequence.commit()

    def _close(self, text: list[int], space: str | None) -> None:
        if self.open:
            self.open.pop(self.rng.randrange(len(self.open))).close(Hint(done=self.rng.random() < 0.2))

    def _pin(self, text: list[int], space: str | None) -> None:
        self.cache.pin(text, space, ttl=3.0)

    def _demote(self, text: list[int], space: str | None) -> None:
        self.cache.demote(text, space)

    def _discard(self, text: list[int], space: str | None) -> None:
        self.cache.discard(text, space, len(text) // 2)

    def _moves(self, text: list[int], space: str | None) -> None:
        step(self.cache)

    def _lost(self, text: list[int], space: str | None) -> None:
        self.cache.moves()  # never confirmed: the next call drops the nodes


@pytest.mark.parametrize("seed", range(6))
def test_collections_add_up_to_both_tiers(seed: int) -> None:
    cache, recorder, mirror, now = watched(12, 4, host_blocks=10)
    life = Life(cache, seed)
    residences = set()
    for turn in range(300):
        now[0] += 0.5
        life.live()
        if turn % (1 + seed % 3) == 0:
            collect_and_check(cache, recorder, mirror)
            residences |= {node.residence for node in mirror.nodes.values()}
    stats = cache.stats()
    assert residences == {"device", "host"} and stats.loaded_tokens and stats.host_evicted_blocks


def offloaded() -> tuple[PrefixCache, Recorder, Mirror, list[float]]:
    """A cache whose first text is on the host, but for its first tokens."""
    cache, recorder, mirror, now = watched(6, 4, host_blocks=8)
    publish(cache, prompt(1, 20), "a")
    publish(cache, prompt(2, 12))
    step(cache)
    return cast(PrefixCache, cache), recorder, mirror, now


def sent(mirror: Mirror) -> list[tuple[str, int, int, int]]:
    """Return residence, start, tokens and blocks of all nodes, roots left out."""
    nodes = sorted((node for node in mirror.nodes.values() if node.tokens), key=lambda node: node.id)
    return [(node.residence, node.start, node.tokens, len(expand(node.blocks))) for node in nodes]


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
