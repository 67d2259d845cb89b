"""The thresholds of the verdict, and the settings of alerts: read them from a TOML file.

Thresholds are the numbers from which on a state of the engine is a warning. Other settings say how a change of its
level is notified. Every key is optional. An unknown key or a wrong value is refused with the name of the key and the
allowed ones.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.removed import refuse_removed
from radixkv.sizing.kv_size import size_text


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Upper bounds, except `hit_rate`, a lower one. None switches a check off.

    Shares are 0 to 1, times in seconds. Rates, percentiles and `failed` are of the last minute. `held`: share of the
    pool's blocks that requests and pins hold. `regret`: share of the requested tokens that had been evicted.
    `longest_wait`: time of the oldest request that is not admitted. `failed`: the number of failed requests above which
    the verdict is "bad"; `timed_out` and `preemptions` are numbers above which it is "warn".
    """

    held: float | None = 0.95
    regret: float | None = 0.05
    longest_wait: float | None = 10.0
    preemptions: int | None = 0
    failed: int | None = 0
    timed_out: int | None = 0
    hit_rate: float | None = None
    ttft_p50: float | None = None
    ttft_p90: float | None = 5.0
    ttft_p99: float | None = None
    queue_time_p90: float | None = 2.0
    itl_p50: float | None = None
    itl_p90: float | None = None
    itl_p99: float | None = None
    telemetry_share: float | None = None


DEFAULTS = Thresholds()
"""The thresholds of a monitor without a file of its own."""

UNCONDITIONAL = ("crashed", "differing", "disk", "host", "silent", "stale")
"""The reasons of a verdict that have no threshold: the engine crashed, audited blocks differ, the disk cache had
faults, transfers to or from the host failed, the engine sends nothing, or it cannot be reached.
"""


MAX_BYTES = 1 << 20
"""The largest settings file. A larger file is another kind of file, or a device without an end."""

SHARES = frozenset({"held", "regret", "hit_rate", "telemetry_share"})
COUNTS = frozenset({"preemptions", "failed", "timed_out"})
"""Thresholds that are shares of 1, and whole numbers; the others are seconds."""


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """The thresholds of the verdict, and the reactions to a change of its level.

    `bell` rings the bell of the terminal. `log` is a file to which a JSON line is appended. `after`: the seconds for
    which a level must hold before it counts. `ignore`: names of reasons that never alert; the screens still show them.
    """

    thresholds: Thresholds = DEFAULTS
    bell: bool = False
    log: Path | None = None
    after: float = 5.0
    ignore: frozenset[str] = frozenset()


def default_path() -> Path:
    """Return the path of the user's settings: `radixkv/monitor.toml` in `$XDG_CONFIG_HOME`, or in `~/.config`."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if os.path.isabs(folder) else Path.home() / ".config") / "radixkv" / "monitor.toml"


def find_settings(path: Path | None) -> AlertSettings:
    """Read `path`; without one, the user's settings if that file exists. Raises InvalidInput."""
    if path is not None:
        return read_settings(path)
    try:
        path = default_path()
    except RuntimeError:  # this user has no home folder
        return AlertSettings()
    return read_settings(path) if path.exists() else AlertSettings()


def read_settings(path: Path) -> AlertSettings:
    """Read settings from a TOML file. Raises InvalidInput, which names the file, the key, and the allowed values."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; name a TOML file with --alerts") from error
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{path} has more than {size_text(MAX_BYTES)}: name a TOML file with --alerts")
    try:
        return parse_settings(data.decode("utf-8"), path.parent)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}; correct it, or name another file with --alerts") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def parse_settings(text: str, folder: Path = Path()) -> AlertSettings:
    """Parse the text of a settings file; relative paths in it start at `folder`.

    Raises TOMLDecodeError for text that is not TOML, and InvalidInput for unknown keys and wrong values.

    >>> parse_settings("[notify]\\nbell = true\\nafter = 30").after
    30.0
    """
    tables = _table(tomllib.loads(text), "", {"thresholds": _is_table, "notify": _is_table})
    notify: dict[str, Any] = _table(tables.get("notify", {}), "notify", _NOTIFY)
    if "log" in notify:
        notify["log"] = folder / notify["log"]
    thresholds = _table(tables.get("thresholds", {}), "thresholds", _THRESHOLDS)  # False switches a check off
    return AlertSettings(replace(DEFAULTS, **thresholds), **notify)


# ---- values


class _Wrong(Exception):
    """The value is not of the kind that the message names."""


def _table(given: Mapping[str, Any], name: str, allowed: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Convert the values of a table. Raises InvalidInput for an unknown key, and for a wrong value."""
    made = {}
    for key, value in given.items():
        full = f"{name}.{key}" if name else key
        if key not in allowed:
            refuse_removed([key])
            raise InvalidInput(f"the key {full} is unknown; allowed are {', '.join(allowed)}")
        try:
            made[key] = allowed[key](value)
        except _Wrong as wrong:
            raise InvalidInput(f"{full} = {_written(value)} is not {wrong}") from None
    return made


def _written(value: Any) -> str:
    """Write a value almost as in the file, shortened."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("a table")
    return value


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _number(value: Any, kind: str, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isinf(value):
        raise _Wrong(kind)
    return float(value)


def _above_zero(value: Any, kind: str, most: float = math.inf) -> float:
    """Convert a threshold; every state would cross one of 0."""
    if (number := _number(value, kind, most)) == 0:
        raise _Wrong(kind)
    return number


def _seconds(value: Any) -> float:
    return _number(value, "a time of at least 0 seconds")


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _Wrong("the path of a file")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise _Wrong("a path in a folder of a user of this machine") from error


def _names(value: Any) -> frozenset[str]:
    known = [*_THRESHOLDS, *UNCONDITIONAL]
    if not isinstance(value, list) or not all(each in known for each in value):
        raise _Wrong(f"a list of these names: {', '.join(known)}")
    return frozenset(value)


def _threshold(name: str) -> Callable[[Any], float | int | None]:
    """Return the function that converts the value of this threshold; its result for False is None."""

    def convert(value: Any) -> float | int | None:
        if value is False:
            return None
        if name in SHARES:
            return _above_zero(value, "a share above 0.0 and up to 1.0, or false", most=1.0)
        if name in COUNTS:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise _Wrong("a whole number of at least 0, or false")
            return value
        return _above_zero(value, "a time above 0 seconds, or false")

    return convert


_THRESHOLDS = {each.name: _threshold(each.name) for each in fields(Thresholds)}
_NOTIFY = {"bell": _switch, "log": _path, "after": _seconds, "ignore": _names}
