"""A group of beams over the cache and its naive model: forks and closes of one step, and a recount of its blocks.

The members continue the text of one sequence. Each step closes the members without a successor first, then forks those
with several, and extends each by one token that stays unpublished.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import count

from radixkv.cache import Hint
from tests.cache.fuzz.tracked import Tracked
from tests.cache.fuzz.world import World
from tests.cache.naive import Texts

LETTERS = 4


@dataclass
class Beam:
    """A member. `writes` has a number for each token: beams with equal numbers share one computed token."""

    one: Tracked
    writes: list[int]


class BeamGroup:
    """The beams that continue one sequence without a plan; the group owns it."""

    def __init__(self, world: World, first: Tracked, rng: random.Random) -> None:
        assert first.plan is None and first.unknown < 0
        self.world, self.rng, self._numbers = world, rng, count()
        self.beams = [Beam(first, [next(self._numbers) for _ in first.tokens])]

    def run(self, steps: int, width: int) -> None:
        """Advance up to `width` beams; sometimes one is cut back, or all are preempted and resume."""
        for _ in range(steps):
            self.beams = [beam for beam in self.beams if not beam.one.seq.closed]  # the world may close any sequence
            if not self.beams:
                return
            chance = self.rng.random()
            if not self.advance(self.rng.randint(1, width)) or chance < 0.05:
                self.preempt()
            elif chance < 0.15:
                self.truncate()

    def advance(self, width: int) -> bool:
        """Advance to at most `width` beams of random parents; return False if blocks ran out."""
        successors = Counter(self.rng.randrange(len(self.beams)) for _ in range(width))
        parents = [(self.beams[at], min(number, LETTERS)) for at, number in sorted(successors.items())]
        self._close([beam for at, beam in enumerate(self.beams) if at not in successors])
        tokens = []
        for parent, number in parents:
            letters = self.rng.sample(range(LETTERS), number)  # siblings continue with distinct tokens
            tokens.append((parent, letters[0]))
            for letter in letters[1:]:
                twin = self.world.fork(parent.one)
                if twin is not None:  # no row may be left for its recurrent state
                    tokens.append((Beam(twin, list(parent.writes)), letter))
        self.beams = [beam for beam, _ in tokens]
        return self._compute(tokens)

    def _compute(self, tokens: list[tuple[Beam, int]]) -> bool:
        """Append one token to each beam in one step; return False if blocks ran out."""
        for beam, token in self.rng.sample(tokens, len(tokens)):
            if not self.world.extend(beam.one, [token]):
                return False
        self.world.execute([beam.one for beam in self.beams])
        for beam in self.rng.sample(self.beams, len(self.beams)):
            self.world.commit(beam.one, publish=False)
            beam.writes.append(next(self._numbers))
        self.recount()
        return True

    def _close(self, dead: list[Beam]) -> None:
        """Close beams without a successor: unpublished blocks that no other sequence reads are free at once."""
        read = {block for one in self.world.live for block in one.table if all(one is not beam.one for beam in dead)}
        read |= {block for one in self.world.live if one.plan for copy in one.plan.copies for block in copy}
        own = {block for beam in dead for block in beam.one.table} & self.world.private - read
        before = self.world.cache.free_blocks
        for beam in dead:
            self.world.close(beam.one, Hint(done=True))
        assert self.world.cache.free_blocks - before >= len(own), "a dead beam keeps a block"

    def truncate(self) -> None:
        """Cut one beam back by some tokens, which may be before the place where it was forked."""
        beam = self.rng.choice(self.beams)
        length = len(beam.one.tokens)
        self.world.truncate(beam.one, self.rng.randint(max(0, length - 5), length))
        del beam.writes[len(beam.one.tokens) :]

    def preempt(self) -> None:
        """Publish and close every beam; then resume each after the preceding one, as far as there are blocks."""
        texts, namespace = [], self.beams[0].one.namespace
        for beam in self.beams:
            if beam.one.plan is not None:
                self.world.commit(beam.one, publish=False)
            self.world.publish(beam.one, len(beam.one.tokens))
            texts.append(list(beam.one.tokens))
        for beam in self.beams:
            self.world.close(beam.one)
        numbers: dict[tuple[int, ...], int] = {}  # by text: a resumed beam hits the tokens of the preceding ones
        self.beams = []
        for text in texts:
            one = self.world.open(namespace, text, purpose="resume")
            if self.world.extend(one, text[len(one.tokens) :]):
                self.world.commit(one)
                prefixes = [tuple(text[:end]) for end in range(1, len(text) + 1)]
                self.beams.append(Beam(one, [numbers.setdefault(each, next(self._numbers)) for each in prefixes]))
            else:
                self.world.close(one)

    def recount(self) -> None:
        """Check that the beams read each common block once, and each a copy of at most one block.

        A full block is common to beams that share all tokens up to its end.
        """
        computed = Texts()
        for beam in self.beams:
            computed.add(beam.writes)
        blocks = {block for beam in self.beams for block in beam.one.table}
        assert len(blocks) <= computed.blocks(self.world.block_size), (
            f"{len(self.beams)} beams read {len(blocks)} blocks"
        )
