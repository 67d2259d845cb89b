"""Engines of a small random model, on a simulated GPU or on the CPU; their answers must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from radixkv.engine.engine import RequestEngine
from radixkv.engine.output import Completion
from radixkv.models import adapter
from radixkv.sampling.params import SamplingParams

PROMPTS = [[3 + 7 * i % 90 for i in range(11)], [3 + 7 * i % 90 for i in range(6)] + [5, 6], [50, 51]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
    SamplingParams(max_tokens=3, top_p=0.8, seed=5, n=2),
]


def decoder(**changes: Any) -> Any:
    """Return a small random decoder, the same each time."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
    return model


def load(place: torch.device | str, **options: Any) -> RequestEngine:
    """Load an engine without a self-test, which takes a second."""
    settings = {
        "attention": "torch",
        "compile": False,
        "num_blocks": 40,
        "block_size": 4,
        "max_sequences": 4,
        "prefill_chunk": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "self_test", lambda loaded: 0.0)
        return RequestEngine.load(
            decoder(), device=str(place), dtype="float32", monitor=False, seed=3, **{**settings, **options}
        )


def answers(engine: RequestEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Return the tokens of all streams of all prompts, with each of `PARAMS` in turn."""
    params = [PARAMS[place % len(PARAMS)] for place in range(len(prompts))]
    done: list[Completion] = engine.generate(list(prompts), params)
    return [tuple(stream.token_ids) for each in done for stream in (each, *each.alternatives)]
