"""The naive beam search of the oracle finds the beams of transformers, on the model that only remembers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from radixkv.sampling.params import SamplingParams
from tests.simulation.model import VOCAB, digest_of, logits_of
from tests.simulation.oracle import replies


class DigestConfig(PretrainedConfig):
    model_type = "digest"
    vocab_size = VOCAB
    num_hidden_layers = 1


class DigestModel(PreTrainedModel, GenerationMixin):
    """Computes the logits of the simulated model from the whole history."""

    config_class = DigestConfig

    def __init__(self, config: DigestConfig) -> None:
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))  # a model has a dtype and a device
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        digests = [digest_of(history) for history in input_ids.tolist()]
        return CausalLMOutput(logits=torch.from_numpy(logits_of(np.array(digests, np.uint64)))[:, None])

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Accept an attention mask, which the histories do not need."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, -1.0])
def test_the_oracle_finds_the_beams_of_transformers(length_penalty: float, early_stopping: bool | str) -> None:
    model, rng = DigestModel(DigestConfig()).eval(), random.Random(f"{length_penalty}/{early_stopping}")
    for _ in range(12):
        prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 6)))
        stop_ids, new = rng.sample(range(VOCAB), rng.choice((0, 1, 2, 5))), rng.randint(1, 10)
        params = SamplingParams(
            max_tokens=new,
            min_tokens=rng.choice((0, 0, new // 2)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            beam_width=rng.choice((2, 3, 4)),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = replies(prompt, params, new, frozenset(stop_ids), 0)
        expected = searched(model, prompt, params, stop_ids)
        assert [reply.tokens for reply in found] == [tokens for tokens, _ in expected]
        assert [reply.score for reply in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def searched(
    model: DigestModel, prompt: tuple[int, ...], params: SamplingParams, stop_ids: list[int]
) -> list[tuple[tuple[int, ...], float]]:
    """Return tokens and score of each beam that transformers finds."""
    found: Any = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=stop_ids or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=False,
    )
    replies = [tuple(row) for row in found.sequences[:, len(prompt) :].tolist()]
    ends = [
        next((at for at, token in enumerate(reply) if token in stop_ids and at >= params.min_tokens), len(reply))
        for reply in replies
    ]
    cut = [reply[: end + 1] for reply, end in zip(replies, ends, strict=True)]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))
