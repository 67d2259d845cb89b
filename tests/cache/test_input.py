"""Valid and invalid arguments: a refusal is a named error and changes nothing."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv.cache import Hint, PrefixCache
from radixkv.errors import InvalidInput, InvalidTokens, UnknownPolicy
from tests.cache.freeze import freeze
from tests.cache.verbs import cached, held, prompt, publish

GOOD: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda tokens: array("i", tokens),
    lambda tokens: array("q", tokens),
    lambda tokens: array("H", tokens),
    *(
        lambda tokens, kind=kind: np.array(tokens, dtype=kind)
        for kind in ("int32", "int64", "uint32", "int16", "uint8")
    ),
    lambda tokens: np.array([[token, 0] for token in tokens], dtype=np.int32)[:, 0],
    lambda tokens: [np.int64(token) for token in tokens],
]
BAD: dict[str, Any] = {
    "negative": [1, -1, 2],
    "negative array": np.array([1, -1], dtype=np.int64),
    "negative int32": np.array([5, -7], dtype=np.int32),
    "negative array('i')": array("i", [1, -1]),
    "2**31": [1, 2**31],
    "2**31 array": np.array([2**31], dtype=np.int64),
    "2**31 uint32": np.array([2**31], dtype=np.uint32),
    "2**32": [2**32],
    "2**32 array": np.array([2**32 + 1], dtype=np.int64),
    "2**64": [2**64],
    "floats": [1.0, 2.0],
    "float array": np.array([1.0, 2.0]),
    "float array('d')": array("d", [1.0]),
    "strings": ["a", "b"],
    "a string": "abc",
    "2-D": np.array([[1, 2], [3, 4]], dtype=np.int32),
    "2-D list": [[1, 2], [3, 4]],
    "ragged": [[1], [2, 3]],
    "0-D": np.array(5),
    "None": None,
    "None inside": [1, None],
    "an int": 5,
    "objects": np.array([1, "a"], dtype=object),
    "complex": np.array([1j]),
}


class TestTokens:
    @pytest.mark.parametrize("shape", GOOD)
    def test_of_every_kind_are_the_same_text(self, shape: Callable[[list[int]], Any]) -> None:
        cache = PrefixCache(16, 4)
        text = [5, 0, 200, 7, 7, 1, 9]
        publish(cache, text)
        assert cached(cache, shape(text)) == 7
        assert cache.explain(shape(text)).reason == "full"
        assert cache.pin(shape(text)).complete
        seq = cache.open(shape(text))
        assert seq.length == 7
        seq.extend(shape(text))
        seq.commit()
        assert seq.tokens.tolist() == text + text
        assert cached(cache, text + text) == 14

    def test_from_a_range(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, range(10))
        assert cached(cache, list(range(10))) == 10

    def test_up_to_two_to_the_31_are_ids(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, [0, 2**31 - 1])
        for kind in (np.int32, np.int64, np.uint32):
            assert cached(cache, np.array([0, 2**31 - 1], dtype=kind)) == 2

    @pytest.mark.parametrize("name", BAD)
    def test_that_are_none_are_refused_and_change_nothing(self, name: str) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, [1, 2, 3])
        seq = held(cache, [1, 5])
        cache.stats()
        before = freeze(cache, seq)
        for verb in (cache.match, cache.explain, cache.open, cache.pin, cache.announce, seq.extend):
            with pytest.raises(InvalidTokens):
                verb(BAD[name])
            assert freeze(cache, seq) == before

    def test_are_checked_even_after_what_matches(self) -> None:
        cache = PrefixCache(16, 4)
        publish(cache, [1, 2, 3])
        for verb in (cache.match, cache.open):
            with pytest.raises(InvalidTokens):
                verb([1, 2, 3, -1])
            with pytest.raises(InvalidTokens):
                verb([9, -1])

    def test_are_named_in_the_refusal(self) -> None:
        with pytest.raises(InvalidTokens, match="-4"):
            PrefixCache(16, 4).open([1, -4])

    def test_in_a_plan_that_is_refused_leave_the_sequence_usable(self) -> None:
        cache = PrefixCache(16, 4)
        seq = held(cache, [1, 2, 3])
        with pytest.raises(InvalidTokens):
            seq.extend([-1])
        seq.extend([4])
        seq.commit()
        assert seq.tokens.tolist() == [1, 2, 3, 4]


class TestAPool:
    @pytest.mark.parametrize("blocks", [0, -1, 1.5, "8", None, True])
    def test_has_a_whole_number_of_blocks(self, blocks: Any) -> None:
        with pytest.raises(InvalidInput):
            PrefixCache(blocks)

    @pytest.mark.parametrize("size", [0, -1, 1.5, "8", None])
    def test_has_blocks_of_a_whole_number_of_tokens(self, size: Any) -> None:
        with pytest.raises(InvalidInput):
            PrefixCache(8, size)

    @pytest.mark.parametrize("policy", ["LRU", "", "random", None, 3])
    def test_has_a_policy_that_exists(self, policy: Any) -> None:
        with pytest.raises(UnknownPolicy):
            PrefixCache(8, 16, policy)

    def test_names_the_policies_that_exist(self) -> None:
        with pytest.raises(UnknownPolicy, match="slru"):
            PrefixCache(8, 16, "clock")


class TestNumbers:
    @pytest.mark.parametrize("limit", [-1, 1.5, "3"])
    def test_a_limit_is_a_count(self, limit: Any) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 8))
        before = freeze(cache)
        with pytest.raises(InvalidInput):
            cache.open(prompt(1, 8), limit=limit)
        with pytest.raises(InvalidInput):
            cache.explain(prompt(1, 8), limit=limit)
        with pytest.raises(InvalidInput):
            cache.announce(prompt(1, 8), limit=limit)
        assert freeze(cache) == before

    @pytest.mark.parametrize("priority", [1.5, "high", None])
    def test_a_priority_is_an_int(self, priority: Any) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 8))
        before = freeze(cache)
        with pytest.raises(InvalidInput):
            cache.open(prompt(1, 8), priority=priority)
        assert freeze(cache) == before

    @pytest.mark.parametrize("length", [-1, 9, 1.5, "3", None])
    def test_a_length_to_truncate_to_is_within_the_sequence(self, length: Any) -> None:
        cache = PrefixCache(8, 4)
        seq = held(cache, prompt(1, 8))
        before = freeze(cache, seq)
        with pytest.raises(InvalidInput):
            seq.truncate(length)
        assert freeze(cache, seq) == before


class TestHints:
    def test_are_hints(self) -> None:
        cache = PrefixCache(8, 4)
        for hint in (None, Hint(), Hint(True, "tool", 100, 2.5, 3), Hint(kind="agent"), Hint(returns_in=0.0)):
            publish(cache, prompt(1, 8), hint=hint)
            cache.check()
        assert cached(cache, prompt(1, 8)) == 8

    def test_default_to_nothing_special(self) -> None:
        hint = Hint()
        found = (hint.done, hint.kind, hint.output_length, hint.returns_in, hint.priority)
        assert found == (False, None, None, None, 0)


class TestNamespaces:
    def test_that_cannot_be_hashed_are_refused_and_change_nothing(self) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, [1, 2, 3])
        before = freeze(cache)
        for verb in (cache.match, cache.explain, cache.open, cache.pin, cache.announce):
            with pytest.raises((InvalidInput, TypeError)):
                verb([1, 2, 3], [])  # type: ignore[arg-type]
        assert freeze(cache) == before


@pytest.mark.parametrize("hint", [True, {"done": True}, "done"])
def test_a_wrong_hint_leaves_the_sequence_open(hint: object) -> None:
    cache = PrefixCache(4, 4)
    sequence = cache.open([1])
    with pytest.raises(InvalidInput, match="Hint"):
        sequence.close(hint)  # type: ignore[arg-type]
    assert not sequence.closed
    sequence.close()
    cache.check()
    assert cache.stats().held_blocks == 0


def test_a_hint_checks_its_priority() -> None:
    with pytest.raises(InvalidInput, match="priority"):
        PrefixCache(num_blocks=1).open([1]).close(Hint(priority="high"))  # type: ignore[arg-type]
