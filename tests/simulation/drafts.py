"""Draft as an adversary that knows the answers, and check the plans with drafts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixkv.engine.drafts import Draft
from radixkv.engine.request import Stream
from radixkv.engine.scheduler import Work
from tests.simulation.model import VOCAB

if TYPE_CHECKING:
    from tests.simulation.world import World


class Adversary:
    """Drafts right, half right and wrong tokens, some of them beyond the end of the answer, and often nothing."""

    def __init__(self, answer: Callable[[Stream], Sequence[int]], seed: int = 0, vocab: int = VOCAB) -> None:
        self._answer, self._seed, self._vocab = answer, seed, vocab

    def of(self, stream: Stream, prediction: Sequence[int]) -> AdversaryOfStream:
        rng = random.Random(f"drafts of {self._seed}/{stream.request.scheduling.number}.{stream.index}")
        return AdversaryOfStream(stream, self._answer(stream), rng, self._vocab)


class AdversaryOfStream:
    """The drafts of one stream, whose answer is known."""

    def __init__(self, stream: Stream, answer: Sequence[int], rng: random.Random, vocab: int) -> None:
        self._stream, self._answer, self._rng, self._vocab = stream, answer, rng, vocab

    def propose(self, most: int) -> Draft:
        rng, rest = self._rng, self._answer[self._stream.output_length :]
        right = rng.choice((0, 1, rng.randint(0, most), most, most, most))
        wrong = [rng.randrange(self._vocab) for _ in range(rng.choice((0, 1, most)))]
        source = rng.choice(("tree", "past", "own", "prediction"))
        return Draft(array("i", [*rest[:right], *wrong][:most]), source, rng.choice((3, 6, 12, 24)))


class DraftChecks:
    """Compares each step with the step before it was lengthened by drafts."""

    def __init__(self, world: World) -> None:
        self._world, self._launched = world, 0
        if world.core.speculation is not None:
            self._launch = world.core.speculation.launch
            world.core.speculation.launch = self.launch  # type: ignore[method-assign]

    def rejected(self) -> int:
        """Return the number of verified tokens that are in no reply, or whose requests ended first."""
        counters = vars(self._world.core.counters)
        return self._launched - sum(count for name, count in counters.items() if name.startswith("accepted_from_"))

    def launch(self, work: list[Work]) -> list[Work]:
        """Draft, and check that drafts take free blocks only, and that plans only grow."""
        with self._world.model.watched():
            return self._launch_checked(work)

    def _launch_checked(self, work: list[Work]) -> list[Work]:
        cache, counters = self._world.cache, self._world.core.counters
        plans, before, free = [each.plan for each in work], cache.stats(), cache.free_blocks
        tables = [len(each.stream.sequence.block_table) if each.stream.active else 0 for each in work]
        preempted = counters.preemptions
        drafting = self._launch(work)
        after, ended = cache.stats(), len(drafting) < len(work)
        assert (after.evicted_blocks, after.copied_blocks) == (before.evicted_blocks, before.copied_blocks)
        assert counters.preemptions == preempted
        taken = 0
        for each, plan, table in zip(work, plans, tables, strict=True):
            draft = each.draft or array("i")
            self._launched += len(draft)
            assert (
                each.plan.copies == plan.copies and each.plan.slots.tolist()[: len(plan.slots)] == plan.slots.tolist()
            )
            assert len(each.plan.slots) == len(plan.slots) + len(draft)
            if draft:
                assert each.rows == 1 + len(draft) and not each.relayed
                assert each.end + len(draft) < len(each.stream.request.prompt) + each.stream.request.max_tokens
                assert each.stream.request.stop_ids.isdisjoint(draft)
            taken += len(each.stream.sequence.block_table) - table if each.stream.active else 0
        assert ended or cache.free_blocks == free - taken, "drafts took blocks that were not free"
        return drafting
