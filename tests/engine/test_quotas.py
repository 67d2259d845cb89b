"""Limits of namespaces in an engine: refusals with the numbers, fair evictions, covered promises, usage."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from radixkv import SamplingParams
from radixkv.config import EngineConfig
from radixkv.engine.shares import Group, are_covered
from radixkv.errors import InvalidInput, PromptTooLong
from radixkv.models.loaded import SequenceInput
from tests.engine.fakes import check, make_engine
from tests.engine.test_namespaces import Tenant


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def text(name: int, length: int) -> list[int]:
    return [name % 50, name // 50, *(at % 40 for at in range(length - 2))]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([("ann", 0.5)], "namespace_limits must map namespaces to shares of the pool, got list"),
        ({"ann": 2}, "namespace_limits: the share of 'ann' must be a number from 0 to 1, got 2"),
        ({"ann": 0.6, "ben": 0.6}, "namespace_limits: the shares are 1.2 together, more than the whole pool"),
    ],
)
def test_wrong_limits_are_refused_by_the_settings(limits, message):
    with pytest.raises(InvalidInput, match=message):
        EngineConfig(namespace_limits=limits)


def test_a_flood_leaves_the_prefix_of_another_namespace_cached() -> None:
    engine, _ = make_engine(64, 4, namespace_limits={("ann",): 0.25})
    with engine:
        prompt = text(1, 40)
        engine.generate([prompt], greedy(1), namespace=("ann", "mail"))
        for name in range(2, 40):
            engine.generate([text(name, 40)], greedy(1), namespace="flood")
        assert engine.generate([prompt], greedy(1), namespace=("ann", "mail"))[0].usage.cached_tokens == 39
        (usage,) = engine.stats().namespace_usage
        assert (usage.namespace, usage.guaranteed_blocks, usage.used_blocks) == (("ann",), 16, 10)
        assert usage.cached_blocks == 10
        check(engine)


def test_a_request_is_refused_that_would_need_the_shares_of_others() -> None:
    engine, _ = make_engine(40, 4, namespace_limits={"ann": 0.5, "ben": 0.25})
    with engine:
        for namespace, most in (("ann", 120), ("ben", 80), ("eve", 40), (None, 40)):
            with pytest.raises(PromptTooLong, match=f"the pool holds {most} of 160, without the shares of other names"):
                engine.submit(text(1, most), greedy(1), namespace=namespace)
            done = engine.generate([text(1, most - 8)], greedy(100), namespace=namespace)[0]
            assert len(done.token_ids) == 8, "max_tokens is limited to the rest"
        with pytest.raises(PromptTooLong, match="its namespace can have 10, as the pool has 40 with the shares"):
            engine.submit(text(1, 30), SamplingParams(max_tokens=8, n=4, temperature=1), namespace="eve")
        check(engine)


def test_shares_of_the_whole_pool_leave_other_namespaces_no_request() -> None:
    engine, _ = make_engine(40, 4, namespace_limits={"ann": 0.5, "ben": 0.5})
    with engine:
        with pytest.raises(PromptTooLong, match="the pool holds 0 of 160, without the shares of other namespaces"):
            engine.submit(text(1, 2), greedy(1))
        done = engine.generate([text(1, 79)], greedy(9), namespace="ann")[0]
        assert (done.usage.prompt_tokens, len(done.token_ids)) == (79, 1), "as long as the share allows"
        check(engine)


def test_pins_within_a_share_take_no_blocks_from_others() -> None:
    """Requests of ann and eve run together, although the pins of ben are as many blocks as eve can have."""
    submitted, together = threading.Event(), []

    def fault(chunks: Sequence[SequenceInput]) -> None:
        submitted.wait(30)
        together.append(len(chunks))

    engine, _ = make_engine(40, 4, fault=fault, namespace_limits={"ann": 0.5, "ben": 0.25})
    with engine:
        submitted.set()
        engine.warm(text(1, 37), pin=True, namespace="ben")
        submitted.clear()
        handles = [engine.submit(text(2, 4), greedy(60), namespace="ann")]
        handles.append(engine.submit(text(3, 4), greedy(32), namespace="eve"))
        submitted.set()
        for handle in handles:
            handle.result(60)
        assert max(together) == 2
        engine.warm(text(4, 40), pin=True, namespace="ann")
        with pytest.raises(PromptTooLong, match=r"takes 30 blocks; its namespace can have 30, .* and 20 are pinned"):
            engine.generate([text(5, 100)], greedy(20), namespace="ann")
        check(engine)


def test_a_request_that_needs_free_blocks_of_a_share_with_pins_is_refused_before_it_begins() -> None:
    engine, _ = make_engine(40, 4, namespace_limits={"ann": 0.5, "ben": 0.25})
    with engine:
        engine.warm(text(1, 20), pin=True, namespace="eve")
        assert len(engine.generate([text(2, 80)], greedy(21), namespace="ann")[0].token_ids) == 21
        with pytest.raises(PromptTooLong, match=r"takes 26 blocks; its namespace can have 30, .* 5 are pinned"):
            engine.generate([text(3, 80)], greedy(22), namespace="ann")
        assert engine.stats().namespace_usage[1].used_blocks == 0, "its ten blocks are free, but ben may take them"
        check(engine)


def test_no_request_within_its_share_is_preempted_for_another_namespace() -> None:
    submitted = threading.Event()
    engine, _ = make_engine(40, 4, fault=lambda chunks: submitted.wait(30), namespace_limits={"ann": 0.5})
    with engine:
        floods = [engine.submit(text(name, 40), greedy(32), namespace="eve") for name in (1, 2)]
        last = engine.submit(text(3, 4), greedy(60), namespace="ann")  # the cheapest one to preempt
        submitted.set()
        assert sum(each.result(60).usage.preemptions for each in floods) == 1
        assert last.result(60).usage.preemptions == 0
        check(engine)


def test_a_hash_that_changes_later_moves_no_blocks_to_another_share() -> None:
    mutable = Tenant("ann")
    engine, _ = make_engine(64, 4, namespace_limits={"ann": 0.25, mutable: 0.25})
    with engine:
        engine.generate([text(1, 20)], greedy(1), namespace=mutable)
        mutable.name = "ben"
        asked = len(mutable.asked)
        for name in range(2, 20):
            engine.generate([text(name, 40)], greedy(1))
        assert [each.used_blocks for each in engine.stats().namespace_usage] == [0, 5]
        assert len(mutable.asked) == asked, "the engine's thread ran the caller's code"
        check(engine)


class TestPromises:
    """`are_covered` against every order in which two groups can take their blocks."""

    @staticmethod
    def can_fail(groups: list[Group], free: int) -> bool:
        """Whether some order of taking leaves a promised block that cannot be taken."""
        seen, waiting = set(), [(free, tuple((g.used, g.evictable, g.promised) for g in groups))]
        least = [g.guaranteed for g in groups]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            left, rows = state
            for own, (_, _, promised) in enumerate(rows):
                if not promised:
                    continue
                sources = [-1] if left else []
                if not left:
                    sources = [
                        at
                        for at, (used, evictable, _) in enumerate(rows)
                        if evictable and (at == own or used > least[at])
                    ]
                if not sources:
                    return True
                for source in sources:
                    after = [list(row) for row in rows]
                    if source >= 0:
                        after[source][0] -= 1
                        after[source][1] -= 1
                    after[own][0] += 1
                    after[own][2] -= 1
                    waiting.append((left - (source < 0), tuple(map(tuple, after))))
        return False

    def test_no_order_of_taking_breaks_a_covered_promise(self):
        rng, covered, refused = random.Random(1), 0, 0
        for _ in range(3000):
            groups = []
            for _ in range(rng.choice((2, 3))):
                used = rng.randint(0, 5)
                row = {"used": used, "evictable": rng.randint(0, used), "guaranteed": rng.randint(0, 4)}
                groups.append(Group(**row, promised=rng.randint(0, 3), running=True))
            free = rng.randint(0, 3)
            common = free + sum(each.spare for each in groups)
            if are_covered(groups, common):
                covered += 1
                assert not self.can_fail(groups, free), groups
            else:
                refused += self.can_fail(groups, free)
        assert covered > 500 and refused > 500

    def test_a_request_with_all_its_blocks_promised_waits_for_room_with_growing_shares(self):
        ann, ben = Group(used=0, evictable=0, guaranteed=0, promised=4), Group(used=1, evictable=0, guaranteed=4)
        assert are_covered([ann, ben], common=4)
        ann.has_guaranteed = ben.running = True
        assert not are_covered([ann, ben], common=6), "ben may take three blocks more"
        assert are_covered([ann, ben], common=7)
