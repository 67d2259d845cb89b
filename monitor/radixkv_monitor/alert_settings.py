"""The thresholds of the verdict, and the settings of alerts: read them from a TOML file.

Thresholds are the numbers from which on a state of the engine is a warning. Other settings say how a change of its
level is notified. Every key is optional. An unknown key or a wrong value is refused with the name of the key and the
allowed ones.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.removed import refuse_removed
from radixkv.settings.declared import described, kinds, setting
from radixkv.settings.kinds import Flag, Integer, Kind, Number, Rule
from radixkv.sizing.kv_size import size_text

UNCONDITIONAL = ("crashed", "differing", "disk", "host", "silent", "stale")
"""The reasons of a verdict that have no threshold: the engine crashed, audited blocks differ, the disk cache had
faults, transfers to or from the host failed, the engine sends nothing, or it cannot be reached.
"""

MAX_BYTES = 1 << 20
"""The largest settings file. A larger file is another kind of file, or a device without an end."""


# ---- kinds of values; the message is what a wrong value is not


class _Reasons(Kind):
    """Take a list of names of reasons."""

    def checked(self, name: str, value: Any) -> frozenset[str]:
        """See Kind."""
        known = [*kinds(Thresholds), *UNCONDITIONAL]
        if not isinstance(value, list) or not all(each in known for each in value):
            raise InvalidInput(f"a list of these names: {', '.join(known)}")
        return frozenset(value)


_SHARE = Number(low=0, high=1, above=True, optional=True, message="a share above 0.0 and up to 1.0, or false")
_SECONDS = Number(low=0, above=True, optional=True, message="a time above 0 seconds, or false")
_COUNT = Integer(low=0, optional=True, message="a whole number of at least 0, or false")


# ---- the settings


@described
@dataclass(frozen=True, slots=True)
class Thresholds:
    """Upper bounds, except `hit_rate`, a lower one. None switches a check off.

    Rates, percentiles and `failed` are of the last minute.
    """

    held: float | None = setting(0.95, _SHARE, "share of the pool's blocks that requests and pins hold")
    regret: float | None = setting(0.05, _SHARE, "share of the requested tokens that had been evicted")
    longest_wait: float | None = setting(10.0, _SECONDS, "time of the oldest request that is not admitted")
    preemptions: int | None = setting(0, _COUNT, "preemptions above which the verdict is warn")
    failed: int | None = setting(0, _COUNT, "failed requests above which the verdict is bad")
    timed_out: int | None = setting(0, _COUNT, "requests that timed out above which the verdict is warn")
    hit_rate: float | None = setting(None, _SHARE, "hits per requested token")
    ttft_p50: float | None = setting(None, _SECONDS, "median of the times to the first token")
    ttft_p90: float | None = setting(5.0, _SECONDS, "90th percentile of these times")
    ttft_p99: float | None = setting(None, _SECONDS, "99th percentile of these times")
    queue_time_p90: float | None = setting(2.0, _SECONDS, "90th percentile of the times until admission")
    itl_p50: float | None = setting(None, _SECONDS, "median of the times between two tokens")
    itl_p90: float | None = setting(None, _SECONDS, "90th percentile of these times")
    itl_p99: float | None = setting(None, _SECONDS, "99th percentile of these times")
    telemetry_share: float | None = setting(None, _SHARE, "share of the time that telemetry takes")


DEFAULTS = Thresholds()
"""The thresholds of a monitor without a file of its own."""


@described
@dataclass(frozen=True, slots=True)
class AlertSettings:
    """The thresholds of the verdict, and the reactions to a change of its level."""

    thresholds: Thresholds = field(default=DEFAULTS, metadata={"help": "see Thresholds"})
    bell: bool = setting(False, Flag(message="true or false"), "whether to ring the bell of the terminal")
    after: float = setting(
        5.0, Number(low=0, message="a time of at least 0 seconds"), "seconds for which a level must hold to count"
    )
    ignore: frozenset[str] = setting(
        frozenset(), _Reasons(), "names of reasons that never alert; the screens still show them"
    )


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
        return parse_settings(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}; correct it, or name another file with --alerts") from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error


def parse_settings(text: str) -> AlertSettings:
    """Parse the text of a settings file.

    Raises TOMLDecodeError for text that is not TOML, and InvalidInput for unknown keys and wrong values.

    >>> parse_settings("[notify]\\nbell = true\\nafter = 30").after
    30
    """
    tables = _table(tomllib.loads(text), "", {"thresholds": _TABLE, "notify": _TABLE})
    thresholds = _table(tables.get("thresholds", {}), "thresholds.", kinds(Thresholds))
    notify = _table(tables.get("notify", {}), "notify.", kinds(AlertSettings))
    return AlertSettings(Thresholds(**thresholds), **notify)


_TABLE = Rule(test=lambda value: isinstance(value, dict), message="a table")


def _table(given: Mapping[str, Any], prefix: str, allowed: Mapping[str, Kind]) -> dict[str, Any]:
    """Check the values of a table; false stands for None. Raises InvalidInput for unknown keys and wrong values."""
    made = {}
    for key, value in given.items():
        if key not in allowed:
            refuse_removed([prefix + key, key])
            raise InvalidInput(f"the key {prefix}{key} is unknown; allowed are {', '.join(allowed)}")
        kind = allowed[key]
        try:
            made[key] = kind.checked(key, None if value is False and kind.optional else value)
        except InvalidInput as error:
            raise InvalidInput(f"{prefix}{key} = {_written(value)} is not {error}") from None
    return made


def _written(value: Any) -> str:
    """Write a value almost as in the file, shortened."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
