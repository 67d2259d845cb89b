"""The purposes of a sequence: a request, a request that comes back, or an audit that leaves no trace."""

import random

import pytest

from radixkv.cache import Hint, PrefixCache
from radixkv.cache.types import Purpose
from radixkv.errors import InvalidInput
from tests.cache.freeze import freeze
from tests.cache.test_eviction import ALL, flood, goes_first
from tests.cache.test_pins import squeeze
from tests.cache.verbs import cached, held, prompt, publish

QUIET: tuple[Purpose, ...] = ("resume", "audit")


def look(cache: PrefixCache, tokens: list[int], purpose: Purpose) -> int:
    seq = cache.open(tokens, purpose=purpose)
    cache.check()
    seq.close(Hint(done=True, priority=7) if purpose == "audit" else None)
    cache.check()
    return seq.cached_length


@pytest.mark.parametrize("purpose", QUIET)
def test_what_was_counted_before_is_not_counted_again(purpose: Purpose) -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 12))
    squeeze(cache)
    publish(cache, prompt(2, 12))
    before = cache.stats()
    assert look(cache, prompt(2, 12), purpose) == 12
    assert look(cache, prompt(1, 12), purpose) == 0
    after = cache.stats()
    assert (after.query_tokens, after.hit_tokens) == (before.query_tokens, before.hit_tokens)
    assert after.regret_tokens == before.regret_tokens
    assert after.opened_sequences == before.opened_sequences + 2
    publish(cache, prompt(1, 12))
    assert cache.stats().regret_tokens == before.regret_tokens + 12


@pytest.mark.parametrize("purpose", QUIET)
def test_holds_as_a_request_does(purpose: Purpose) -> None:
    cache = PrefixCache(8, 4)
    publish(cache, prompt(1, 12))
    reader = cache.open(prompt(1, 6), purpose=purpose)
    flood(cache, cache.free_blocks + cache.evictable_blocks)
    assert cached(cache, prompt(1, 12)) >= 6
    assert (reader.length, reader.cached_length, reader.purpose) == (6, 6, purpose)
    reader.close()
    cache.check()


def test_a_return_is_recent() -> None:
    cache = PrefixCache(16, 4)
    texts = [prompt(name, 8) for name in range(4)]
    for text in texts:
        publish(cache, text)
    look(cache, texts[0], "resume")
    assert goes_first(cache, texts) == [1, 2, 3, 0]


def test_a_return_is_no_hit() -> None:
    cache = PrefixCache(16, 4, "lfu")
    texts = [prompt(name, 8) for name in range(2)]
    for text in texts:
        publish(cache, text)
    look(cache, texts[1], "request")
    for _ in range(3):
        look(cache, texts[0], "resume")
    assert goes_first(cache, texts) == [0, 1]


def test_a_return_is_a_regret() -> None:
    cache = PrefixCache(16, 4)
    texts = [prompt(name, 8) for name in range(2)]
    publish(cache, texts[1], hint=Hint(done=True))
    publish(cache, texts[0])
    look(cache, texts[1], "resume")
    assert goes_first(cache, texts) == [0, 1]


@pytest.mark.parametrize("policy", ALL)
def test_an_audit_leaves_no_trace(policy: str) -> None:
    """Except for two counters, the cache is bit for bit the same as before."""
    cache = PrefixCache(32, 4, policy)
    for name in range(3):
        publish(cache, prompt(name, 10), hint=Hint(done=name == 1), priority=-(name == 2))
    cache.open([]).close()
    before, opened = freeze(cache), cache.stats().opened_sequences
    for name in range(3):
        assert look(cache, prompt(name, 10), "audit") == 10
    cache.state.counters.opened_sequences = cache.state.counters.closed_sequences = opened
    assert freeze(cache) == before


@pytest.mark.parametrize("policy", ALL)
def test_audits_change_no_eviction(policy: str) -> None:
    """Two caches with one history; one of them also runs audits with forks, truncations and splits.

    All requests have one priority: a higher one would be set on a node, and so end where an audit has split it.
    """
    seen = 0
    for seed in range(30):
        rng = random.Random(seed)
        now = [0.0]  # one clock for both: `predictive` looks at it
        plain, audited = (PrefixCache(9, 4, policy, clock=lambda now=now: now[0]) for _ in range(2))
        texts = [prompt(rng.randrange(6), rng.randrange(2, 20)) + [seed] * rng.randrange(5) for _ in range(12)]
        for _ in range(40):
            now[0] += rng.random()
            text, hint = rng.choice(texts), Hint(done=rng.random() < 0.2)
            for cache in (plain, audited):
                publish(cache, text, hint=hint)
            wanted = rng.choice(texts)
            seq = audited.open(wanted[: rng.randrange(len(wanted) + 1)], purpose="audit", priority=3)
            twin = seq.fork()
            twin.truncate(rng.randrange(twin.length + 1))
            seq.close(Hint(done=True, priority=4))
            twin.close(Hint(done=True, priority=4))
            audited.check()
            assert [cached(audited, each) for each in texts] == [cached(plain, each) for each in texts]
        seen += plain.stats().evicted_blocks
    assert seen > 1000


def test_what_an_audit_computes_is_its_own() -> None:
    cache = PrefixCache(16, 4)
    publish(cache, prompt(1, 6))
    audit = cache.open(prompt(1, 10), limit=5, purpose="audit")
    audit.extend(prompt(1, 10)[5:])
    audit.commit()
    assert audit.tokens.tolist() == prompt(1, 10)
    assert cached(cache, prompt(1, 10)) == 6
    audit.commit()
    twin = audit.fork()
    twin.commit()
    cache.check()
    audit.close()
    twin.close()
    cache.check()
    assert cached(cache, prompt(1, 10)) == 6
    assert cache.stats().cached_blocks == 2


def test_an_audit_does_not_keep_others_from_wanting_a_finished_tail() -> None:
    cache = PrefixCache(16, 4)
    texts = [prompt(name, 8) for name in range(2)]
    publish(cache, texts[1], hint=Hint(done=True))
    publish(cache, texts[0])
    audit = cache.open(texts[1], purpose="audit")
    request = held(cache, [*texts[1], 5, 6])
    cache.check()
    request.close()
    audit.close()
    cache.check()
    assert goes_first(cache, texts) == [0, 1]


@pytest.mark.parametrize("purpose", ["", "Request", None, 1, ["request"], {}])
def test_no_other_purpose_is_known(purpose: object) -> None:
    cache = PrefixCache(16, 4)
    before = freeze(cache)
    with pytest.raises(InvalidInput, match="request, resume, audit"):
        cache.open([1, 2], "elsewhere", purpose=purpose)  # type: ignore[arg-type]
    assert freeze(cache) == before
