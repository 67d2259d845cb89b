"""Beam search gives the sequences and scores of transformers' own `generate(num_beams=k)`."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from radixkv.chat import Engine
from radixkv.engine.output import Completion
from radixkv.sampling.params import SamplingParams
from tests.chat.worlds import byte_tokenizer
from tests.models.conftest import GROUPED
from tests.selection import mostly_long


class Case(NamedTuple):
    """A search: our parameters, and those of transformers that differ in their names."""

    width: int
    ours: dict[str, Any]
    theirs: dict[str, Any]


def case(width: int, stop: list[int], **ours: Any) -> Case:
    renamed = {"min_tokens": "min_new_tokens"}
    theirs = {renamed.get(name, name): value for name, value in ours.items()}
    return Case(width, {**ours, "stop_token_ids": stop}, {**theirs, "eos_token_id": stop or None})


CASES = {
    "plain": case(4, [2]),
    "without a stop token": case(2, []),
    "wide": case(9, [2, 30]),
    "first complete replies": case(3, list(range(2, 12)), early_stopping=True, length_penalty=0.0),
    "no penalty": case(3, list(range(2, 12)), length_penalty=0.0),
    "short replies": case(3, list(range(2, 12)), length_penalty=-1.5),
    "never": case(4, list(range(2, 12)), early_stopping="never", length_penalty=2.0),
    "never, short": case(4, list(range(2, 12)), early_stopping="never", length_penalty=-0.5),
    "minimum length": case(3, list(range(2, 40)), min_tokens=5),
    "repetition penalty": case(3, [2, 30], repetition_penalty=1.4),
}


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(40, 97), k=19)


def their_beams(model: Any, ids: list[int], case: Case, count: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the sequences, without padding, and their scores."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=case.width,
        num_return_sequences=case.width,
        max_new_tokens=count,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **case.theirs,
    )
    replies = found.sequences[:, len(ids) :].tolist()
    stops = case.theirs["eos_token_id"] or []
    ends = [next((at for at, token in enumerate(reply, 1) if token in stops), count) for reply in replies]
    cut = [tuple(reply[:end]) for reply, end in zip(replies, ends, strict=True)]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


def check_equal(ours: Completion, theirs: list[tuple[tuple[int, ...], float]]) -> None:
    """Replies are equal in their order, except where scores tie."""
    beams = [ours, *ours.alternatives]
    assert [beam.score for beam in beams] == pytest.approx([score for _, score in theirs], abs=1e-4)
    scores = [score for _, score in theirs]
    if all(first - second > 1e-5 for first, second in pairwise(scores)):
        assert [beam.token_ids for beam in beams] == [reply for reply, _ in theirs]
    else:
        assert {beam.token_ids for beam in beams} == {reply for reply, _ in theirs}


def searched(model: Any, ids: list[int], case: Case, count: int, **settings: Any) -> Completion:
    params = SamplingParams(max_tokens=count, beam_width=case.width, ignore_eos=True, **case.ours)
    with Engine.load(
        model, **{"num_blocks": 150, "block_size": 4, "prefill_chunk": 9, "monitor": False, **settings}
    ) as engine:
        (found,) = engine.generate([ids], params)
        engine.client.thread.ask(engine.core.cache.check)
        return found


@pytest.mark.parametrize("name", mostly_long(sorted(CASES), "minimum length", "never", "repetition penalty", "wide"))
def test_beams_match_transformers(build: Callable[..., Any], name: str) -> None:
    case, ids = CASES[name], prompt(len(name))
    check_equal(searched(build("llama"), ids, case, 12), their_beams(build("llama"), ids, case, 12))


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "gptj": lambda: transformers.GPTJConfig(
        n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=256, rotary_dim=4, bos_token_id=1, eos_token_id=2
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **GROUPED, layer_types=["conv", "full_attention"], conv_L_cache=3, block_auto_adjust_ff_dim=False
    ),
}


@pytest.mark.parametrize(
    "kind", mostly_long(["qwen3", "gemma2", "gpt_neox", "phi3", *sorted(CONFIGS)], "gemma2", "gptj", "lfm2", "mixtral")
)
def test_beams_of_every_kind_of_model(build: Callable[..., Any], kind: str) -> None:
    case, ids = CASES["wide"], prompt(3)
    config = CONFIGS[kind]() if kind in CONFIGS else kind
    check_equal(searched(build(config), ids, case, 9), their_beams(build(config), ids, case, 9))


@pytest.mark.parametrize(
    ("block_size", "deterministic"), mostly_long([(1, False), (1, True), (16, False), (16, True)], (16, True))
)
def test_beams_on_blocks_of_every_size(build: Callable[..., Any], block_size: int, deterministic: bool) -> None:
    case, ids = CASES["never"], prompt(5)
    ours = searched(build("llama"), ids, case, 9, block_size=block_size, deterministic=deterministic, prefill_chunk=16)
    check_equal(ours, their_beams(build("llama"), ids, case, 9))


@pytest.mark.parametrize(("seed", "width", "penalty"), [(6, 2, 0.0), (11, 3, 0.0)])
def test_stop_strings_end_beams_as_in_transformers(
    build: Callable[..., Any], seed: int, width: int, penalty: float
) -> None:
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": len(tokenizer)})
    ids = random.Random(seed).choices(range(3, 200), k=15)
    stop = ["a", "c", "e", "ou", "r", "t"]
    ours = {"stop": stop, "length_penalty": penalty}
    theirs = {"stop_strings": stop, "tokenizer": tokenizer, "length_penalty": penalty, "eos_token_id": None}
    found = searched(build(config), ids, Case(width, ours, theirs), 14, tokenizer=tokenizer)
    expected = their_beams(build(config), ids, Case(width, ours, theirs), 14)
    replies = [found, *found.alternatives]
    cut = [(reply[: len(each.token_ids)], score) for each, (reply, score) in zip(replies, expected, strict=True)]
    check_equal(found, cut)
    assert any(each.stop_text for each in replies)
