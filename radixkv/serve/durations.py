"""Read durations as Ollama writes them: Go's texts, such as "5m" and "1h30m", or a number of seconds."""

from __future__ import annotations

import math
import re

from radixkv.errors import InvalidInput

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{0,18})?"
_UNIT = "|".join(sorted(_UNITS, key=len, reverse=True))
DURATION = rf"^[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:{_UNIT}))+)$"
"""The pattern of the texts that `parse_duration` takes."""
RULE = 'must be a duration such as "5m" or "1h30m", or a number of seconds; -1 is for ever'


def parse_duration(value: str | float) -> float:
    """Return a duration in seconds, infinite for one below 0, which stands for no limit; raise InvalidInput.

    >>> parse_duration("1h30m"), parse_duration("1.5s"), parse_duration(300), parse_duration("0"), parse_duration(-1)
    (5400.0, 1.5, 300.0, 0.0, inf)
    """
    if isinstance(value, str):
        if re.fullmatch(DURATION, value) is None:
            raise InvalidInput(f"a duration {RULE}, not {value[:60]!r}")
        parts = re.findall(f"({_NUMBER})({_UNIT})", value)
        total = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else abs(float(value))
        value = -total if value.startswith("-") else total
    return math.inf if value < 0 else float(value)
