"""The second tier of the cache: which runs are resident on the host, and how they come back."""

from collections.abc import Hashable, Sequence

from radixkv.cache import Hint, PrefixCache

A = list(range(100, 132))  # 8 blocks of 4 tokens
B = list(range(200, 232))


def put(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None, hint: Hint | None = None) -> None:
    """Compute and publish a text, as a request that loads nothing."""
    with cache.open(tokens, namespace) as sequence:
        sequence.extend(tokens[sequence.length :])
        sequence.commit()
        sequence.close(hint)
    cache.check()


def run_moves(cache: PrefixCache) -> list[tuple[int, int]]:
    moves = cache.moves()
    cache.moves_done()
    cache.check()
    return moves


def load(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> list[int]:
    """Open a text, and load and publish what the host has of it; returns the source slots."""
    with cache.open(tokens, namespace) as sequence:
        rest = tokens[sequence.length :]
        planned = sequence.load(rest[: sequence.loadable(rest)])
        cache.check()
        sequence.commit()
    cache.check()
    return planned.sources.tolist()


def reach(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> tuple[int, int]:
    found = cache.match(tokens, namespace)
    return found.length, found.host


def test_eviction_offloads_the_tail_and_the_step_makes_it_matchable() -> None:
    cache = PrefixCache(8, 4, host_blocks=16)
    put(cache, A)
    put(cache, B[:12])
    assert reach(cache, A) == (20, 0), "the moves did not run yet"
    assert run_moves(cache) == [(5, 0), (6, 1), (7, 2)]
    assert reach(cache, A) == (20, 12)
    stats = cache.stats()
    assert (stats.offloaded_blocks, stats.host_nodes, stats.host_free_blocks) == (3, 1, 13)
    assert (stats.evicted_blocks, stats.evicted_tokens, stats.ghosts) == (0, 0, 0)
    put(cache, B)
    run_moves(cache)
    assert reach(cache, A) == (0, 32)
    assert cache.stats().host_nodes == 1, "runs of one text are joined"


def test_a_load_frees_the_host_and_counts_as_hits() -> None:
    cache = PrefixCache(8, 4, host_blocks=16)
    put(cache, A)
    put(cache, B[:12])
    moves = dict(run_moves(cache))
    before = cache.stats()
    assert load(cache, A) == [moves[5 + at // 4] * 4 + at % 4 for at in range(12)]
    stats = cache.stats()
    assert reach(cache, A) == (32, 0)
    assert (stats.loaded_tokens, stats.host_nodes, stats.host_free_blocks) == (12, 1, 13)
    assert stats.hit_tokens - before.hit_tokens == 32
    assert stats.committed_tokens == before.committed_tokens
    assert reach(cache, B[:12]) == (0, 0), "B made room for the load, and its moves did not run yet"
    run_moves(cache)
    assert reach(cache, B[:12]) == (0, 12)


def test_explain_names_the_tokens_on_the_host() -> None:
    cache = PrefixCache(8, 4, host_blocks=16)
    put(cache, A)
    put(cache, B[:12])
    run_moves(cache)
    head = "20 of 32 tokens are cached, and 12 more on the host"
    assert str(cache.explain(A)) == f"{head}: the whole prompt."
    assert cache.explain(A, limit=24).reason == "limit"
    assert cache.explain(A, limit=24).host == 4
    assert cache.explain(A, limit=10).host == 0
    diverging = cache.explain([*A[:26], 7])
    assert (diverging.reason, diverging.diverged_at, diverging.host) == ("diverged", 26, 6)
    assert (cache.explain([*A[:20], 7]).reason, cache.explain([*A, 7]).reason) == ("diverged", "never_seen")


def test_a_host_that_is_too_small_takes_the_head_of_a_run() -> None:
    cache = PrefixCache(8, 4, host_blocks=3)
    put(cache, A)
    put(cache, B)
    assert run_moves(cache) == [(0, 0), (1, 1), (2, 2)]
    assert reach(cache, A) == (0, 12)
    stats = cache.stats()
    assert (stats.evicted_blocks, stats.host_evicted_blocks, stats.evicted_tokens) == (5, 0, 20)
    assert cache.explain(A).evicted_tokens == 20


def test_the_host_keeps_what_has_a_higher_priority() -> None:
    cache = PrefixCache(8, 4, host_blocks=8)
    put(cache, A, hint=Hint(priority=1))
    with cache.open(B) as flood:
        flood.extend(B)
        flood.commit()
        flood.close()
    run_moves(cache)
    assert reach(cache, A) == (0, 32)
    put(cache, list(range(500, 532)))
    run_moves(cache)
    assert reach(cache, A) == (0, 32)
    assert reach(cache, B) == (0, 0)


def test_finished_text_is_evicted_and_not_offloaded() -> None:
    cache = PrefixCache(8, 4, host_blocks=16)
    put(cache, A, hint=Hint(done=True))
    put(cache, B)
    assert cache.moves() == []
    assert cache.stats().evicted_blocks == 8
    put(cache, A[:16])
    run_moves(cache)
    assert reach(cache, B) == (16, 16)


def test_demoted_text_leaves_the_device_first_and_then_the_host() -> None:
    cache = PrefixCache(8, 4, host_blocks=8)
    put(cache, A)
    cache.demote(A, start=16)
    put(cache, B[:16])
    run_moves(cache)
    cache.check()
    assert reach(cache, A) == (16, 16), "its end was demoted: it was offloaded, although nothing else was"
    assert reach(cache, B) == (16, 0)
    put(cache, list(range(500, 516)))
    run_moves(cache)
    cache.check()
    assert reach(cache, A) == (0, 32), "the host had room for all"
    put(cache, list(range(600, 616)))
    cache.check()
    assert reach(cache, A) == (0, 16), "the demoted part made room on the host, before older text"


def test_learning_counts_the_reuse_of_host_text() -> None:
    now = [0.0]
    cache = PrefixCache(8, 4, "predictive", clock=lambda: now[0], host_blocks=16)
    put(cache, A)
    put(cache, B)
    run_moves(cache)
    node = next(cache.state.host.nodes())
    record = node.policy_data
    assert record.start < record.end
    now[0] = 3.0
    load(cache, A)
    assert record.start == record.end, "the access of A took the claim of the earlier one"


def test_text_that_is_continued_from_elsewhere_is_as_recent_as_that() -> None:
    cache = PrefixCache(8, 4, host_blocks=8)
    put(cache, A[:16])
    put(cache, B)
    run_moves(cache)
    blocks = cache.take_host_blocks(A[:24], None, 2)
    put(cache, list(range(300, 332)))  # offloads B, which would take the blocks of A
    run_moves(cache)
    assert cache.arrive(A[:24], None, blocks, 2) == 8
    assert reach(cache, A) == (0, 24)
    cache.check()


def test_events_of_the_host_are_optional() -> None:
    class Deaf:
        def __getattr__(self, event: str) -> object:
            if event in ("offloaded", "loaded"):
                raise AttributeError(event)
            return lambda *facts: None

    events: list[tuple[object, ...]] = []

    class Watching(Deaf):
        def offloaded(self, *facts: int) -> None:
            events.append(("offloaded", *facts))

        def loaded(self, *facts: int) -> None:
            events.append(("loaded", *facts))

    for observer in (Deaf(), Watching()):
        cache = PrefixCache(8, 4, observer=observer, host_blocks=16)  # type: ignore[arg-type]  # by __getattr__
        put(cache, A)
        put(cache, B[:12])
        run_moves(cache)
        load(cache, A)
        assert cache.state.events.split, "an observer without the new methods was dropped"
    assert [event[0] for event in events] == ["offloaded", "offloaded", "loaded"]
    assert events[0][3:] == (20, 12, 3)
    assert events[2][2] == 12
