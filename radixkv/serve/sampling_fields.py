"""Declare the sampling parameters of a body, each by its declaration in `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Field, create_model

from radixkv.errors import InvalidInput
from radixkv.sampling.params import EarlyStopping, Parameter, SamplingParams, parameters
from radixkv.serve.bodies import AnyBody, Body, OneError, Only, Several, Whole, broken, refuse, without_effect
from radixkv.serve.constraints import ReplyConstraint
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import IgnoredFields
from radixkv.settings.kinds import INT64, Flag, Integer, Kind, Number, Texts, TokenBias, TokenIds

OF_BEAMS = ("length_penalty", "early_stopping")
"""Parameters that have a meaning only with `use_beam_search`."""

MOST_TOKEN = 2**31 - 1
MOST_IDS = 10_000  # of `logit_bias` and of `stop_token_ids`
LONGEST_TEXTS = 2**16  # characters of all stop strings or bad words together: bad words take 0.4 s to encode
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKEN)]


def wire(name: str, *, low: int | None = None) -> Whole:
    """Return the range of an integer parameter for HTTP clients, from `low` on if that is given."""
    kind = parameters(SamplingParams)[name].kind
    assert isinstance(kind, Integer)
    least, most = kind.wire
    return Whole(least if low is None else low, most)


def with_sampling(
    renamed: Mapping[str, str] = MappingProxyType({}), without: str = ""
) -> Callable[[type[AnyBody]], type[AnyBody]]:
    """Return a decorator that adds a field for each sampling parameter but `without`; `renamed` maps some to fields."""
    declared = {each: it for each, it in parameters(SamplingParams).items() if it.on_wire and each != without}
    others = [each for each in declared if each not in (*_FIRST, *_LAST)]
    order = [each for each in (*_FIRST, *others, *_LAST) if each in declared]
    fields = {renamed.get(each, each): _field(declared[each]) for each in order}
    return lambda model: create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


# The order in the document: these first and last, the others between them as declared.
_FIRST, _LAST = ("n", "temperature", "top_p"), ("min_tokens", "ignore_eos")


def _field(declared: Parameter) -> Any:
    """Return the optional type of a parameter with its range for HTTP clients, and its default."""
    return Union[_type(declared.kind), None], Field(default=None, description=declared.help)  # noqa: UP007


def _type(declared: Kind) -> Any:
    match declared:
        case Flag():
            return bool
        case TokenBias():
            return _bias(declared)
        case Integer():
            return Annotated[int, Whole(*declared.wire)]
        case Number():
            low, high = declared.wire
            least: Any = {"gt": low} if declared.above else {"ge": low}
            return Annotated[float, Field(le=high, **least)]
        case TokenIds():
            return Annotated[
                Annotated[Several[TokenId], Field(max_length=MOST_IDS)],
                OneError(f"must be an array of at most {MOST_IDS} token ids", "an array"),
            ]
        case Texts():
            return _texts(declared)
        case EarlyStopping():
            return Annotated[Any, Only(True, False, "never", why="it says when a search ends")]
    raise AssertionError(f"no client can send {declared}")


def _bias(declared: TokenBias) -> Any:
    token = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
    bias = Annotated[float, Field(ge=declared.low, le=declared.high)]
    why = f'must map at most {MOST_IDS} token ids, such as "42", to numbers from {declared.low:g} to {declared.high:g}'
    closed = Field(json_schema_extra={"additionalProperties": False})
    return Annotated[
        Annotated[dict[token, bias], Field(max_length=MOST_IDS)],
        OneError(why, "an object"),
        AfterValidator(lambda given: {int(token): value for token, value in given.items()}),
        closed,
    ]


def _texts(declared: Texts) -> Any:
    most, longest = declared.wire_most, declared.wire_longest
    text = Annotated[str, Field(max_length=longest)]  # an empty one is none
    texts = Annotated[Several[Annotated[text, Field(min_length=1)]], Field(max_length=most)]
    why = f"must be a string or an array of at most {most} strings, each of 1 to {longest} characters"
    return Annotated[Union[text, texts], OneError(why), AfterValidator(_list)]  # noqa: UP007


def _list(texts: str | list[str]) -> list[str]:
    if (length := sum(map(len, texts))) > LONGEST_TEXTS:
        raise broken("", f"must have at most {LONGEST_TEXTS} characters in all, not {length}")
    return texts if isinstance(texts, list) else [texts] if texts else []


def sampling_params(
    body: Body,
    bound: int | None,
    ignored: IgnoredFields | None,
    *,
    logprobs: int | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    constraint: ReplyConstraint | None = None,
    prompt_logprobs: int | None = None,
    beams: bool = False,
) -> SamplingParams:
    """Return the sampling parameters of a body; raise ApiError for values that cannot be combined.

    With `beams`, `n` is the number of beams, and one beam is greedy decoding.
    """
    declared = parameters(SamplingParams)
    values = {name: vars(body).get(renamed.get(name, name)) for name, each in declared.items() if each.on_wire}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if beams:
        width = given.pop("n", 1)
        given |= {"beam_width": width} if width > 1 else {"temperature": 0}
        if constraint is not None and width > 1:
            raise refuse("use_beam_search", f"cannot be combined with {constraint.field}: beams have no constraint")
    else:
        _ignore_what_needs_beams(given, ignored)
    if constraint is not None:
        given[constraint.parameter] = constraint.value
    most = INT64[1] if bound is None else bound
    try:
        return SamplingParams(max_tokens=most, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    except InvalidInput as error:
        # Each parameter alone is valid, so the error compares min_tokens with max_tokens.
        raise bad_request(str(error), "min_tokens", "invalid_value") from error


def _ignore_what_needs_beams(given: Mapping[str, Any], ignored: IgnoredFields | None) -> None:
    default = vars(SamplingParams())
    for name in OF_BEAMS:
        if name in given and given[name] != default[name]:
            without_effect(name, "has a meaning only with use_beam_search=true", ignored)
