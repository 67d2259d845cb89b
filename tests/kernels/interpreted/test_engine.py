"""A whole engine with the kernels' attention gives the same tokens as with torch's: hits, forks and chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from radixkv import Engine, SamplingParams
from radixkv.attention import plan, triton_backend
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, attention_interface
from radixkv.models.runner import Runner
from tests.models.conftest import GROUPED, make
from tests.models.step_runner import BLOCK_SIZE, chunk

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SELF_TEST = adapter.tested


@pytest.fixture(autouse=True)
def _loaded_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip self-tests, which take three interpreted seconds; one test has it."""
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)


def decoder(config: Any = transformers.LlamaConfig, **changes: Any) -> Any:
    """Return a small random decoder, the same each time."""
    return make(config(**{**GROUPED, **changes}))


def lives(engine: Engine) -> list[tuple[int, ...]]:
    """Return an engine's answers to a prompt in chunks, its repeat, branches inside a block, and all at once."""
    prompt = [3 + 7 * i % 90 for i in range(22)]
    branches = [[*prompt[:14], 5 + i] for i in range(2)]
    answers = [engine.generate([prompt], GREEDY), engine.generate([prompt], GREEDY)]
    answers.append(engine.generate([*branches, [9, 8, 7]], GREEDY.but(n=2)))
    stats = engine.stats()
    assert stats.cached_tokens >= 21 + 14 + 14
    assert stats.cache.copied_blocks
    engine.client.thread.ask(engine.core.cache.check)
    return [tuple(stream.token_ids) for batch in answers for done in batch for stream in (done, *done.alternatives)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_answers_as_with_torch(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    monkeypatch.setattr(attention_interface, "SPLIT", 8)
    answers = {}
    for attention in ("torch", "triton"):
        options: dict[str, Any] = {"deterministic": deterministic, "prefill_chunk": 8, "seed": 3}
        with Engine.load(decoder(), attention=attention, num_blocks=40, block_size=BLOCK_SIZE, **options) as engine:
            answers[attention] = lives(engine) if not deterministic else [_told(engine)]
            assert engine.stats().attention == attention
    assert answers["triton"] == answers["torch"]


def _told(engine: Engine) -> tuple[int, ...]:
    """Ask for a miss and a hit, which a deterministic engine answers alike."""
    prompt = [3 + 7 * i % 90 for i in range(22)]
    cold, warm = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert warm.usage.cached_tokens == 16
    assert warm.token_ids == cold.token_ids
    return tuple(warm.token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_match_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    model = decoder(transformers.MistralConfig, sliding_window=9).to(dtype)
    rows = []
    for attention in ("torch", "triton"):
        runner = Runner(adapter.load(model, attention=attention), 20, BLOCK_SIZE)
        first = runner.run([chunk(range(3, 14), 0, [5, 2, 9])])
        mixed = runner.run(
            [chunk([7], 11, [5, 2, 9]), chunk([8, 9], 10, [5, 2, 7]), chunk([4] * 6, 0, [1, 0])], [(9, 7)]
        )
        rows.append(torch.cat([first, mixed]))
    assert runner.store.dtype == dtype
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-4 if dtype == torch.float32 else 0.3)


def test_a_deterministic_hit_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scattered blocks, a shared prefix and other inputs in the step, the bits are those of a run alone."""
    monkeypatch.setattr(attention_interface, "SPLIT", 8)
    loaded = adapter.load(decoder(), attention="triton")
    tokens = [3 + 11 * i % 90 for i in range(30)]
    cold, warm = (Runner(loaded, 40, BLOCK_SIZE, deterministic=True) for _ in range(2))
    table = list(range(8))
    expected = [cold.run([chunk(tokens[a:b], a, table)]) for a, b in ((0, 12), (12, 24), (24, 29), (29, 30))]

    warm.run([chunk([*tokens[:12]], 0, [30, 4, 17])])
    mine, other = [30, 4, 17, 9, 22, 1, 33, 35], [30, 4, 17, 39, 38]
    beside = chunk([6, 7, 8], 12, other)
    found = [
        warm.run([chunk(tokens[12:24], 12, mine, isolated=True), beside])[:1],
        warm.run([chunk([5], 15, other), chunk(tokens[24:29], 24, mine, isolated=True)])[1:],
        warm.run([chunk(tokens[29:30], 29, mine)]),
    ]
    assert all(torch.equal(ours, isolated) for ours, isolated in zip(found, expected[1:], strict=True))


def _off(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: 2 * attend(*args, **options)


def test_what_is_loaded_was_tested_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "attend", _off(triton_backend.attend))
    monkeypatch.setattr(adapter, "tested", SELF_TEST)
    adapter.load(decoder())  # in torch
    with pytest.raises(UnsupportedModel, match="does not compute the same"):
        adapter.load(decoder(), attention="triton")


def test_what_the_kernels_do_not_serve_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match=r"do not store torch\.float64"):
        adapter.load(decoder().double(), attention="triton")
