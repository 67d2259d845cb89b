"""Check in a test of an application that a server found most of a prompt in its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidInput

_MISS = "x-radixkv-miss"


def assert_cached(response: object, at_least: float = 0.9) -> None:
    """Raise AssertionError if less than the share `at_least` of a prompt was cached, by the usage that a server reports.

    `response` is a response of the SDKs of OpenAI (chat completions, Responses) or Anthropic (messages), or its JSON as
    a dict, from any server. A response of `with_raw_response` has headers too: then the error names the changed part of
    the prompt, if the server is radixkv's. Raises InvalidInput if the response does not report cached tokens.

    >>> usage = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 192}}
    >>> assert_cached({"usage": usage})
    >>> assert_cached({"usage": usage}, at_least=0.99)
    Traceback (most recent call last):
    AssertionError: 192 of 200 prompt tokens (96.0%) were cached, and at least 99.0% must be
    """
    if isinstance(at_least, bool) or not isinstance(at_least, int | float) or not 0 <= at_least <= 1:
        raise InvalidInput(f"at_least must be a number from 0 to 1, got {at_least!r}")
    cached, total = _tokens(response)
    if cached < at_least * total:
        part = _changed_part(response)
        why = f"; the first part that changed is {part}" if part else ""
        bar = f"at least {at_least:.1%} must be"
        raise AssertionError(f"{cached:,} of {total:,} prompt tokens ({cached / total:.1%}) were cached, and {bar}{why}")


def _tokens(response: object) -> tuple[int, int]:
    """Return the cached and all tokens of a prompt. Raises InvalidInput."""
    usage = _get(_parsed(response), "usage")
    for name in ("prompt_tokens", "input_tokens"):  # of OpenAI's chat completions, and of its Responses
        details = _get(usage, f"{name}_details")
        if details is not None:
            cached, total = _count(_get(details, "cached_tokens")), _count(_get(usage, name))
            break
    else:
        written = _get(usage, "cache_creation_input_tokens") or 0
        cached = _count(_get(usage, "cache_read_input_tokens"))
        total = cached + _count(written) + _count(_get(usage, "input_tokens"))
    if not 0 <= cached <= total or not total:
        raise InvalidInput(f"the response reports {cached} cached tokens of {total} prompt tokens")
    return cached, total


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(
            "the response does not report how many prompt tokens were cached (usage.prompt_tokens_details, "
            "usage.input_tokens_details, or usage.cache_read_input_tokens): is this option of the server off?"
        )
    return value


def _parsed(response: object) -> object:
    """Return the response of an SDK from one with headers."""
    parse = getattr(response, "parse", None)
    return parse() if callable(parse) and hasattr(response, "headers") else response


def _changed_part(response: object) -> str | None:
    headers: Any = getattr(response, "headers", None)
    return None if headers is None else headers.get(_MISS)


def _get(value: Any, name: str) -> Any:
    """Return a field of an object or a dict, None without one."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
