"""What a checkpoint suggests for sampling, in its generation_config.json.

Knows which of transformers' settings mean what one of ours means. Does not know who follows a suggestion.
"""

from __future__ import annotations

from typing import Any

from radixkv.errors import InvalidInput
from radixkv.models.sampling_params import SamplingParams

_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty",)


def suggested(model: Any) -> SamplingParams:
    """The defaults, with the model's own temperature, top_k, top_p, min_p and repetition_penalty where it has some.

    `do_sample: false` is what transformers writes where nobody chose, so it does not suggest greedy decoding; of what
    stands beside it only the penalty counts. A value out of our range is left out.
    """
    settings = getattr(model, "generation_config", None)
    names = _ALWAYS if getattr(settings, "do_sample", None) is False else (*_DRAWN, *_ALWAYS)
    params = SamplingParams()
    for name in names:
        value = getattr(settings, name, None)
        if value is not None:
            params = _with(params, name, value)
    return params


def _with(params: SamplingParams, name: str, value: Any) -> SamplingParams:
    try:
        return params.but(**{name: value})
    except InvalidInput:
        return params
