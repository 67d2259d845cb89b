"""Sampling parameters: ranges and defaults, checked when they are made; also those that a checkpoint suggests.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from radixkv.errors import InvalidInput

MOST_LOGPROBS = 100


@dataclass(frozen=True)
class SamplingParams:
    """How a reply is drawn and when it ends; raises InvalidInput, with what is allowed, for a value out of range.

    The defaults draw from the model's own distribution (temperature 1, nothing cut off); temperature 0 is greedy, and
    then top_k, top_p, min_p and seed have no effect. They apply in this order: penalties, logit_bias, min_tokens,
    temperature, top_k, top_p, min_p.

    max_tokens           most tokens of the reply, >= 1
    min_tokens           no stop token before this many, 0 <= min_tokens <= max_tokens
    temperature          >= 0; below 0.01 it is nearly greedy
    top_k                keep the k most likely tokens (and what ties with the last); 0 or -1: all, 1: greedy
    top_p                of these, keep the fewest that hold this much probability, 0 < top_p <= 1
    min_p                drop what is less likely than min_p times the likeliest, 0 <= min_p <= 1
    repetition_penalty   divides positive and multiplies negative logits of all tokens seen, prompt included, 0.01..100
    presence_penalty     subtracted once from the logits of tokens that the reply has, -2..2
    frequency_penalty    subtracted for each time that the reply has them, -2..2
    logit_bias           token id -> what is added to its logit, -100..100
    seed                 any int: the same seed draws the same reply, whatever else is in the batch; None: the engine's
    stop                 strings that end the reply, and are not part of it
    stop_token_ids       more token ids that end the reply
    ignore_eos           do not end at the model's own stop tokens
    n                    replies to one prompt, >= 1
    logprobs             log probabilities of this many likeliest tokens, and of the chosen one (0: only that), at each
                         position, of the model's distribution before anything above changed it; None: none
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field, and take copies of what the caller could change later."""
        self._check_lengths()
        self._check_shaping()
        if self.seed is not None and not is_int(self.seed):
            raise InvalidInput(f"seed must be an int or None, not {self.seed!r}")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties, a bias or a minimum length change the logits before anything is drawn."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0)
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0

    def but(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked anew."""
        return replace(self, **changes)

    def _check_lengths(self) -> None:
        for name, low in (("max_tokens", 1), ("n", 1), ("min_tokens", 0), ("top_k", -1)):
            if not is_int(getattr(self, name)) or getattr(self, name) < low:
                raise InvalidInput(f"{name} must be an int >= {low}, not {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.logprobs is not None and not (is_int(self.logprobs) and 0 <= self.logprobs <= MOST_LOGPROBS):
            raise InvalidInput(f"logprobs must be None or an int from 0 to {MOST_LOGPROBS}, not {self.logprobs!r}")

    def _check_shaping(self) -> None:
        self._check_number("temperature", 0.0, math.inf)
        self._check_number("top_p", 0.0, 1.0, above=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("repetition_penalty", 0.01, 100.0)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)

    def _check_number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            sign = ">" if above else ">="
            limit = "" if high == math.inf else f" and <= {high:g}"
            raise InvalidInput(f"{name} must be a number {sign} {low:g}{limit}, not {value!r}")


def checked_params(params: object, default: SamplingParams | None = None) -> SamplingParams:
    """`params` themselves, `default` for None; raises InvalidInput for anything else."""
    if params is None:
        return default or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidInput(f"params must be SamplingParams(...) or None, got {type(params).__name__}")
    return params


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _bias(bias: object) -> dict[int, float]:
    """A checked copy of a logit_bias; None is none."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidInput(f"logit_bias must map token ids to numbers, not be a {type(bias).__name__}")
    for token, value in bias.items():
        if not is_int(token) or token < 0 or not _is_number(value) or not -100 <= value <= 100:
            raise InvalidInput(f"logit_bias must map token ids to numbers from -100 to 100, not {token!r} to {value!r}")
    return dict(bias)


def _stop_strings(stop: object) -> tuple[str, ...]:
    """A checked tuple of stop strings; one string is one of them, None is none."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) and text for text in strings):
        raise InvalidInput(f"stop must be a string or a list of strings, none of them empty, not {stop!r}")
    return tuple(strings)


def _stop_ids(ids: object) -> tuple[int, ...]:
    """A checked tuple of stop token ids; None is none."""
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence | set | frozenset):
        raise InvalidInput(f"stop_token_ids must be a list of token ids, not {ids!r}")
    if not all(is_int(token) and token >= 0 for token in ids):
        raise InvalidInput(f"stop_token_ids must be ints >= 0, not {ids!r}")
    return tuple(ids)


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
