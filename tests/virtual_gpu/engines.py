"""Engines of a small random model, on a simulated GPU or on the CPU; their answers must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from radixkv.engine.engine import RequestEngine
from radixkv.engine.output import Completion
from radixkv.models import adapter
from radixkv.sampling.params import SampleRow, SamplingParams

PROMPTS = [[3 + 7 * i % 90 for i in range(11)], [3 + 7 * i % 90 for i in range(6)] + [5, 6], [50, 51]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
    SamplingParams(max_tokens=3, top_p=0.8, seed=5, n=2),
]

_PAIRS = [f"w{first} w{second}" for first in range(0, 97, 3) for second in (1, 4, 50, 91)]
SEARCHES = [
    SamplingParams(beam_width=3, max_tokens=5, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=0, max_tokens=4, bad_words=[f"w{token}" for token in range(1, 97, 2)]),
    SamplingParams(beam_width=2, max_tokens=4, length_penalty=2.0, early_stopping="never", bad_words=_PAIRS),
    SamplingParams(temperature=0, max_tokens=4, frequency_penalty=0.5, bad_words=_PAIRS, extra_args={"doubled": 7}),
]
"""Parameters whose rows the host must read, or that it computes for each step; they need `words()`."""


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


def words() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that writes token 5 as the word w5."""
    model = WordLevel({f"w{token}": token for token in range(97)}, unk_token="w3")
    found = Tokenizer(model)
    found.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found)


class Doubled:
    """A custom logits processor: doubles the logits of the tokens up to a limit."""

    reads_history = False

    def applies(self, params: SamplingParams) -> bool:
        return "doubled" in params.extra_args

    def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for values, row in zip(logits, rows, strict=True):
            values[: row.params.extra_args["doubled"]] *= 2


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
        patch.setattr(adapter, "tested", lambda loaded: 0.0)
        return RequestEngine.load(
            decoder(), device=str(place), dtype="float32", monitor=False, seed=3, **{**settings, **options}
        )


def searched(engine: RequestEngine) -> list[tuple[tuple[int, ...], float]]:
    """Return the tokens and the score of all replies with `SEARCHES`, 0 where there is none."""
    done: list[Completion] = engine.generate([PROMPTS[place % 3] for place in range(len(SEARCHES))], SEARCHES)
    return [(each.token_ids, each.score or 0.0) for first in done for each in (first, *first.alternatives)]


def scored(engine: RequestEngine) -> list[list[float]]:
    """Return the log probabilities of continuations that share a prompt, and those of a prompt with a reply."""
    scores = engine.score(PROMPTS[0], [[7, 9, 11], [7, 9, 12], [4]])
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    done: list[Completion] = engine.generate([PROMPTS[0] + [5, 6], PROMPTS[2]], params)
    prompts = [[entry.chosen for entry in each.prompt_logprobs or () if entry is not None] for each in done]
    return [*(list(each.token_logprobs) for each in scores), *prompts]


def answers(engine: RequestEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Return the tokens of all streams of all prompts, with each of `PARAMS` in turn."""
    params = [PARAMS[place % len(PARAMS)] for place in range(len(prompts))]
    done: list[Completion] = engine.generate(list(prompts), params)
    return [tuple(stream.token_ids) for each in done for stream in (each, *each.alternatives)]
