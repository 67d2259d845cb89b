"""Where snapshots of recurrent state are taken, and which prefixes they make usable: fixed examples."""

import pytest

from radixkv.cache import Hint, PrefixCache, Sequence
from radixkv.cache.recurrent import Spacing
from radixkv.errors import InvalidInput


def new(rows: int = 4, snapshots: int = 8, spacing: Spacing | None = None, blocks: int = 1000) -> PrefixCache:
    return PrefixCache(blocks, 16, state_rows=rows, state_snapshots=snapshots, state_spacing=spacing)


def serve(cache: PrefixCache, prompt: list[int], reply: list[int] | None = None, message: int | None = None) -> int:
    """Serve one request, token by token after its prompt; returns how many tokens it hit."""
    seq = cache.open(prompt, limit=len(prompt) - 1)
    if message is not None:
        seq.snapshot_at(message)
    for tokens in (prompt[seq.length :], *([token] for token in reply or [])):
        seq.extend(tokens)
        cache.copies.drain()
        seq.commit()
        cache.check()
    seq.close()
    cache.check()
    return seq.cached_length


def text(name: int, length: int) -> list[int]:
    return [name * 10_000 + at for at in range(length)]


def test_the_second_user_of_a_prefix_pays_and_the_third_hits() -> None:
    cache, shared = new(), text(0, 150)
    assert serve(cache, shared + text(1, 100)) == 0
    assert serve(cache, shared + text(2, 100)) == 0  # the first prompt's own snapshot lies after the branch
    assert serve(cache, shared + text(3, 100)) == 150


def test_the_same_prompt_hits_up_to_the_last_grid_position() -> None:
    cache, prompt = new(), text(0, 300)
    assert [serve(cache, prompt), serve(cache, prompt), serve(cache, prompt)] == [0, 256, 299]
    assert (cache.match(prompt[:298]).length, cache.match(prompt[:298]).matched) == (256, 298)


def test_a_chat_whose_template_strips_the_reasoning_resumes_from_the_last_message() -> None:
    cache, history, opening = new(), text(0, 200), [7, 8, 9]
    for turn in range(1, 6):
        thinking = [7777 + turn, *text(1, 80)]
        assert serve(cache, history + opening, thinking, message=len(history)) == (len(history) - 130) * (turn > 1)
        history = history + opening + text(turn + 1, 127)  # the reply without its reasoning, and the next message


def test_a_chat_without_reasoning_resumes_from_the_end_of_the_turn() -> None:
    cache, history, opening = new(), text(0, 200), [7, 8, 9]
    for turn in range(1, 6):
        reply = text(turn, 80)
        hit = serve(cache, history + opening, reply, message=len(history))
        assert hit == (len(history) - 20 - 1 if turn > 1 else 0)  # the last sampled token is never computed
        history = history + opening + reply + text(20 + turn, 21)


def test_snapshots_of_dead_ends_are_evicted_first_once_chats_have_shown_them() -> None:
    cache, histories = new(snapshots=6), {chat: text(chat, 200) for chat in range(4)}
    hits = []
    for turn in range(8):
        for chat, history in histories.items():
            hits.append(serve(cache, [*history, 7, 8], [chat, turn, *text(50 + turn, 40)], message=len(history)))
            histories[chat] = [*history, 7, 8, *text(60 + turn, 60)]
    assert all(hits[-8:])
    assert cache.stats().evicted_states > 20


def test_a_request_that_goes_on_after_preemptions_is_no_evidence_for_the_ends_of_replies() -> None:
    cache, tokens = new(), text(0, 100)
    for turn in range(6):
        seq = cache.open(tokens, limit=len(tokens) - 1, purpose="resume" if turn else "request")
        assert bool(seq.length) == bool(turn)
        tokens = tokens + text(turn + 1, 20)
        seq.extend(tokens[seq.length :])
        cache.copies.drain()
        seq.commit()
        seq.close()  # hands its row over
        cache.check()
    assert not cache.state.snapshots.turns_are_resumed


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    cache, prompt = new(blocks=2000), text(0, 9000)
    serve(cache, prompt)
    assert serve(cache, [*prompt[:5000], *text(1, 70)]) == 4096
    assert serve(cache, [*prompt[:5000], *text(2, 70)]) == 5000


@pytest.mark.long
def test_a_long_reply_leaves_the_snapshot_of_its_message_in_place() -> None:
    """A snapshot inside the reply would replace it, and a later prompt may leave out the reply's reasoning."""
    cache, message, other = new(snapshots=2, blocks=2000), text(0, 500), text(1, 500)
    for prompt, seed in ((message, 2), (other, 3)):
        serve(cache, [*prompt, 7], text(seed, 2000), message=500)
    assert [cache.match([*prompt, 8]).length for prompt in (message, other)] == [500, 500]


def test_a_conversation_that_lost_its_state_takes_one_slot_of_the_others() -> None:
    cache = new(snapshots=2)
    for chat in range(3):
        serve(cache, [*text(chat, 200), 7], text(10 + chat, 5), message=200)
    assert [cache.match([*text(chat, 200), 7]).length for chat in range(3)] == [0, 200, 200]
    continued = [*text(0, 200), 7, *text(10, 5), *text(20, 50)]
    assert serve(cache, [*continued, 7], message=len(continued)) == 0  # it continues what is cached: no branch
    assert [cache.match([*text(chat, 200), 7]).length for chat in (1, 2)] == [0, 200]
    assert cache.match([*continued, 7]).length == len(continued)


def test_explain_says_where_the_state_ends() -> None:
    cache, prompt = new(), text(0, 300)
    serve(cache, prompt)
    found = cache.explain([*prompt[:270], 1])
    assert (found.matched, found.length, found.reason, found.kv_reason) == (270, 256, "no_state", "diverged")
    assert str(found) == "256 of 271 tokens are cached: 270 match, but recurrent state is kept up to token 256 only."
    assert cache.explain(prompt[:256]).reason == "full"
    assert cache.explain(prompt, limit=256).reason == "limit"
    assert cache.explain([5]).reason == "never_seen"


def test_explain_with_a_limit_finds_earlier_states_on_the_host() -> None:
    spacing = Spacing(prompt=4, long=1000, least=1)
    cache = PrefixCache(4, 4, host_blocks=8, state_rows=1, state_snapshots=8, state_spacing=spacing)
    with cache.open(range(16)) as seq:
        for position in (4, 8, 12):
            seq.snapshot_at(position)
        seq.extend(range(16))
        seq.commit()
    with cache.open([99]) as other:
        other.extend([99] * 8)
    cache.moves()
    cache.moves_done()
    for limit, host, reason in ((16, 8, "full"), (14, 4, "no_state"), (12, 4, "limit"), (11, 0, "no_state")):
        found = cache.explain(range(16), limit=limit)
        assert (found.length, found.host, found.reached, found.reason) == (8, host, 16, reason)
        assert cache.match(range(limit)).loadable == host
    assert str(cache.explain(range(16), limit=14)) == (
        "8 of 16 tokens are cached, and 4 more on the host: 16 match, but recurrent state is kept up to token 12 only."
    )


def test_of_many_texts_that_branch_nearby_one_takes_a_snapshot() -> None:
    cache = new()
    seq = cache.open(text(0, 100))
    for position in range(30, 60):
        seq.snapshot_at(position, shared=True)
    plan = seq.extend(text(0, 100))
    assert plan.state is not None
    assert [each.tokens for each in plan.state.snapshots] == [30, 46]


def test_a_finished_conversation_leaves_no_state_of_its_end() -> None:
    cache = new()
    filled(cache, 100).close(Hint(done=True))
    assert cache.match(text(0, 100)).length == 64


def filled(cache: PrefixCache, length: int) -> Sequence:
    seq = cache.open(text(0, length))
    seq.extend(text(0, length)[seq.length :])
    cache.copies.drain()
    seq.commit()
    return seq


def test_pins_protect_the_last_snapshot_of_their_prefix() -> None:
    cache = new(snapshots=2)
    serve(cache, text(0, 300))
    with cache.pin(text(0, 300)):
        for name in range(1, 6):
            serve(cache, text(name, 300))
        assert cache.match(text(0, 300)).length == 300
    for name in range(6, 9):
        serve(cache, text(name, 300))
    assert cache.match(text(0, 300)).length == 0
    assert cache.match(text(0, 300)).matched == 300


def test_the_end_of_a_turn_takes_no_host_slot_from_a_snapshot_that_is_in_use() -> None:
    spacing = Spacing(prompt=4, long=1000, least=1)
    cache = PrefixCache(100, 4, host_blocks=8, state_rows=1, state_snapshots=2, host_snapshots=1, state_spacing=spacing)
    for text_ids, positions in (([1] * 8, [8]), ([2] * 8, [4, 8])):  # the second one copies the first to the host
        with cache.open(text_ids) as seq:
            for position in positions:
                seq.snapshot_at(position)
            seq.extend(text_ids)
            cache.copies.drain()
            seq.commit()
    cache.pin([2] * 6)  # protects the snapshot at 4, which the one at 8 supersedes
    with cache.open([3]) as seq:
        seq.extend([3] * 8)
        cache.copies.drain()
        seq.commit()
    cache.check()
    assert [cache.match([number] * 8).length for number in (1, 2, 3)] == [8, 8, 0]


def test_snapshots_of_a_deterministic_engine_lie_on_its_grid() -> None:
    cache = new(spacing=Spacing(grid=50))
    serve(cache, text(0, 230), reply=[1, 2, 3], message=229)
    assert cache.match([*text(0, 230), 1, 2]).length == 200
    cache.check()


@pytest.mark.parametrize(("rows", "snapshots"), [(0, 1), (1, -1)])
def test_a_cache_without_rows_is_refused(rows: int, snapshots: int) -> None:
    with pytest.raises(InvalidInput):
        new(rows=rows, snapshots=snapshots)


def test_without_slots_no_snapshot_is_taken() -> None:
    cache = new(snapshots=0)
    assert [serve(cache, text(0, 300)), serve(cache, text(0, 300))] == [0, 0]
    assert cache.stats().state_slots_used == cache.state.snapshots.taken == 0


def test_wrong_arguments_change_nothing() -> None:
    cache = new()
    seq = filled(cache, 100)
    for verb in (
        lambda: seq.truncate("5"),  # type: ignore[arg-type]
        lambda: seq.truncate(101),
        lambda: seq.close(hint="done"),  # type: ignore[arg-type]
        lambda: cache.open([1], limit=-1),
        lambda: cache.open([1], limit=None, priority="high"),  # type: ignore[arg-type]
        lambda: seq.snapshot_at("5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput):
            verb()
    cache.check()
    assert seq.length == 100 and cache.stats().state_rows_used == 1
