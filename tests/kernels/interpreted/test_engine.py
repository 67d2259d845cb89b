"""A whole engine with the kernels' attention gives the same tokens as with torch's: hits, forks and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv import Engine, SamplingParams
from radixkv.attention import plan, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, attention_interface
from radixkv.models.loaded import SequenceInput
from radixkv.models.runner import Runner

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SIZE = 4
SELF_TEST = adapter.tested


@pytest.fixture(autouse=True)
def _loaded_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip self-tests, which take three interpreted seconds; one test has it."""
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)


def decoder(config: Any = transformers.LlamaConfig, **changes: Any) -> Any:
    """Return a small random decoder, the same each time."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
    return model


def chunk(tokens: Sequence[int], start: int, table: Sequence[int], *, isolated: bool = False) -> SequenceInput:
    """Return an input of tokens from `start` on of a sequence in these blocks."""
    places = np.arange(start, start + len(tokens))
    blocks = np.array(table, dtype=np.int32)
    slots = blocks[places // SIZE].astype(np.int64) * SIZE + places % SIZE
    return SequenceInput(np.array(tokens, dtype=np.int32), start, slots, blocks, isolated=isolated)


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
        with Engine.load(decoder(), attention=attention, num_blocks=40, block_size=SIZE, **options) as engine:
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


def test_the_bundled_model_talks_as_with_torch() -> None:
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    said = {}
    for attention in ("torch", "triton"):
        with Engine.load("tiny", attention=attention, num_blocks=16) as engine:
            said[attention] = engine.generate([question], SamplingParams(temperature=0, max_tokens=3))[0].text
    assert said["triton"] == said["torch"] == "The capital of"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_match_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SAVING", 1)
    model = decoder(transformers.MistralConfig, sliding_window=9).to(dtype)
    rows = []
    for attention in ("torch", "triton"):
        runner = Runner(adapter.load(model, attention=attention), 20, SIZE)
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
    cold, warm = (Runner(loaded, 40, SIZE, deterministic=True) for _ in range(2))
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


def test_the_backends_fixed_split_gives_a_row_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_interface, "SPLIT", 16)
    store = KVStore([LayerShape(2, 16, 16)], 80, SIZE)
    for pool in (*store.keys, *store.values):
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    tables, lengths = [range(20), range(20, 25), range(30, 75)], [77, 17, 180]
    query = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(2))
    loaded = adapter.load(decoder(num_hidden_layers=1), attention="triton")

    def attend(count: int, *, deterministic: bool) -> torch.Tensor:
        backend = attention_interface.backend_of(loaded, store, deterministic=deterministic)
        work = plan.build(tables[:count], lengths[:count], [1] * count, block_size=SIZE, min_saving=plan.NEVER_SHARE)
        return backend.attend(0, query[:, :count], work, scale=0.3, softcap=None, sinks=None)

    assert torch.equal(attend(1, deterministic=True)[0], attend(3, deterministic=True)[0])
    torch.testing.assert_close(attend(3, deterministic=True), attend(3, deterministic=False), rtol=0, atol=1e-5)


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
