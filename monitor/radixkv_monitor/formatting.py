"""Format numbers for people: times, durations, counts, shares and sizes."""

from __future__ import annotations

import time


def clock(when: float) -> str:
    """Format the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def duration(seconds: float | None) -> str:
    """Format a length of time in two or three digits; None as a dash.

    >>> [duration(each) for each in (0.0123, 0.25, 3.21, 42, 200, 7300, 200000, 1e300, None)]
    ['12 ms', '250 ms', '3.2 s', '42 s', '3.3 min', '2.0 h', '2.3 d', 'ages', '-']
    """
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    for size, unit in ((60, "s"), (60, "min"), (48, "h")):
        if seconds < size:
            return f"{seconds:.0f} {unit}" if seconds >= 9.95 else f"{seconds:.1f} {unit}"
        seconds /= size if unit != "h" else 24
    return f"{seconds:.1f} d" if seconds < 10 else f"{seconds:.0f} d" if seconds < 99_999.5 else "ages"


def count(number: float) -> str:
    """Format a whole number with separators.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,.0f}"


def short(number: float | None) -> str:
    """Format a whole number in at most five characters; None as a dash.

    >>> [short(each) for each in (999, 1234, 45_600, 1_234_000, 56_000_000, 7_000_000_000, 1.5e15)]
    ['999', '1.2k', '46k', '1.2M', '56M', '7.0G', '1.5P']
    """
    if number is None:
        return "-"
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if number < 999.5 or unit == "E":
            return f"{number:.0f}{unit}" if number >= 9.95 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError


def share(part: float, whole: float) -> str:
    """Format a part in percent; a dash if the whole is 0. Only all of it is 100%, and only nothing is 0%.

    >>> share(2, 3), share(0, 0), share(9999, 10000), share(1, 10000)
    ('67%', '-', '99%', '1%')
    """
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 100:
        percent = min(max(percent, 1), 99)
    return f"{percent:.0f}%"


def size(number: float) -> str:
    """Format bytes in binary units.

    >>> size(0), size(2048), size(3 * 2**20), size(5.5 * 2**30)
    ('0 B', '2.0 KiB', '3.0 MiB', '5.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1000 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def plural(number: int, noun: str) -> str:
    """Format a number with its noun, which takes an s.

    >>> plural(1, "token"), plural(1500, "token")
    ('1 token', '1,500 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
