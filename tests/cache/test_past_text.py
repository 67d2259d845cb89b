"""Past text for drafts: every draft followed the same tokens in the same namespace, and cleared text is gone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache import PrefixCache
from radixkv.cache.namespaces import LEAST
from radixkv.cache.ngrams import LONGEST, NgramIndex
from radixkv.cache.past_text import GRAM, continuation
from radixkv.errors import InvalidInput

SETTINGS = settings(max_examples=60, deadline=None)


@given(st.integers(0, 10**9), st.sampled_from([1, 3, 6]), st.sampled_from([5, 50, 2000]), st.sampled_from([2, 300]))
@SETTINGS
def test_an_index_finds_what_a_search_finds(seed: int, gram: int, capacity: int, vocab: int) -> None:
    """With few tokens each chain is long, so that not all places are tried; with many, all are found."""
    rng, text, begin = random.Random(seed), list[int](), 0
    index, starts = NgramIndex(gram, capacity, heads=1 << 12), [0]
    for _ in range(30):
        if rng.random() < 0.2:
            index.part()
            starts.append(begin := len(text))
        again = rng.randrange(len(text) + 1)
        more = text[again : again + 20] if rng.random() < 0.5 else rng.choices(range(vocab), k=rng.choice([1, 2, 40]))
        index.append(more)
        text += more
        kept = max(0, len(text) - capacity)
        assert index.length == len(text) and index.read(kept, len(text)).tolist() == text[kept:]
        suffix = text[-rng.randint(gram, 30) :] if len(text) >= gram else [1] * gram
        places = list(index.places(suffix))
        for place in places:
            assert index.matched(place, suffix, begin) == common(text, place, suffix, max(kept, begin))
        real = [end for end in range(kept + gram - 1, len(text)) if text[end - gram + 1 : end + 1] == suffix[-gram:]]
        real = [end for end in real if not any(end - gram + 1 < start <= end for start in starts)]
        if vocab > 2 and len(real) < 8 and len(suffix) >= gram:
            assert set(real) <= set(places)
            assert [each for each in places if each in real] == sorted(real, reverse=True), "the latest first"
    assert not list(index.places([1] * (gram - 1)))
    index.clear()
    assert index.length == 0 and (index.tokens == -1).all() and not list(index.places([1] * gram))


def common(text: list[int], place: int, suffix: Sequence[int], low: int) -> int:
    """How many last tokens of `suffix` end at `place`, compared one by one."""
    count = 0
    while count < min(len(suffix), LONGEST) and place - count >= low and text[place - count] == suffix[-1 - count]:
        count += 1
    return count


def add(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None, reply: int = 0) -> None:
    """Compute a text in two steps and close it."""
    with cache.open(tokens[: len(tokens) - reply], namespace) as sequence:
        sequence.extend(tokens[sequence.length :])
        sequence.commit()


def followed(texts: list[list[int]], suffix: Sequence[int], draft: Sequence[int]) -> bool:
    """Whether `draft` follows `suffix` in one of the texts."""
    whole = [*suffix, *draft]
    return any(text[at : at + len(whole)] == whole for text in texts for at in range(len(text) - len(whole) + 1))


@given(st.integers(0, 10**9), st.sampled_from([40, 200, 5000]), st.booleans())
@SETTINGS
def test_drafts_followed_the_same_text_in_the_same_namespace(seed: int, capacity: int, small_pool: bool) -> None:
    """The tokens of a namespace are its own, so that any other token in a draft has crossed."""
    rng = random.Random(seed)
    cache = PrefixCache(20 if small_pool else 400, 4, draft_tokens=capacity, host_blocks=rng.choice([0, 30]))
    texts: dict[str, list[list[int]]] = {"ann": [], "ben": [], "eve": []}
    for _ in range(40):
        name = rng.choice(list(texts))
        known, low = texts[name], 100 * list(texts).index(name)
        source = rng.choice(known) if known and rng.random() < 0.7 else []
        text = source[: rng.randrange(len(source) + 1)] + [low + rng.randrange(9) for _ in range(rng.randint(1, 30))]
        text = text[:60]
        if rng.random() < 0.1:
            cache.clear_namespace(name)
            texts[name] = known = []
        elif rng.random() < 0.03:
            cache.clear()
            texts = {each: [] for each in texts}
        before = cache.stats()
        with cache.open(text[: rng.randrange(len(text))], name) as sequence:
            for most in (1, 5, 16):
                drafted = continuation(sequence.node, text, most)
                assert len(drafted) <= most and (not drafted or followed(texts[name], text, drafted))
                past = cache.past_text.repeated(array("i", text), name, most)
                assert len(past.tokens) <= most and (past.matched >= GRAM or not past.tokens)
                assert not past.tokens or followed(texts[name], text[-past.matched :], past.tokens)
        assert cache.stats().hit_tokens - before.hit_tokens == sequence.cached_length
        add(cache, text, name)
        texts[name].append(text)
        cache.moves_done() if cache.moves() else None
        cache.check()
        if capacity == 5000 and len(text) > 2 * LONGEST:
            assert cache.past_text.repeated(array("i", text[:-1]), name, 1).tokens.tolist() == text[-1:]


def test_a_secret_of_one_namespace_is_no_draft_of_another() -> None:
    cache = PrefixCache(64, 4, draft_tokens=1000)
    question, secret = list(range(30)), [7, 7, 1, 9, 9]
    add(cache, [*question, *secret], "ann")
    assert cache.past_text.repeated(array("i", question), "ann", 5).tokens.tolist() == secret
    with cache.open(question, "ann") as ours, cache.open(question, "ben") as theirs:
        assert continuation(ours.node, question, 9).tolist() == secret
        assert (
            not continuation(theirs.node, question, 9)
            and not cache.past_text.repeated(array("i", question), "ben", 5).tokens
        )
    for number in range(2 * LEAST):  # evicts the text, and makes the cache forget namespaces that are not used
        add(cache, [number, 1, 2, 3], number)
    assert cache.past_text.repeated(array("i", question), "ann", 5).tokens.tolist() == secret
    cache.clear_namespace("ann")
    assert not cache.past_text.repeated(array("i", question), "ann", 5).tokens
    assert (cache.past_text._index.tokens == -1).all(), "the text is still in memory"


def test_a_continuation_takes_the_latest_branch_of_any_tier_and_changes_nothing() -> None:
    cache = PrefixCache(6, 4, draft_tokens=100, host_blocks=20)
    stem = list(range(8))
    for branch in (20, 40, 60):
        add(cache, [*stem, *range(branch, branch + 6)])
    add(cache, [*stem, *range(40, 46)])  # used again
    cache.moves()
    cache.moves_done()
    before = cache.next_victims()
    with cache.open(stem) as sequence:
        assert continuation(sequence.node, stem, 4).tolist() == [40, 41, 42, 43]
        assert continuation(sequence.node, [*stem, 20], 9).tolist() == [21, 22, 23, 24, 25], "on the host"
        assert continuation(sequence.node, [*stem, 60, 61], 2).tolist() == [62, 63]
        assert not continuation(sequence.node, [*stem, 99], 9)
    assert cache.next_victims() == before


def test_text_outlives_its_kv_and_audits_add_none() -> None:
    cache = PrefixCache(8, 4, draft_tokens=400)
    text = list(range(30))
    add(cache, text)
    add(cache, list(range(100, 132)))  # evicts it
    assert cache.match(text).length == 0 and cache.past_text.repeated(
        array("i", text[:20]), None, 3
    ).tokens.tolist() == [
        20,
        21,
        22,
    ]
    with cache.open(text, purpose="audit") as audit:
        audit.extend(list(range(200, 220)))
        audit.commit()
    assert not cache.past_text.repeated(array("i", range(200, 210)), None, 3).tokens


@pytest.mark.parametrize("tokens", [-1, 1.5, "many"])
def test_a_wrong_number_of_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidInput, match="draft_tokens="):
        PrefixCache(4, draft_tokens=tokens)  # type: ignore[arg-type]
