"""Sampling parameters: one declaration each, from which validation, HTTP bodies and the OpenAPI document follow.

A parameter's default, its range and the narrower range of HTTP clients stand in its dataclass field only. Importing
this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from radixkv.argument_names import explained
from radixkv.errors import InvalidInput
from radixkv.settings.declared import check, described, setting
from radixkv.settings.kinds import (
    Integer,
    JsonSchema,
    Kind,
    Named,
    Number,
    Switch,
    Text,
    Texts,
    TokenBias,
    TokenIds,
    encodable,
)

CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
LONGEST_CONSTRAINT = 2**18  # characters of a schema, of a grammar, or of all choices
LONGEST_REGEX = 2**14  # characters
MOST_CHOICES = 10_000
LARGEST_TOP_K = 2**31 - 1  # more than any vocabulary
TEMPERATURES = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The range of temperatures in a batch: beyond the normal numbers of float32 they would give 0/0 or inf/inf."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Kind):
    """Take True, False and "never"."""

    def checked(self, name: str, value: Any) -> bool | str:
        """See Kind."""
        if not isinstance(value, bool) and value != "never":
            raise InvalidInput(f'{name} must be True, False or "never", not {value!r:.100}')
        return bool(value) if value != "never" else "never"


@dataclass(frozen=True, kw_only=True)
class Prediction(Kind):
    """Take a text, which may be empty, and store an empty one for None."""

    def checked(self, name: str, value: Any) -> str:
        """See Kind."""
        if not isinstance(value, str | None):
            raise InvalidInput(f"{name} must be a text, not {value!r:.100}")
        return encodable(name, value or "")


@dataclass(frozen=True)
class Column:
    """The number of a parameter in each row of a batch: for both samplers, and for the kernel.

    dtype     its type on the device
    number    what it is for a value of the parameter
    filters   whether another number than that of the default leaves out tokens
    """

    dtype: str
    number: Callable[[Any], float] = float
    filters: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The declaration of one sampling parameter.

    adjusts_logits   whether a value other than the default needs a logits processor
    on_wire          whether HTTP endpoints accept the parameter under its own name
    column           the number that a sampler needs, if there is one
    example          a value that changes a reply
    inert            the reason why no value changes a reply
    """

    kind: Kind
    help: str
    adjusts_logits: bool = False
    on_wire: bool = True
    column: Column | None = None
    example: Any = None
    inert: str = ""


def parameter(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """Return a dataclass field with its default, or the type of its empty default, and its declaration.

    `more` are the other fields of `Parameter`.
    """
    return setting(default, kind, help, parameter=Parameter(kind=kind, help=help, **more))


# ---- the parameters


class Constraint(NamedTuple):
    """A rule for the text of a reply: the parameter that gives it, and its checked value."""

    parameter: str
    value: str | tuple[str, ...]


@explained
@described
@dataclass(frozen=True)
class SamplingParams:
    """Say how a reply is sampled and when it ends; raises InvalidInput, with the allowed range, for a wrong value.

    The defaults sample from the model's own distribution: temperature 1, no filter. Temperature 0 is greedy, and then
    top_k, top_p, min_p and seed have no effect. The parameters apply in this order: penalties, logit_bias, min_tokens,
    bad_words, custom logits processors, temperature, top_k, top_p, min_p.

    A beam search (`beam_width` > 1) draws nothing: temperature, top_k, top_p, min_p and seed have no effect. It returns
    all its beams, so `n` is 1, and its replies have no constraint.

    At most one of json_schema, regex, grammar and choice is given; they need the extra radixkv[grammar].
    """

    max_tokens: int = parameter(
        256,
        Integer(low=1),
        "maximum length of the reply, >= 1",
        on_wire=False,
        example=3,
    )
    min_tokens: int = parameter(
        0,
        Integer(low=0),
        "minimum length: no stop token is sampled before, and no stop string that is complete before it ends "
        "the reply, 0 <= min_tokens <= max_tokens",
        adjusts_logits=True,
        example=4,
    )
    temperature: float = parameter(
        1.0,
        Number(low=0, wire_high=2),
        "divides the logits, >= 0; below 0.01 sampling is nearly greedy",
        column=Column("float32", lambda value: min(max(value, TEMPERATURES[0]), TEMPERATURES[1])),
        example=0.0,
    )
    top_k: int = parameter(
        0,
        Integer(low=-1),
        "keep the k most likely tokens, and tokens that tie with the last; 0 or -1: all, 1: greedy",
        column=Column("int64", lambda value: min(max(value, 0), LARGEST_TOP_K), filters=True),
        example=1,
    )
    top_p: float = parameter(
        1.0,
        Number(low=0, high=1, above=True),
        "of these, keep the smallest set with this total probability, 0 < top_p <= 1",
        column=Column("float64", filters=True),
        example=0.01,
    )
    min_p: float = parameter(
        0.0,
        Number(low=0, high=1),
        "drop tokens less likely than min_p times the most likely one, 0 <= min_p <= 1",
        column=Column("float32", lambda value: math.log(value) if value else -math.inf, filters=True),
        example=1.0,
    )
    repetition_penalty: float = parameter(
        1.0,
        Number(low=0.01, high=100),
        "divides positive and multiplies negative logits of the tokens of prompt and reply, 0.01..100",
        adjusts_logits=True,
        column=Column("float64"),
        example=100.0,
    )
    presence_penalty: float = parameter(
        0.0,
        Number(low=-2, high=2),
        "subtracted once from the logit of each token that occurs in the reply, -2..2",
        adjusts_logits=True,
        column=Column("float32"),
        example=2.0,
    )
    frequency_penalty: float = parameter(
        0.0,
        Number(low=-2, high=2),
        "subtracted for each occurrence of a token in the reply, -2..2",
        adjusts_logits=True,
        column=Column("float32"),
        example=2.0,
    )
    logit_bias: Mapping[int, float] = parameter(
        dict,
        TokenBias(low=-100, high=100),
        "token id -> number added to its logit, -100..100",
        adjusts_logits=True,
        example={5: 100.0},
    )
    seed: int | None = parameter(
        None,
        Integer(optional=True),
        "an int: the same seed gives the same reply, in any batch; None: the engine's seed",
        example=4,
    )
    stop: Sequence[str] = parameter(
        (),
        Texts(wire_most=16, wire_longest=4096),
        "strings that end the reply, and are not part of it",
        example=(" ",),
    )
    stop_token_ids: Sequence[int] = parameter(
        (),
        TokenIds(),
        "additional token ids that end the reply",
        example=(5,),
    )
    ignore_eos: bool = parameter(
        False,
        Switch(),
        "continue after the model's own stop tokens",
        example=True,
    )
    n: int = parameter(
        1,
        Integer(low=1, wire_high=128),
        "number of replies to one prompt, >= 1",
        example=2,
    )
    logprobs: int | None = parameter(
        None,
        Integer(low=0, high=100, optional=True, wire_high=20),
        "number of most likely tokens whose log probabilities are returned at each position, in addition to "
        "the sampled token's; 0..100, None: no log probabilities. They belong to the model's distribution, "
        "before any parameter above changes it",
        on_wire=False,
        example=1,
    )
    prompt_logprobs: int | None = parameter(
        None,
        Integer(low=0, high=100, optional=True, wire_high=20),
        "as logprobs, for each token of the prompt after the first; needs the logits of the whole prompt",
        on_wire=False,
        example=1,
    )
    bad_words: Sequence[str] = parameter(
        (),
        Texts(wire_most=1024, wire_longest=256),
        "texts that a reply does not contain, as far as their tokens are concerned",
        adjusts_logits=True,
        example=(" The",),
    )
    beam_width: int = parameter(
        1,
        Integer(low=1, wire_high=128),
        "number of beams, >= 1; 1: no beam search",
        on_wire=False,
        example=2,
    )
    length_penalty: float = parameter(
        1.0,
        Number(low=-10, high=10),
        "a beam's score is the sum of its log probabilities over its length to this power, -10..10; has a "
        "meaning only for a beam search",
        example=-5.0,
    )
    early_stopping: bool | str = parameter(
        False,
        EarlyStopping(),
        "True: stop once beam_width beams are complete; False: once no beam is likely to improve; 'never': "
        "once no beam can improve, for a length_penalty > 0",
        example=True,
    )
    speculate: bool = parameter(
        True,
        Switch(),
        "whether an engine that speculates drafts tokens of the reply; it is the same with and without",
        inert="a reply is the same with and without drafts",
    )
    prediction: str = parameter(
        "",
        Prediction(),
        "text that the reply may repeat, from which such an engine drafts; '': none",
        on_wire=False,
        inert="a reply is the same with and without drafts",
    )
    extra_args: Mapping[str, Any] = parameter(
        dict,
        Named(),
        "name -> value, for the engine's custom logits processors",
        on_wire=False,
        inert="only custom processors read it",
    )
    json_schema: Mapping[str, Any] | str | bool | None = parameter(
        None,
        JsonSchema(optional=True, most=LONGEST_CONSTRAINT),
        "the reply is a JSON value that this schema allows: a mapping, its JSON text, or True for any",
        on_wire=False,
        example=True,
    )
    regex: str | None = parameter(
        None,
        Text(optional=True, most=LONGEST_REGEX),
        "the whole reply matches this regular expression",
        on_wire=False,
        example="[0-9]+",
    )
    grammar: str | None = parameter(
        None,
        Text(optional=True, most=LONGEST_CONSTRAINT),
        "the reply follows this grammar, in Lark's notation as llguidance reads it, or in GBNF",
        on_wire=False,
        example='start: "a"',
    )
    choice: Sequence[str] = parameter(
        (),
        Texts(most=MOST_CHOICES, longest=LONGEST_CONSTRAINT),
        "the reply is one of these texts",
        on_wire=False,
        example=("yes", "no"),
    )

    def __post_init__(self) -> None:
        """Check every parameter, and copy the containers, which the caller could change later."""
        check(self)
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
    def numbers(self) -> tuple[float, ...]:
        """The number of each of `columns`, in their order."""
        found = columns(type(self)).items()  # type: ignore[arg-type]
        return tuple(column.number(getattr(self, name)) for name, column in found)

    @cached_property
    def filtered(self) -> bool:
        """Whether a filter may leave out tokens before one is drawn."""
        found = columns(type(self)).values()  # type: ignore[arg-type]
        pairs = zip(found, self.numbers, type(self)().numbers, strict=True)
        return any(column.filters and number != default for column, number, default in pairs)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether a logits processor must change the logits before sampling."""
        default = type(self)()
        declared = parameters(type(self))  # type: ignore[arg-type]  # the hash of a frozen dataclass
        names = [name for name, each in declared.items() if each.adjusts_logits]
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


@cache
def parameters(cls: type[SamplingParams]) -> Mapping[str, Parameter]:
    """Return the declarations of all sampling parameters, by name."""
    return {each.name: each.metadata["parameter"] for each in fields(cls)}


@cache
def columns(cls: type[SamplingParams]) -> Mapping[str, Column]:
    """Return the columns of a batch by the names of their parameters."""
    declared = parameters(cls).items()  # type: ignore[arg-type]  # as above
    return {name: each.column for name, each in declared if each.column is not None}


def checked_params(params: object, default: SamplingParams | None = None) -> SamplingParams:
    """Return `params`, or `default` for None; raise InvalidInput for another type."""
    if params is None:
        return default or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidInput(f"params must be SamplingParams(...) or None, got {params!r:.100}")
    return params


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
