"""Check in a test of an application that a server found most of a prompt in its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidInput


def assert_cached(response: object, at_least: float = 0.9) -> None:
    """Raise AssertionError if a server reports that less than the share `at_least` of a prompt was cached.

    `response` is from the SDK of OpenAI (chat completions, Responses) or of Anthropic, or its JSON as a dict; of a
    stream, it is the chunk with the usage. If the server is radixkv's, and the response is from `with_raw_response`,
    the error names the part that changed.
    Raises InvalidInput if the response does not report cached tokens.

    >>> usage = {"prompt_tokens": 200, "prompt_tokens_details": {"cached_tokens": 192}}
    >>> assert_cached({"usage": usage})
    >>> assert_cached({"usage": usage}, at_least=0.99)
    Traceback (most recent call last):
    AssertionError: 192 of 200 prompt tokens (96.0%) were cached, and at least 99.0% must be
    """
    if isinstance(at_least, bool) or not isinstance(at_least, int | float) or not 0 <= at_least <= 1:
        raise InvalidInput(f"at_least must be a number from 0 to 1, got {at_least!r}")
    headers: Any = getattr(response, "headers", None)
    parsed = response if headers is None else getattr(response, "parse", lambda: response)()
    cached, total = _tokens(_get(parsed, "usage"))
    if cached / total < at_least:
        part = None if headers is None else headers.get("x-radixkv-miss")
        bar = f"at least {at_least:.1%} must be" + (f"; the first part that changed is {part}" if part else "")
        raise AssertionError(f"{cached:,} of {total:,} prompt tokens ({cached / total:.1%}) were cached, and {bar}")


def _tokens(usage: object) -> tuple[int, int]:
    """Return the cached and all tokens of a prompt. Raises InvalidInput."""
    for name in ("prompt_tokens", "input_tokens"):  # of OpenAI's chat completions, and of its Responses
        details = _get(usage, f"{name}_details")
        if details is not None:
            counts = [_get(details, "cached_tokens"), _get(usage, name)]
            break
    else:  # Anthropic's other counts are without the cached tokens
        cached, new = (_get(usage, name) for name in ("cache_read_input_tokens", "input_tokens"))
        written = _get(usage, "cache_creation_input_tokens") or 0
        counts = [cached, None if None in (cached, new) else cached + new + written]
    if not all(type(count) is int for count in counts) or not 0 <= counts[0] <= counts[1] > 0:
        raise InvalidInput(
            f"the response reports {counts[0]} cached tokens of {counts[1]} prompt tokens, in prompt_tokens_details, "
            "input_tokens_details or cache_read_input_tokens of its usage: is an option of the server off, or is it a "
            "stream?"
        )
    return counts[0], counts[1]


def _get(value: Any, name: str) -> Any:
    """Return a field of an object or a dict, None without one."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
