"""Sampling parameters: ranges and defaults, checked when they are made; also those that a checkpoint suggests.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeGuard

from radixkv.errors import InvalidInput

INT64 = (-(2**63), 2**63 - 1)  # the integers that HTTP clients may send


# ---- kinds of parameters: each has the ranges of one parameter, and checks a value against them


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The declaration of one sampling parameter, kept in the metadata of its dataclass field.

    adjusts_logits   whether a value other than the default needs a logits processor
    on_wire          whether HTTP endpoints take the parameter under its own name, in the range `wire`
    description      the parameter's description in the OpenAPI document, if it needs one
    """

    adjusts_logits: bool = False
    on_wire: bool = True
    description: str = ""

    def checked(self, name: str, value: Any) -> Any:
        """Return the value in its stored form; raises InvalidInput if it is out of range."""
        return value


@dataclass(frozen=True, kw_only=True)
class Flag(Parameter):
    """True or false."""


@dataclass(frozen=True, kw_only=True)
class Integer(Parameter):
    """An int of at least `low` and at most `high`; `optional` allows None."""

    low: int | None = None
    high: int | None = None
    optional: bool = False
    wire_high: int | None = None

    @property
    def wire(self) -> tuple[int, int]:
        """The range that HTTP clients may use."""
        low, high = INT64
        return low if self.low is None else self.low, self.wire_high or self.high or high

    def checked(self, name: str, value: Any) -> Any:
        """Return the value."""
        if value is None and self.optional:
            return value
        if (
            not is_int(value)
            or not (self.low is None or self.low <= value)
            or not (self.high is None or value <= self.high)
        ):
            raise InvalidInput(f"{name} must be {self._allowed}, not {value!r}")
        return value

    @property
    def _allowed(self) -> str:
        if self.low is None:
            return "an int or None" if self.optional else "an int"
        limits = f">= {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return f"None or an int {limits}" if self.optional else f"an int {limits}"


@dataclass(frozen=True, kw_only=True)
class Number(Parameter):
    """A finite number from `low` to `high`; `above` excludes `low` itself."""

    low: float
    high: float = math.inf
    above: bool = False
    wire_high: float | None = None

    @property
    def wire(self) -> tuple[float, float]:
        """The range that HTTP clients may use."""
        return self.low, self.high if self.wire_high is None else self.wire_high

    def checked(self, name: str, value: Any) -> Any:
        """Return the value."""
        if not _is_number(value) or not self.low <= value <= self.high or (self.above and value == self.low):
            sign = ">" if self.above else ">="
            limit = "" if self.high == math.inf else f" and <= {self.high:g}"
            raise InvalidInput(f"{name} must be a number {sign} {self.low:g}{limit}, not {value!r}")
        return value


@dataclass(frozen=True, kw_only=True)
class TokenBias(Parameter):
    """A mapping of token ids to numbers from `low` to `high`; None is empty."""

    low: float
    high: float

    def checked(self, name: str, value: Any) -> dict[int, float]:
        """Return a copy."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise InvalidInput(f"{name} must map token ids to numbers, not be a {type(value).__name__}")
        for token, bias in value.items():
            if not is_int(token) or token < 0 or not _is_number(bias) or not self.low <= bias <= self.high:
                limits = f"from {self.low:g} to {self.high:g}"
                raise InvalidInput(f"{name} must map token ids to numbers {limits}, not {token!r} to {bias!r}")
        return dict(value)


@dataclass(frozen=True, kw_only=True)
class Texts(Parameter):
    """Non-empty strings; a single string is one of them, None is empty.

    HTTP clients may send `wire_most` strings of at most `wire_longest` characters.
    """

    wire_most: int
    wire_longest: int

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        """Return a tuple."""
        texts = (value,) if isinstance(value, str) else () if value is None else value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
            raise InvalidInput(f"{name} must be a string or a list of strings, none of them empty, not {value!r}")
        return tuple(texts)


@dataclass(frozen=True, kw_only=True)
class TokenIds(Parameter):
    """Token ids; None is empty."""

    def checked(self, name: str, value: Any) -> tuple[int, ...]:
        """Return a tuple."""
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
            raise InvalidInput(f"{name} must be a list of token ids, not {value!r}")
        if not all(is_int(token) and token >= 0 for token in value):
            raise InvalidInput(f"{name} must be ints >= 0, not {value!r}")
        return tuple(value)


def parameter(default: Any, declaration: Parameter) -> Any:
    """Return a dataclass field that has this default and this declaration."""
    return field(default=default, metadata={"parameter": declaration})


# ---- the parameters


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

    max_tokens: int = parameter(256, Integer(low=1, on_wire=False))
    min_tokens: int = parameter(0, Integer(low=0, adjusts_logits=True))
    temperature: float = parameter(1.0, Number(low=0, wire_high=2))
    top_k: int = parameter(0, Integer(low=-1))
    top_p: float = parameter(1.0, Number(low=0, high=1, above=True))
    min_p: float = parameter(0.0, Number(low=0, high=1))
    repetition_penalty: float = parameter(1.0, Number(low=0.01, high=100, adjusts_logits=True))
    presence_penalty: float = parameter(0.0, Number(low=-2, high=2, adjusts_logits=True))
    frequency_penalty: float = parameter(0.0, Number(low=-2, high=2, adjusts_logits=True))
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False, metadata={"parameter": TokenBias(low=-100, high=100, adjusts_logits=True)}
    )
    seed: int | None = parameter(None, Integer(optional=True))
    stop: Sequence[str] = parameter((), Texts(wire_most=16, wire_longest=4096))
    stop_token_ids: Sequence[int] = parameter((), TokenIds())
    ignore_eos: bool = parameter(False, Flag())
    n: int = parameter(1, Integer(low=1, wire_high=128))
    logprobs: int | None = parameter(None, Integer(low=0, high=100, optional=True, wire_high=20, on_wire=False))

    def __post_init__(self) -> None:
        """Check every parameter, and copy the containers, which the caller could change later."""
        for name, declaration in parameters(type(self)).items():
            value = getattr(self, name)
            checked = declaration.checked(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether a logits processor changes the logits before anything is drawn."""
        default = type(self)()
        names = [name for name, declared in parameters(type(self)).items() if declared.adjusts_logits]
        return any(getattr(self, name) != getattr(default, name) for name in names)

    def but(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked anew."""
        return replace(self, **changes)


def parameters(cls: type[SamplingParams]) -> Mapping[str, Parameter]:
    """Return the declarations of all sampling parameters, by name."""
    if cls not in _PARAMETERS:
        _PARAMETERS[cls] = {each.name: each.metadata["parameter"] for each in fields(cls)}
    return _PARAMETERS[cls]


_PARAMETERS: dict[type[SamplingParams], Mapping[str, Parameter]] = {}


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


_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty",)


# ---- rows of a batch


@dataclass(frozen=True)
class SampleRow:
    """One row of a batch of logits: what to draw with, and what was drawn before.

    `history` is the prompt and the reply so far (read only by penalties), of which the first `prompt_length` are the
    prompt. (`seed`, `position`) name the draw: one of each for every token. `stop_token_ids` are what would end the
    reply, masked while it is shorter than `min_tokens`.
    """

    params: SamplingParams
    seed: int
    position: int
    history: Sequence[int] = ()
    prompt_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of the chosen token, and of the likeliest (id, log probability), the likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


# ---- suggestions of checkpoints


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
