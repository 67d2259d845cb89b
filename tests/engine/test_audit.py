"""An audit finds changed KV, reports the first changed token, drops its run with all continuations, and no other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from radixkv import AuditReport, Engine
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.audit import Auditor, piece_tokens
from radixkv.engine.core import Core
from radixkv.errors import EngineClosed, EngineError, InvalidInput, RequestFailed
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import LoadedModel, SequenceInput
from tests.cache.freeze import freeze
from tests.engine.fakes import FakeModel, FakeRunner, chain, check, greedy_reply, logits_of, sized
from tests.engine.worlds import GREEDY, World, is_right
from tests.models.conftest import FAMILIES, make
from tests.selection import mostly_long

SETTINGS = sized(8, 64, 16, monitor=False)


class AuditedRunner(FakeRunner):
    """The fake that can recompute its chains; like a model, it does not check the values that it reads."""

    def __init__(self, num_blocks: int, block_size: int, recheck_tokens: int = 8) -> None:
        super().__init__(num_blocks, block_size)
        self.recheck_tokens = recheck_tokens
        self.rechecked = 0
        self.trouble: Exception | None = None

    def recheck(self, tokens: np.ndarray, start: int, block_table: np.ndarray) -> Recheck:
        assert start % self.recheck_tokens == 0
        assert start < len(tokens) <= start + self.recheck_tokens
        assert len(block_table) == -(-len(tokens) // self.size)
        self.rechecked += 1
        if self.trouble is not None:
            raise self.trouble
        places = np.arange(len(tokens))
        slots = block_table[places // self.size] * self.size + places % self.size
        state = int(self.state[slots[start - 1]]) if start else 0
        wrong = []
        for position in range(start, len(tokens)):
            state = chain(state, int(tokens[position]))
            if state != int(self.state[slots[position]]):
                wrong.append(position - start)
        return Recheck(tuple(wrong), 0 if wrong else None, "key" if wrong else None, float(bool(wrong)))

    def _logits(self, chunk: SequenceInput, end: int) -> np.ndarray:
        position = chunk.start + end - 1
        return logits_of(int(self.state[self._slot(chunk, position)]), self.vocab)

    def spoil(self, block: int, offset: int) -> None:
        self.state[block * self.size + offset] ^= np.uint64(1)


def audited(num_blocks: int = 100, block_size: int = 4, recheck_tokens: int = 8, **options: Any) -> World:
    """Return a world whose model computes cached KV again."""
    runner = partial(AuditedRunner, recheck_tokens=recheck_tokens)
    return World(num_blocks, block_size, replace(SETTINGS, **options), runner=runner)


def spoil(world: World, prompt: Sequence[int], position: int, namespace: Any = None) -> None:
    blocks = world.cache.match(list(prompt), namespace).blocks
    world.runner.spoil(int(blocks[position // world.cache.block_size]), position % world.cache.block_size)


def is_sound(world: World, prompt: Sequence[int]) -> bool:
    """Return whether the cached part of a prompt is correct."""
    match, state = world.cache.match(list(prompt)), 0
    for position in range(match.length):
        state = chain(state, prompt[position])
        block = int(match.blocks[position // world.cache.block_size])
        if state != int(world.runner.state[block * world.cache.block_size + position % world.cache.block_size]):
            return False
    return True


def branching(rng: random.Random, count: int, longest: int = 60) -> list[list[int]]:
    prompts = [rng.choices(range(49), k=longest * 2 // 3)]
    for _ in range(count - 1):
        parent = rng.choice(prompts)
        head = parent[: rng.choice([0, len(parent), rng.randint(0, len(parent))])]
        prompts.append((head + rng.choices(range(49), k=rng.randint(1, longest)))[:longest])
    return prompts


# ---- healthy


@pytest.mark.parametrize("seed", mostly_long((1, 2), 1))
def test_thousands_of_audits_of_a_healthy_cache_find_nothing_and_change_nothing(seed: int) -> None:
    """Audit while requests of several namespaces run, fork, branch inside blocks, are evicted and preempted."""
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 8])
    world = audited(-(-150 // size) + 6, size, rng.choice([1, 2, 4]) * size)
    prompts, requests, found = branching(rng, 30), [], []
    while prompts or world.core.busy:
        if prompts and rng.random() < 0.4:
            params = GREEDY.but(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]), temperature=rng.choice([0, 1]))
            requests.append(world.submit(prompts.pop(), params, namespace=rng.choice([None, "a"])))
        world.step()
        before = freeze(world.cache)
        found.append(world.audit(40))
        assert freeze(world.cache) == before
    assert all(report.differ == 0 and report.differences == () for report in found)
    assert world.core.counters.audited_blocks == sum(report.blocks for report in found) > 1000
    assert world.core.counters.differing_blocks == 0
    assert all(request.channel.ended for request in requests)


# ---- planted


@pytest.mark.parametrize("seed", mostly_long(range(14), 0, 1, 2, 3))
def test_what_was_changed_is_found_named_and_dropped_and_all_else_stays(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 8])
    world = audited(400, size, rng.choice([1, 2, 4]) * size)
    prompts = branching(rng, 12)
    for prompt in prompts:
        world.answer(prompt)
    victim = rng.choice(prompts)
    position = rng.randrange(world.cached(victim))
    before = {tuple(prompt): world.cache.match(prompt) for prompt in prompts}
    spoil(world, victim, position)
    assert not is_sound(world, victim)

    report = world.audit(60)
    while not report.differ:
        report = world.audit(60)
    [difference] = report.differences
    assert (report.differ, world.core.counters.differing_blocks) == (1, 1)
    assert (difference.start, difference.end) == (position, position + 1)
    assert (difference.layer, difference.part, difference.deviation) == (0, "key", 1.0)
    assert (difference.failed_requests, difference.released_pins) == (0, 0)
    assert difference.dropped_blocks > 0
    for prompt in prompts:
        was = before[tuple(prompt)]
        assert is_sound(world, prompt)
        # Other prefixes stay, unless they continue tokens of the wrong block before the wrong one.
        start = position // size * size
        assert world.cached(prompt) == was.length or (was.length > start and prompt[:start] == victim[:start])
    assert all(world.answer(prompt) for prompt in prompts)


def test_a_copy_that_is_wrong_takes_its_own_branch_only() -> None:
    """Two branches differ inside a block; the lower one's copy is wrong in a token that both have."""
    world = audited()
    trunk = list(range(10))
    world.answer([*trunk, 20, 21, 22, 23, 24, 25])
    world.answer([*trunk, 30, 31, 32, 33, 34, 35])
    first, second = ([*trunk, first + 1, first + 2] for first in (19, 29))
    blocks = [int(world.cache.match(prompt).blocks[2]) for prompt in (first, second)]
    assert blocks[0] != blocks[1]
    own = [block for block in blocks if block != int(world.cache.match(trunk).blocks[2])]
    world.runner.spoil(own[0], 1)  # token 9, of the trunk
    [difference] = world.audit(500).differences
    assert difference.start == 9
    branch, sibling = (first, second) if own[0] == blocks[0] else (second, first)
    assert world.cached(branch) == 10
    assert world.cached(sibling) == 12


def test_requests_that_read_it_fail_and_others_go_on() -> None:
    world = audited()
    shared, more = list(range(24)), GREEDY.but(max_tokens=20)
    world.answer(shared)
    readers = [world.submit([*shared, 30 + i], more) for i in range(3)]
    others = [world.submit(list(range(i, i + 20)), more) for i in (5, 9)]
    for _ in range(6):
        world.step()
    spoil(world, shared, 9)
    [difference] = world.audit(500).differences
    assert (difference.start, difference.failed_requests) == (9, 3)
    assert world.cached(shared) == 8
    for reader in readers:
        with pytest.raises(RequestFailed, match=r"audit found .* from token 9 on, .* cannot be trusted"):
            reader.channel.wait(0)
    assert world.core.counters.failed == 3
    world.finish()
    assert all(map(is_right, others))
    assert world.cache.stats().held_blocks == 0


def test_a_reader_of_a_healthy_copy_stands_in_the_way_and_fails_too() -> None:
    world = audited()
    trunk = list(range(10))
    world.answer([*trunk, 20, 21])
    reader = world.submit([*trunk, 30], GREEDY.but(max_tokens=20))
    other = world.submit([*trunk, 30], GREEDY.but(max_tokens=20), namespace="a")
    for _ in range(4):
        world.step()
    table = reader.live[0].sequence.block_table
    above = int(world.cache.match(trunk).blocks[2])
    assert above != table[2]
    world.runner.spoil(above, 0)
    [difference] = world.audit(500).differences
    assert (difference.start, difference.failed_requests) == (8, 1)
    world.finish()
    assert is_right(other)


def test_pins_on_it_are_released_and_others_kept() -> None:
    world = audited()
    wrong, right = list(range(24)), list(range(20, 44))
    world.answer(wrong)
    world.answer(right)
    world.answer(wrong, namespace="a")
    pin = world.core.admission.pin
    short = pin(np.array([*right[:8], 1, 2, 3, 4, 5, 6], np.int32))  # only its first tokens are cached yet
    pins = [pin(np.array(each, np.int32)) for each in (wrong, wrong[:8], wrong[:12], right)]
    pins += [pin(np.array(wrong, np.int32), "a"), short]
    world.answer([*right[:8], 1, 2, 3, 4, 5, 6])
    spoil(world, wrong, 9)
    assert world.audit(500).differences[0].released_pins == 2
    assert [pin.active for pin in pins] == [False, True, False, True, True, True]
    assert (world.cached(wrong), world.cached(right)) == (8, 24)
    spoil(world, [*right[:8], 1, 2, 3, 4, 5, 6], 10)
    assert world.audit(500).differences[0].released_pins == 0
    assert short.active


# ---- among requests


def test_a_model_that_raises_fails_the_audit_and_nothing_else() -> None:
    world = audited()
    world.answer(list(range(40)))
    request = world.submit(list(range(5, 45)))
    world.runner.trouble = MemoryError("no room")
    future = world.begin_audit(20)
    world.step()
    with pytest.raises(EngineError, match="the audit raised MemoryError: no room"):
        future.result(0)
    world.runner.trouble = None
    world.finish()
    assert is_right(request)
    assert world.audit(20).differ == 0


# ---- from any thread


def make_engine(prefix_cache: bool = True) -> tuple[Engine, AuditedRunner]:
    runner = AuditedRunner(100, 4)
    cache = PrefixCache(100, 4)
    config = replace(SETTINGS, prefix_cache=prefix_cache)
    return Engine(cast(LoadedModel, FakeModel()), runner, cache, config), runner


def test_an_engine_is_audited_while_streams_run() -> None:
    engine, runner = make_engine()
    with engine:
        engine.generate([list(range(40))], GREEDY)
        handle = engine.submit(list(range(20)), GREEDY.but(max_tokens=300))
        reports: list[AuditReport] = []
        threads = [threading.Thread(target=lambda: reports.append(engine.audit(50))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(report.blocks >= 50 and report.differ == 0 for report in reports)
        assert list(handle.result().token_ids) == greedy_reply(list(range(20)), 300)
        stats = engine.stats()
        assert stats.audited_blocks == sum(report.blocks for report in reports)
        assert stats.audit == f"{stats.audited_blocks} blocks audited, 0 differ"
        check(engine)
        runner.spoil(int(engine.core.cache.match(list(range(40))).blocks[2]), 0)
        assert engine.audit(200).differ == 1
        assert engine.stats().audit.endswith("1 differ")
        check(engine)


def test_closing_ends_an_audit() -> None:
    engine, runner = make_engine()
    engine.generate([list(range(40))], GREEDY)
    failed: list[BaseException] = []

    def audit() -> None:
        try:
            engine.audit(10**9)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=audit)
    thread.start()
    while not runner.rechecked:
        threading.Event().wait(0.001)
    engine.close()
    thread.join()
    assert isinstance(failed[0], EngineClosed)
    with pytest.raises(EngineClosed):
        engine.audit(1)


def test_where_there_is_nothing_to_audit_it_is_said() -> None:
    engine, _ = make_engine(prefix_cache=False)
    with engine, pytest.raises(InvalidInput, match="prefix_cache=False"):
        engine.audit(1)
    engine, runner = make_engine()
    with engine:
        for blocks in (0, -1, True, 1.5, "8", None):
            with pytest.raises(InvalidInput, match="blocks is how many"):
                engine.audit(blocks)  # type: ignore[arg-type]
    core = Core(PrefixCache(10, 4), FakeRunner(10, 4), EngineConfig())
    future: Future[AuditReport] = Future()
    Auditor(core).begin(1, future)
    with pytest.raises(InvalidInput, match=r"Engine\.load"):
        future.result(0)
    runner.recheck_obstacle, refused = "experts", Future[AuditReport]()
    Auditor(Core(PrefixCache(10, 4), runner, EngineConfig())).begin(1, refused)
    with pytest.raises(InvalidInput, match="experts"):
        refused.result(0)


def test_where_rows_meet_only_whole_pieces_are_computed_again() -> None:
    engine, runner = make_engine()
    runner.row_dependent = True
    asked: list[int] = []
    compare = runner.recheck
    runner.recheck = lambda tokens, start, table: (asked.append(len(tokens) - start), compare(tokens, start, table))[1]  # type: ignore[method-assign]
    with engine:
        engine.generate([[3, 4]], GREEDY.but(max_tokens=2))  # less than a piece: too few tokens to compare
        assert engine.audit(4).blocks == 0 and not asked
        engine.generate([[*range(10, 31)]], GREEDY)
        while len(asked) < 20:
            engine.audit(4)
        assert set(asked) == {runner.recheck_tokens}


def test_pieces_are_whole_blocks() -> None:
    assert [piece_tokens(size) for size in (1, 16, 48, 128, 500)] == [128, 128, 96, 128, 500]


# ---- a real model


@pytest.fixture(scope="module")
def loaded() -> Callable[..., Engine]:
    torch.set_num_threads(1)

    def load(family: str, dtype: str, **options: Any) -> Engine:
        model = make(FAMILIES[family](), getattr(torch, dtype))
        return Engine.load(model, **{"num_blocks": 80, "block_size": 4, "prefill_chunk": 24, **options})

    return load


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[3 + token for token in prompt] for prompt in branching(rng, count, 90)]


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    mostly_long([("float32", False), ("bfloat16", True)], ("float32", False)),
)
def test_a_healthy_pool_raises_no_alarm(loaded: Callable[..., Engine], dtype: str, deterministic: bool) -> None:
    """Audit a thousand blocks after decodes, forks, copies, evictions and preemptions of many requests."""
    rng = random.Random(7)
    with loaded("llama", dtype, deterministic=deterministic) as engine:
        for _ in range(5):
            prompts = prompts_of(rng, 6)
            params = [
                GREEDY.but(max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]), temperature=1) for _ in prompts
            ]
            engine.generate(prompts, params, namespace=rng.choice([None, "a"]))
            assert engine.audit(250).differ == 0
            check(engine)
        stats = engine.stats()
        assert stats.audited_blocks >= 1250
        assert stats.cache.evicted_blocks > 0
        assert stats.cache.copied_blocks > 0 or deterministic


@pytest.mark.parametrize(
    ("family", "dtype", "deterministic"),
    [
        ("llama", "float32", False),
        ("gemma2", "bfloat16", False),
        ("gemma2", "float32", True),
        ("llama", "bfloat16", True),
    ],
)
def test_one_number_that_changed_is_found(
    loaded: Callable[..., Engine], family: str, dtype: str, deterministic: bool
) -> None:
    """In float32 the limit is a thousandth of the head's values, or the last bit if the engine is deterministic."""
    rng = random.Random(8)
    with loaded(family, dtype, deterministic=deterministic) as engine:
        store = engine.core.runner.store  # type: ignore[attr-defined]
        [prompt] = prompts_of(rng, 1)
        for layer, pools in ((0, store.keys), (1, store.values), (1, store.keys), (0, store.values)):
            engine.generate([prompt], GREEDY)
            position = rng.randrange(engine.probe(prompt).length)
            block = int(engine.core.cache.match(prompt).blocks[position // 4])
            place = (1, block, position % 4, 5)
            if deterministic:
                pools[layer].view(torch.int32 if dtype == "float32" else torch.int16)[place] += 1
            else:
                key, value = store.gather(layer, engine.core.cache.match(prompt).blocks, 40)
                scale = (key if pools is store.keys else value)[1].double().square().mean().sqrt()
                pools[layer][place] += float(scale) * (3e-3 if dtype == "float32" else 1.5)
            while not (report := engine.audit(20)).differ:
                continue
            [difference] = report.differences
            assert (difference.start, difference.end, difference.layer) == (position, position + 1, layer)
            assert difference.part == ("key" if pools is store.keys else "value")
            assert engine.probe(prompt).length == position // 4 * 4
            assert engine.audit(20).differ == 0
            check(engine)


def test_experts_are_audited_in_a_deterministic_engine_only() -> None:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256
    )
    engine = Engine.load(make(config), num_blocks=40, block_size=4, prefill_chunk=24)
    with engine, pytest.raises(InvalidInput, match=r"routes tokens to 4 experts.*deterministic=True"):
        engine.audit(1)
    with Engine.load(make(config), num_blocks=40, block_size=4, prefill_chunk=24, deterministic=True) as engine:
        engine.generate([list(range(3, 83))], GREEDY)
        assert engine.audit(50).differ == 0
