"""Read durations as Ollama writes them."""

from __future__ import annotations

import math
import re

from radixkv.errors import InvalidInput

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_LONGEST = 1e9  # seconds, some 30 years


def parse_duration(value: str | float, name: str = "keep_alive") -> float:
    """Return the seconds of a number, or of a text such as 90s, 5m or 1h30m; a negative duration is infinite.

    Raises InvalidInput, which begins with `name`.

    >>> [parse_duration(value) for value in ("5m", "1h30m", "90", 30, -1, "-1s")]
    [300.0, 5400.0, 90.0, 30.0, inf, inf]
    """
    number = value
    if isinstance(value, str):
        text = value.strip().removeprefix("-").removeprefix("+")
        parts = _PART.findall(text)
        try:
            seconds = sum(float(count) * _UNITS[unit] for count, unit in parts) if parts else float(text)
        except ValueError:
            seconds = math.nan
        if parts and "".join(map("".join, parts)) != text:
            seconds = math.nan
        number = -seconds if value.strip().startswith("-") else seconds
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not (number <= _LONGEST or number == math.inf)
    ):
        raise InvalidInput(f"{name} is a number of seconds, or a duration such as 90s, 5m or 1h30m; got {value!r:.60}")
    return math.inf if number < 0 else float(number)
