"""Sampling parameters: one declaration each, from which validation, HTTP bodies and the OpenAPI document follow.

A parameter's default, its range and the narrower range of HTTP clients stand in its dataclass field only. Importing
this module imports no torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

from radixkv.argument_names import explained
from radixkv.errors import InvalidInput

INT64 = (-(2**63), 2**63 - 1)  # the integers that HTTP clients may send
CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
LONGEST_CONSTRAINT = 2**18  # characters of a schema, of a grammar, or of all choices
LONGEST_REGEX = 2**14  # characters
MOST_CHOICES = 10_000


# ---- kinds of parameters


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Declare one sampling parameter, in the metadata of its dataclass field.

    adjusts_logits   whether a value other than the default needs a logits processor
    on_wire          whether HTTP endpoints accept the parameter under its own name
    description      the parameter's description in the OpenAPI document, if it has one
    """

    adjusts_logits: bool = False
    on_wire: bool = True
    description: str = ""

    def checked(self, name: str, value: Any) -> Any:
        """Return the value as it is stored; raise InvalidInput if it is out of range."""
        return value


@dataclass(frozen=True, kw_only=True)
class Flag(Parameter):
    """Declare a parameter that is true or false."""


@dataclass(frozen=True, kw_only=True)
class Integer(Parameter):
    """Declare an int from `low` to `high`; `optional` allows None."""

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
        """Return the value; raise InvalidInput if it is out of range."""
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
    """Declare a finite number from `low` to `high`; `above` excludes `low` itself."""

    low: float
    high: float = math.inf
    above: bool = False
    wire_high: float | None = None

    @property
    def wire(self) -> tuple[float, float]:
        """The range that HTTP clients may use."""
        return self.low, self.high if self.wire_high is None else self.wire_high

    def checked(self, name: str, value: Any) -> Any:
        """Return the value; raise InvalidInput if it is out of range."""
        if not _is_number(value) or not self.low <= value <= self.high or (self.above and value == self.low):
            sign = ">" if self.above else ">="
            limit = "" if self.high == math.inf else f" and <= {self.high:g}"
            raise InvalidInput(f"{name} must be a number {sign} {self.low:g}{limit}, not {value!r}")
        return value


@dataclass(frozen=True, kw_only=True)
class TokenBias(Parameter):
    """Declare a mapping of token ids to numbers from `low` to `high`; None is empty."""

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
    """Declare a list of non-empty strings; a single string is a list of one, None is empty.

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
    """Declare a list of token ids; None is empty."""

    def checked(self, name: str, value: Any) -> tuple[int, ...]:
        """Return a tuple."""
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
            raise InvalidInput(f"{name} must be a list of token ids, not {value!r}")
        if not all(is_int(token) and token >= 0 for token in value):
            raise InvalidInput(f"{name} must be ints >= 0, not {value!r}")
        return tuple(value)


@dataclass(frozen=True, kw_only=True)
class Pattern(Parameter):
    """Declare a text of at most `most` characters that a constraint is made from; None is no constraint."""

    most: int

    def checked(self, name: str, value: Any) -> str | None:
        """Return the text."""
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise InvalidInput(f"{name} must be a text, not {value!r:.100}")
        return _encodable(name, _short_enough(name, value, self.most))


@dataclass(frozen=True, kw_only=True)
class JsonSchema(Pattern):
    """Declare a JSON schema: a mapping, its JSON text, or True for any JSON value; None is no constraint."""

    def checked(self, name: str, value: Any) -> str | None:
        """Return compact JSON text with the keys in their order, which is the order of the reply's properties."""
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = json.loads(_short_enough(name, value, self.most))
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"{name} is no JSON: {json_reason(error)}") from error
        if value is not True and not isinstance(value, Mapping):
            raise InvalidInput(f"{name} must be a mapping, its JSON text, or True for any value, not {value!r:.100}")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{name} is no JSON: {json_reason(error)}") from error
        return _encodable(name, _short_enough(name, text, self.most))


@dataclass(frozen=True, kw_only=True)
class Choices(Texts):
    """Declare at most `most` texts, of at most `longest` characters together; one is chosen."""

    most: int
    longest: int

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        """Return a tuple; empty is no constraint."""
        texts = super().checked(name, value)
        if len(texts) > self.most:
            raise InvalidInput(f"{name} has {len(texts)} texts: at most {self.most} are allowed")
        for text in texts:
            _encodable(name, text)
        _short_enough(name, "".join(texts), self.longest)
        return texts


@dataclass(frozen=True, kw_only=True)
class Prediction(Parameter):
    """Declare a text, which may be empty; None is empty."""

    def checked(self, name: str, value: Any) -> str:
        """Return the text."""
        if not isinstance(value, str | None):
            raise InvalidInput(f"{name} must be a text, not {value!r:.100}")
        return _encodable(name, value or "")


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Parameter):
    """Declare when a beam search ends: True, False or "never"."""

    def checked(self, name: str, value: Any) -> bool | str:
        """Return the value; raise InvalidInput if it is another one."""
        if not isinstance(value, bool) and value != "never":
            raise InvalidInput(f'{name} must be True, False or "never", not {value!r:.100}')
        return bool(value) if value != "never" else "never"


@dataclass(frozen=True, kw_only=True)
class Arguments(Parameter):
    """Declare a mapping of names to values that only custom logits processors read; None is empty."""

    def checked(self, name: str, value: Any) -> dict[str, Any]:
        """Return a copy."""
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise InvalidInput(f"{name} must map names to values, not be {value!r:.100}")
        return dict(value)


def json_reason(error: Exception) -> str:
    """Return why a text is no JSON; a reader of Python's message about long numbers cannot change that limit."""
    limit = sys.get_int_max_str_digits()
    return f"a whole number has more than {limit} digits" if "integer string conversion" in str(error) else str(error)


def _short_enough(name: str, text: str, most: int) -> str:
    if len(text) > most:
        raise InvalidInput(f"{name} has {len(text)} characters: at most {most} are allowed")
    return text


def _encodable(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name} is no valid Unicode: {error}") from error
    return text


def parameter(default: Any, declaration: Parameter) -> Any:
    """Return a dataclass field with this default and this declaration."""
    return field(default=default, metadata={"parameter": declaration})


# ---- the parameters

_OF_BEAMS = "Has a meaning only with `use_beam_search`."


class Constraint(NamedTuple):
    """A rule for the text of a reply: the parameter that gives it, and its checked value."""

    parameter: str
    value: str | tuple[str, ...]


@explained
@dataclass(frozen=True)
class SamplingParams:
    """Say how a reply is sampled and when it ends; raises InvalidInput, with the allowed range, for a wrong value.

    The defaults sample from the model's own distribution: temperature 1, no filter. Temperature 0 is greedy, and then
    top_k, top_p, min_p and seed have no effect. The parameters apply in this order: penalties, logit_bias, min_tokens,
    bad_words, custom logits processors, temperature, top_k, top_p, min_p.

    A beam search (`beam_width` > 1) draws nothing: temperature, top_k, top_p, min_p and seed have no effect. It returns
    all its beams, so `n` is 1, and its replies have no constraint.

    max_tokens           maximum length of the reply, >= 1
    min_tokens           minimum length: no stop token is sampled before, and no stop string that is complete before it
                         ends the reply, 0 <= min_tokens <= max_tokens
    temperature          divides the logits, >= 0; below 0.01 sampling is nearly greedy
    top_k                keep the k most likely tokens, and tokens that tie with the last; 0 or -1: all, 1: greedy
    top_p                of these, keep the smallest set with this total probability, 0 < top_p <= 1
    min_p                drop tokens less likely than min_p times the most likely one, 0 <= min_p <= 1
    repetition_penalty   divides positive and multiplies negative logits of the tokens of prompt and reply, 0.01..100
    presence_penalty     subtracted once from the logit of each token that occurs in the reply, -2..2
    frequency_penalty    subtracted for each occurrence of a token in the reply, -2..2
    logit_bias           token id -> number added to its logit, -100..100
    seed                 an int: the same seed gives the same reply, in any batch; None: the engine's seed
    stop                 strings that end the reply, and are not part of it
    stop_token_ids       additional token ids that end the reply
    ignore_eos           continue after the model's own stop tokens
    n                    number of replies to one prompt, >= 1
    logprobs             number of most likely tokens whose log probabilities are returned at each position, in addition
                         to the sampled token's; 0..100, None: no log probabilities. They belong to the model's
                         distribution, before any parameter above changes it
    prompt_logprobs      as logprobs, for each token of the prompt after the first; needs the logits of the whole prompt
    bad_words            texts that a reply does not contain, as far as their tokens are concerned
    beam_width           number of beams, >= 1; 1: no beam search
    length_penalty       a beam's score is the sum of its log probabilities over its length to this power, -10..10
    early_stopping       True: stop once beam_width beams are complete; False: once no beam is likely to improve;
                         "never": once no beam can improve, for a length_penalty > 0
    speculate            whether an engine that speculates drafts tokens of the reply; it is the same with and without
    prediction           text that the reply may repeat, from which such an engine drafts; "": none
    extra_args           name -> value, for the engine's custom logits processors
    json_schema          the reply is a JSON value that this schema allows: a mapping, its JSON text, or True for any
    regex                the whole reply matches this regular expression
    grammar              the reply follows this grammar, in Lark's notation as llguidance reads it, or in GBNF
    choice               the reply is one of these texts

    At most one of json_schema, regex, grammar and choice is given; they need the extra radixkv[grammar].
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
    prompt_logprobs: int | None = parameter(None, Integer(low=0, high=100, optional=True, wire_high=20, on_wire=False))
    bad_words: Sequence[str] = parameter((), Texts(wire_most=1024, wire_longest=256, adjusts_logits=True))
    beam_width: int = parameter(1, Integer(low=1, wire_high=128, on_wire=False))
    length_penalty: float = parameter(1.0, Number(low=-10, high=10, description=_OF_BEAMS))
    early_stopping: bool | str = parameter(False, EarlyStopping(description=_OF_BEAMS))
    speculate: bool = parameter(True, Flag(description="Draft tokens of the reply, if the server speculates."))
    prediction: str = parameter("", Prediction(on_wire=False))
    extra_args: Mapping[str, Any] = field(
        default_factory=dict, hash=False, metadata={"parameter": Arguments(on_wire=False)}
    )
    json_schema: Mapping[str, Any] | str | bool | None = parameter(
        None, JsonSchema(most=LONGEST_CONSTRAINT, on_wire=False)
    )
    regex: str | None = parameter(None, Pattern(most=LONGEST_REGEX, on_wire=False))
    grammar: str | None = parameter(None, Pattern(most=LONGEST_CONSTRAINT, on_wire=False))
    choice: Sequence[str] = parameter(
        (), Choices(most=MOST_CHOICES, longest=LONGEST_CONSTRAINT, wire_most=0, wire_longest=0, on_wire=False)
    )

    def __post_init__(self) -> None:
        """Check every parameter, and copy the containers, which the caller could change later."""
        for name, declaration in parameters(type(self)).items():
            value = getattr(self, name)
            checked = declaration.checked(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        given = [name for name in CONSTRAINTS if getattr(self, name)]
        if len(given) > 1:
            raise InvalidInput(f"{' and '.join(given)} are given: a reply has at most one constraint")
        if self.beam_width > 1 and self.n > 1:
            raise InvalidInput(
                f"beam_width is {self.beam_width} and n is {self.n}: a beam search returns all its beams"
            )
        if self.beam_width > 1 and given:
            raise InvalidInput(f"beam_width is {self.beam_width}, and {given[0]} is given: beams have no constraint")

    @property
    def width(self) -> int:
        """The number of replies that are computed to one prompt: `n`, or `beam_width`."""
        return max(self.n, self.beam_width)

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether a logits processor must change the logits before sampling."""
        default = type(self)()
        names = [name for name, declared in parameters(type(self)).items() if declared.adjusts_logits]
        return any(getattr(self, name) != getattr(default, name) for name in names)

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint on the reply's text, None without one."""
        for name in CONSTRAINTS:
            if value := getattr(self, name):
                return Constraint(name, value)
        return None

    def but(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed and checked."""
        return replace(self, **changes)


def parameters(cls: type[SamplingParams]) -> Mapping[str, Parameter]:
    """Return the declarations of all sampling parameters, by name."""
    if cls not in _PARAMETERS:
        _PARAMETERS[cls] = {each.name: each.metadata["parameter"] for each in fields(cls)}
    return _PARAMETERS[cls]


_PARAMETERS: dict[type[SamplingParams], Mapping[str, Parameter]] = {}


def checked_params(params: object, default: SamplingParams | None = None) -> SamplingParams:
    """Return `params`, or `default` for None; raise InvalidInput for another type."""
    if params is None:
        return default or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidInput(f"params must be SamplingParams(...) or None, got {params!r:.100}")
    return params


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


# ---- rows of a batch


@dataclass(frozen=True)
class SampleRow:
    """Describe one row of a batch of logits: its parameters, `params`, and the tokens sampled before.

    `history` is the prompt, `prompt_length` tokens, and the reply so far; only logits processors read it. The pair
    (`seed`, `position`) identifies a draw: each token has its own. `stop_token_ids` end the reply; they are masked
    while it is shorter than `min_tokens`. `stream` identifies the row's stream from step to step: streams that sample
    in turn have different values, and a stream keeps its own through preemptions. `in_flight` is the number of tokens
    after `history` that were sampled by the preceding `begin` and are still unknown to the host: 0 or 1. `candidates`
    is the number of most likely tokens that a beam search needs, 0 for a row that is sampled. `bad_words` are the token
    ids of each text that the reply must not contain.
    """

    params: SamplingParams
    seed: int
    position: int
    history: Sequence[int] = ()
    prompt_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stream: Hashable = None
    in_flight: int = 0
    candidates: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Candidates:
    """The most likely tokens of a row, best first, without tokens that the processors exclude.

    `scores` are log probabilities that the logits processors have changed, and `logprobs` belong to the model's own
    distribution.
    """

    tokens: list[int]
    scores: list[float]
    logprobs: list[float]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of the chosen token, and (id, log probability) of the most likely tokens, in that order.

    `rank` is 1 plus the number of tokens that are more likely than the chosen one, for tokens of a prompt.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


# ---- suggestions of checkpoints

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = ("repetition_penalty",)


def suggested(model: Any) -> SamplingParams:
    """Return the parameters that a checkpoint's generation_config.json suggests, else the defaults.

    It may suggest temperature, top_k, top_p, min_p and repetition_penalty. transformers writes `do_sample: false` by
    default, so that does not suggest greedy decoding; it disables all suggestions except the penalty. Values out of
    range are ignored.
    """
    settings = getattr(model, "generation_config", None)
    names = _ALWAYS if getattr(settings, "do_sample", None) is False else (*_SAMPLED, *_ALWAYS)
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
