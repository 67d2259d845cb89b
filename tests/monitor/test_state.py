"""Test states: the reported changes cover all differences, and unchanged mappings are shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.records import Changes, NodeRecord, SequenceRecord
from radixkv_monitor.state import REMEMBERED_TICKS, State, StateCopier
from tests.monitor.fake_feed import FACTS


def node(number: int, used: float) -> NodeRecord:
    return NodeRecord(number, 0, 0, 16, (number, 1), 0, 0, 0, 0, 0, False, 0.0, used)


def sequence(number: int, length: int) -> SequenceRecord:
    return SequenceRecord(number, None, 0, 1, length, 0, (), 0.0)


def differing(one: State, other: State) -> set[int]:
    return {
        number for number in one.nodes.keys() | other.nodes.keys() if one.nodes.get(number) != other.nodes.get(number)
    }


STEPS = st.lists(
    st.tuples(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 8)), st.sets(st.integers(1, 4)), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(STEPS, st.integers(0, 11), st.integers(0, 11))
def test_what_was_touched_covers_what_differs(
    steps: list[tuple[set[int], set[int], set[int], bool]], one: int, other: int
) -> None:
    mirror, copier, states = Mirror(), StateCopier(FACTS, 1), []
    for time, (changed, gone, sequences, resets) in enumerate(steps):
        changes = Changes(
            time=float(time),
            reset=resets or time == 0,
            nodes=tuple(node(each, time) for each in sorted(changed)),
            gone_nodes=tuple(sorted(gone - changed)),
            sequences=tuple(sequence(each, time) for each in sorted(sequences)),
        )
        mirror.apply(changes)
        states.append(copier.take(mirror, [changes]))
    early, late = sorted((min(one, len(states) - 1), min(other, len(states) - 1)))
    touched = states[late].touched_since(states[early])
    if any(resets for *_, resets in steps[early + 1 : late + 1]):
        assert touched is None
    else:
        assert touched is not None
        assert differing(states[early], states[late]) <= touched.nodes
        assert {
            n for n, s in states[late].sequences.items() if states[early].sequences.get(n) != s
        } <= touched.sequences


def test_states_share_what_did_not_change_and_never_change_themselves() -> None:
    mirror, copier = Mirror(), StateCopier(FACTS, 1)
    first = Changes(time=1.0, reset=True, nodes=(node(1, 1.0),), sequences=(sequence(1, 5),))
    mirror.apply(first)
    before = copier.take(mirror, [first])
    second = Changes(time=2.0, gone_sequences=(1,))
    mirror.apply(second)
    after = copier.take(mirror, [second])
    assert after.nodes is before.nodes
    assert before.sequences and not after.sequences


def test_too_long_ago_and_other_lines_are_unknown() -> None:
    mirror, copier = Mirror(), StateCopier(FACTS, 1)
    states = []
    for tick in range(REMEMBERED_TICKS + 5):
        changes = Changes(time=float(tick), reset=tick == 0)
        mirror.apply(changes)
        states.append(copier.take(mirror, [changes]))
    assert states[-1].touched_since(states[1]) is None
    assert states[-1].touched_since(states[-REMEMBERED_TICKS]) is not None
    assert states[-1].touched_since(None) is None
    assert states[-1].touched_since(StateCopier(FACTS, 2).take(mirror, [changes])) is None
    assert states[1].touched_since(states[-1]) is None, "the later one cannot be an earlier one"
