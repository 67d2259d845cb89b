"""Define the options of `radixkv-monitor`, the combinations that are wrong usage, and the exit statuses.

Options are added group by group. A wrong combination is an entry of `RULES`, and a status one of `EXIT_STATUSES`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

OK, FAILED, MISUSED, THRESHOLD, DAMAGED, INTERRUPTED = 0, 1, 2, 3, 4, 130

EXIT_STATUSES: dict[int, str] = {
    OK: "success",
    FAILED: "a failure, reported in one line",
    MISUSED: "wrong usage",
    THRESHOLD: "the verdict reached the level of --fail-on",
    DAMAGED: "the recording is damaged or cut; its whole part was used",
    INTERRUPTED: "Ctrl-C without a screen",
}
"""The exit statuses and their meaning. A signal ends the command with 128 plus its number, as in a shell."""

VIEW_NAMES = ("overview", "tree", "pool", "sessions", "evictions", "requests", "latency")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all options."""
    statuses = "\n".join(f"  {status:<5}{meaning}" for status, meaning in EXIT_STATUSES.items())
    made = argparse.ArgumentParser(
        prog="radixkv-monitor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show a running engine: its radix tree and block pool, requests, hits, misses and evictions.",
        epilog="Without a target, attach to the engine on this machine, or ask which one. Commands change an engine "
        "only if it was loaded with monitor='rw', and after a confirmation."
        f"\n\nexit status:\n{statuses}",
    )
    for add in (_add_sources, _add_screen, _add_summary, _add_alerts, _add_others):
        add(made)
    return made


def _add_sources(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("source")
    group.add_argument(
        "target", nargs="?", metavar="TARGET", help="a process id, a socket, tcp://HOST:PORT, or a recording"
    )
    group.add_argument("--demo", action="store_true", help="play a recording of eight agents; needs no engine")
    group.add_argument("--replay", metavar="FILE", type=Path, help="play a recording")
    group.add_argument(
        "--token", default="", help="the token of an engine at tcp://; not needed on the engine's own machine"
    )


def _add_screen(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("screen")
    group.add_argument("--record", metavar="FILE", type=Path, help="record to a new file from the first state on")
    group.add_argument("--view", choices=VIEW_NAMES, default="overview", help="the view to start with")
    group.add_argument("--sort", metavar="NAME", help="sort the views by this column or order")
    group.add_argument(
        "--read-only", action="store_true", help="offer no commands, also for an engine with monitor='rw'"
    )
    group.add_argument("--theme", choices=("dark", "light"), default="dark", help="the theme to start with")


def _add_summary(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("summary")
    group.add_argument("--once", action="store_true", help="print a summary and exit")
    group.add_argument("--json", action="store_true", help="with --once or --watch: print JSON")
    group.add_argument(
        "--for",
        dest="seconds",
        metavar="SECONDS",
        type=seconds,
        help="with --once: watch a live engine for this time first, so that there are rates (default 2)",
    )


def _add_alerts(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("alerts")
    group.add_argument(
        "--fail-on",
        metavar="LEVEL",
        choices=("warn", "bad"),
        help="with --once or --watch: exit with status 3 if the verdict is at least this: warn or bad",
    )
    group.add_argument(
        "--watch", action="store_true", help="without a screen: print a line whenever the verdict changes its level"
    )
    group.add_argument(
        "--alerts", metavar="FILE", type=Path, help="a TOML file of thresholds and alerts, in place of the user's own"
    )
    group.add_argument("--bell", action="store_true", help="ring the terminal's bell when the level changes")


def _add_others(made: argparse.ArgumentParser) -> None:
    made.add_argument("--log", metavar="FILE", type=Path, help="write a log to this file; otherwise nothing is logged")
    made.add_argument("--version", action="version", version=f"radixkv {version('radixkv')}")


def seconds(text: str) -> float:
    """Parse a time of at least 0 seconds. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, such as 2 or 0.5")
    return value


def named_sources(given: argparse.Namespace) -> list[object]:
    """Return the sources that the options name; more than one is wrong usage."""
    return [each for each in (given.target, given.replay, given.demo or None) if each is not None]


RULES: tuple[tuple[Callable[[argparse.Namespace], object], str], ...] = (
    (lambda given: len(named_sources(given)) > 1, "a target, --replay and --demo exclude each other: give one of them"),
    (
        lambda given: given.watch and given.once,
        "--watch and --once exclude each other: give one of them",
    ),
    (lambda given: given.json and not (given.once or given.watch), "--json goes with --once or --watch"),
    (lambda given: given.fail_on and not (given.once or given.watch), "--fail-on goes with --once or --watch"),
    (
        lambda given: given.once and given.bell,
        "--bell goes with the screen or --watch",
    ),
    (lambda given: given.watch and given.replay, "--watch goes with a running engine: read a recording with --once"),
    (lambda given: given.watch and given.record, "--record goes with the screen, not with --watch"),
    (lambda given: given.seconds is not None and not given.once, "--for goes with --once"),
    (
        lambda given: given.record is not None and given.record.exists(),
        "{record} is there already: name a new file to record to",
    ),
)
"""Tests of wrong combinations, and the message for each. `{name}` in a message is the value of that option."""


def complaint(given: argparse.Namespace) -> str:
    """Return the message of the first broken rule; empty if there is none."""
    return next((message.format_map(vars(given)) for broken, message in RULES if broken(given)), "")
