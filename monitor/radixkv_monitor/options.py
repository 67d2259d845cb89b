"""Define the options of `radixkv-monitor`, the combinations that are wrong usage, and the exit statuses.

Options are added group by group. A wrong combination is an entry of `RULES`, and a status one of `EXIT_STATUSES`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from radixkv.server_settings import is_loopback

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
    for add in (_add_sources, _add_screen, _add_summary, _add_report, _add_web, _add_alerts, _add_others):
        add(made)
    return made


def _add_sources(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("source")
    group.add_argument(
        "target", nargs="?", metavar="TARGET", help="a process id, a socket, tcp://HOST:PORT, or a recording"
    )
    group.add_argument("--demo", action="store_true", help="show a made-up workload over a real cache; needs no engine")
    group.add_argument(
        "--host-blocks", metavar="N", type=int, default=0, help="with --demo: add a host tier of N blocks (of 2 MiB)"
    )
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
        help="with --once and --report: watch a live engine for this time first, so that there are rates (default 2, "
        "and 10 for a report)",
    )


def _add_report(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("report")
    group.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write one HTML file about a recording, or about a live engine that is watched for --for SECONDS: "
        "verdicts over time, numbers, charts, screens, regrets",
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
    group.add_argument("--notify", action="store_true", help="show a desktop notification then (OSC 9)")
    group.add_argument("--verdict-log", metavar="FILE", type=Path, help="append a JSON line to this file then")


def _add_web(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("browser")
    group.add_argument(
        "--web",
        action="store_true",
        help="show the same screens in a browser on this machine, read-only; needs radixkv[web]",
    )
    group.add_argument("--host", default="127.0.0.1", help="with --web: an address of this machine (default 127.0.0.1)")
    group.add_argument("--port", type=port, default=8000, help="with --web: the port (default 8000); 0: any free port")


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


def port(text: str) -> int:
    """Parse a number of a port. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to 65535")
    return int(text)


def named_sources(given: argparse.Namespace) -> list[object]:
    """Return the sources that the options name; more than one is wrong usage."""
    return [each for each in (given.target, given.replay, given.demo or None) if each is not None]


def for_page(given: argparse.Namespace) -> list[str]:
    """Return the options of a read-only app that shows the same source and view in a browser."""
    plain = ("view", "sort", "theme", "replay", "token", "alerts")
    named = [word for name in plain if (value := getattr(given, name)) for word in (f"--{name}", str(value))]
    demo = ["--demo", "--host-blocks", str(given.host_blocks)] if given.demo else []
    return ["--read-only", *named, *demo, *(["--", given.target] if given.target is not None else [])]


RULES: tuple[tuple[Callable[[argparse.Namespace], object], str], ...] = (
    (lambda given: len(named_sources(given)) > 1, "a target, --replay and --demo exclude each other: give one of them"),
    (
        lambda given: given.host_blocks and not (given.demo and given.host_blocks > 0),
        "--host-blocks goes with --demo, and is a number above 0",
    ),
    (
        lambda given: sum(map(bool, (given.watch, given.once, given.report, given.web))) > 1,
        "--watch, --once, --report and --web exclude each other: give one of them",
    ),
    (lambda given: given.json and not (given.once or given.watch), "--json goes with --once or --watch"),
    (lambda given: given.fail_on and not (given.once or given.watch), "--fail-on goes with --once or --watch"),
    (
        lambda given: (given.once or given.report or given.web) and (given.bell or given.notify or given.verdict_log),
        "--bell, --notify and --verdict-log go with the screen or --watch",
    ),
    (lambda given: given.watch and given.replay, "--watch goes with a running engine: read a recording with --once"),
    (lambda given: given.watch and given.record, "--record goes with the screen, not with --watch"),
    (
        lambda given: given.web and not is_loopback(given.host),
        "{host} may be reached from other machines, which would get the token in clear text: keep 127.0.0.1 and use a "
        "tunnel, such as ssh -L 8000:127.0.0.1:8000 HOST",
    ),
    (lambda given: given.web and given.record, "--record writes files of a terminal's app only: leave out --web"),
    (
        lambda given: given.seconds is not None and not (given.once or given.report),
        "--for goes with --once or --report",
    ),
    (
        lambda given: given.report and (given.report.exists() or given.report.is_symlink()),
        "{report} is there already: name a new file for the report",
    ),
    (
        lambda given: given.report and not given.report.absolute().parent.is_dir(),
        "{report} cannot be written: its folder does not exist. Create the folder first",
    ),
    (
        lambda given: given.record is not None and given.record.exists(),
        "{record} is there already: name a new file to record to",
    ),
)
"""Tests of wrong combinations, and the message for each. `{name}` in a message is the value of that option."""


def complaint(given: argparse.Namespace) -> str:
    """Return the message of the first broken rule; empty if there is none."""
    return next((message.format_map(vars(given)) for broken, message in RULES if broken(given)), "")
