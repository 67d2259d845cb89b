"""Read sampling parameters from HTTP bodies, each by its declaration in `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.sampling.params import (
    INT64,
    EarlyStopping,
    Flag,
    Integer,
    Number,
    Parameter,
    SamplingParams,
    Texts,
    TokenBias,
    TokenIds,
    parameters,
)
from radixkv.serve.constraints import ReplyConstraint
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields

OF_BEAMS = ("length_penalty", "early_stopping")
"""Parameters that have a meaning only with `use_beam_search`."""


def wire_range(name: str, *, low: int | None = None) -> tuple[int, int]:
    """Return the range of an integer parameter for HTTP clients, from `low` on if that is given."""
    declared = parameters(SamplingParams)[name]
    assert isinstance(declared, Integer)
    least, most = declared.wire
    return least if low is None else low, most


def sampling_params(
    fields: Fields,
    bound: int | None,
    logprobs: int | None,
    *,
    renamed: Mapping[str, str] = MappingProxyType({}),
    constraint: ReplyConstraint | None = None,
    prompt_logprobs: int | None = None,
    beams: bool = False,
) -> SamplingParams:
    """Read the sampling parameters, each from the field of its name or of its name in `renamed`; raise ApiError.

    The other arguments were read before. With `beams`, `n` is the number of beams, and one beam is greedy decoding.
    """
    declarations = parameters(SamplingParams)
    fields_of = {name: renamed.get(name, name) for name, declared in declarations.items() if declared.on_wire}
    given = {name: _read(fields, field, declarations[name]) for name, field in fields_of.items()}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        try:
            declarations[name].checked(name, value)
        except InvalidInput as error:
            raise bad_request(str(error), fields.path(fields_of[name]), "invalid_value") from error
    if beams:
        width = given.pop("n", 1)
        given |= {"beam_width": width} if width > 1 else {"temperature": 0}
        if constraint is not None and width > 1:
            fields.refuse("use_beam_search", f"cannot be combined with {constraint.field}: beams have no constraint")
    else:
        _ignore_what_needs_beams(fields, given)
    if constraint is not None:
        given[constraint.parameter] = constraint.value
    most = INT64[1] if bound is None else bound
    try:
        return SamplingParams(max_tokens=most, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    except InvalidInput as error:
        # Each parameter alone is valid, so the error compares min_tokens with max_tokens.
        raise bad_request(str(error), fields.path("min_tokens"), "invalid_value") from error


def _ignore_what_needs_beams(fields: Fields, given: Mapping[str, Any]) -> None:
    default = SamplingParams()
    for name in OF_BEAMS:
        if name in given and given[name] != getattr(default, name):
            fields.has_no_effect(name, "has a meaning only with use_beam_search=true")


def _read(fields: Fields, name: str, declared: Parameter) -> Any:
    """Read a parameter's field, with its JSON type and its range for HTTP clients."""
    match declared:
        case Integer():
            return fields.integer(name, *declared.wire)
        case Number():
            return fields.number(name, *declared.wire)
        case TokenBias():
            return _bias(fields, name, declared)
        case Texts():
            return _texts(fields, name, declared)
        case TokenIds():
            return _token_ids(fields, name)
        case Flag():
            return fields.flag(name)
        case EarlyStopping():
            return fields.take(name)  # `checked` names the allowed values
    raise AssertionError(f"{name} is of a kind that no client can send")


def _bias(fields: Fields, name: str, declared: TokenBias) -> dict[int, float] | None:
    given = fields.take(name)
    if given is None:
        return None
    if not isinstance(given, dict):
        fields.wrong(name, "an object of token ids and numbers", given)
    if not all(token.isascii() and token.isdecimal() and len(token) <= 10 for token in given):
        limits = f"from {declared.low:g} to {declared.high:g}"
        fields.refuse(name, f'must map token ids, such as "42", to numbers {limits}')
    return {int(token): value for token, value in given.items()}


def _texts(fields: Fields, name: str, declared: Texts) -> list[str] | None:
    given = fields.take(name)
    texts = [given] if isinstance(given, str) else given
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        fields.refuse(name, "must be a string or an array of strings, none of them empty")
    if len(texts) > declared.wire_most:
        fields.refuse(name, f"must be at most {declared.wire_most} strings")
    if any(len(text) > declared.wire_longest for text in texts):
        fields.refuse(name, f"must be strings of at most {declared.wire_longest} characters")
    return texts


def _token_ids(fields: Fields, name: str) -> list[int] | None:
    given = fields.list(name)
    if given is not None and not are_token_ids(given):
        fields.refuse(name, "must be an array of token ids")
    return given


def are_token_ids(values: Sequence[Any]) -> bool:
    """Whether all values are possible token ids: whole numbers from 0."""
    return all(type(value) is int and 0 <= value < 2**31 for value in values)
