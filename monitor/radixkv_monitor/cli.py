"""Run `radixkv-monitor`: turn options into a feed and an output, and errors into one line and an exit status.

Textual is imported only if there is a terminal to draw on.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.errors import EngineNotFound, RadixKVError
from radixkv.removed import parse_arguments
from radixkv_monitor import options
from radixkv_monitor.options import DAMAGED, FAILED, INTERRUPTED, MISUSED, OK, THRESHOLD

if TYPE_CHECKING:
    from radixkv_monitor.alert_settings import AlertSettings
    from radixkv_monitor.summary import Level, Reason

GARBAGE = 50_000
"""New objects between two garbage collections. Records are in no reference cycles. With Python's default of 700,
collections take a third of the time to build a large tree's rows, and a tenth of the time to import Textual.
"""
PATIENCE = 5.0
"""The seconds that --once waits for an engine's state."""
WATCHED = 2.0
"""The seconds that --once watches a live engine."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of output: the option that selects it, and the function that produces it and returns the exit status.

    `draws`: it needs a terminal for its screen.
    """

    option: str
    run: Callable[[argparse.Namespace], int]
    draws: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, one of `options.EXIT_STATUSES`."""
    gc.set_threshold(GARBAGE)
    arguments = parse_arguments(options.parser(), argv)
    _log_to(arguments.log)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (RadixKVError, OSError) as error:
        return _failed(str(error), MISUSED if isinstance(error, ValueError) else FAILED)


def _failed(message: str, status: int) -> int:
    """Report a failure in one line, and return its status."""
    print(f"radixkv-monitor: {message}", file=sys.stderr)
    return status


def _log_to(path: Path | None) -> None:
    """Log to a file, or nowhere: the terminal is being drawn on."""
    if path is not None:
        form = "%(asctime)s %(name)s %(levelname)s %(message)s"
        logging.basicConfig(filename=path, level=logging.INFO, format=form)
    else:
        logging.getLogger("radixkv").addHandler(logging.NullHandler())
        logging.getLogger("radixkv_monitor").addHandler(logging.NullHandler())


def _run(arguments: argparse.Namespace) -> int:
    mode = next(each for each in MODES if not each.option or getattr(arguments, each.option))
    if message := options.complaint(arguments):
        return _failed(message, MISUSED)
    if mode.draws and not _can_draw():
        return _failed("this is no terminal to draw on; --once prints a summary", MISUSED)
    if arguments.sort is not None and (message := _unknown_order(arguments.sort)):
        return _failed(message, MISUSED)
    return mode.run(arguments)


def _can_draw() -> bool:
    """Return whether there is a terminal, or a browser: `textual serve` gives Textual another driver."""
    return "TEXTUAL_DRIVER" in os.environ or all(
        stream and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )


def _unknown_order(name: str) -> str:
    """Return an error message if no view can be sorted by `name`, else an empty text."""
    from radixkv_monitor.views import sorts

    known = sorts()
    if any(name.replace(" ", "-") in names for names in known.values()):
        return ""
    lines = (f"  {view:<10} {', '.join(names)}" for view, names in known.items())
    return "\n".join((f"nothing can be sorted by {name!r}; there are", *lines))


# ---- the source


def choose_feed(arguments: argparse.Namespace, *, ask: bool = False) -> Any:
    """Return the feed to watch. If several engines run, ask for one on the screen, or fail; None if none was chosen.

    Raises EngineNotFound and InvalidInput.
    """
    from radixkv.telemetry.discovery import engines
    from radixkv_monitor import feed_factory

    if arguments.demo:
        return feed_factory.demo()
    target = arguments.replay or arguments.target
    if target is not None:
        return feed_factory.feed_of(str(target), arguments.token)
    found = engines()
    if not found:
        raise EngineNotFound(feed_factory.NO_ENGINE)
    if len(found) == 1:
        return feed_factory.feed_of_found(found[0])
    if not ask:
        lines = [feed_factory.describe(each, time.time()) for each in found]
        raise EngineNotFound("several engines are running; name one by its process id or socket:\n" + "\n".join(lines))
    from radixkv_monitor.engine_picker import EnginePicker

    picker = EnginePicker(found)
    chosen = picker.run()
    if picker.return_code:  # a signal ended it
        raise SystemExit(picker.return_code)
    return None if chosen is None else feed_factory.feed_of_found(chosen)


# ---- the modes


class Progress:
    """Show the share of a task on one line of a terminal; anywhere else, show nothing."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._stream = sys.stderr  # an app without a terminal replaces it while it runs
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __call__(self, share: float) -> None:
        """Show a share, 0 to 1."""
        if self._terminal:
            self._shown = True
            print(f"\r\x1b[Kradixkv-monitor: {self._task}, {share:.0%}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def _draw(arguments: argparse.Namespace) -> int:
    """Show the app until it ends."""
    feed = choose_feed(arguments, ask=True)
    if feed is None:
        return OK
    from radixkv_monitor.app import MonitorApp
    from radixkv_monitor.self_usage import FrameLimiter, UsageMeter
    from radixkv_monitor.theme import DARK, LIGHT

    app = MonitorApp(
        feed,
        arguments.view,
        sort=arguments.sort,
        record_to=arguments.record,
        usage_meter=UsageMeter(),
        frame_limiter=FrameLimiter(),
        theme=LIGHT if arguments.theme == "light" else DARK,
        alerts=_alert_settings(arguments),
        read_only=arguments.read_only,
    )
    app.run()
    return app.return_code or OK


def _once(arguments: argparse.Namespace) -> int:
    """Print one summary."""
    from radixkv_monitor.print_once import damage, first_state, to_dict, to_text
    from radixkv_monitor.summary import summarise, verdict
    from radixkv_monitor.verdict_changes import without

    settings = _alert_settings(arguments)
    watched = WATCHED if arguments.seconds is None else arguments.seconds
    feed = choose_feed(arguments)
    try:
        with closing(Progress(f"reading {feed.title}")) as progress:
            state = first_state(feed, PATIENCE, watched, progress)
    except EngineNotFound as error:
        if feed.ending.damaged_at is None:
            raise
        return _failed(str(error), DAMAGED)
    shown = (state, feed, settings.thresholds)
    print(json.dumps(to_dict(*shown), indent=2) if arguments.json else to_text(*shown), flush=True)
    if message := damage(feed):
        return _failed(message, DAMAGED)
    if feed.status.link in ("silent", "stale"):
        return _failed(feed.status.sentence, FAILED)
    found = without(verdict(state, summarise(state), settings.thresholds), settings.ignore)
    return _status_of(arguments.fail_on, found.level, found.reasons)


def _watch(arguments: argparse.Namespace) -> int:
    """Print the changes of the verdict's level until a signal comes, or until the level reaches --fail-on."""
    from radixkv.cli.entry_point import exit_on_signals
    from radixkv_monitor.alerts import watch
    from radixkv_monitor.replay import FileFeed

    settings = _alert_settings(arguments)
    feed = choose_feed(arguments)
    if isinstance(feed, FileFeed):
        return _failed(f"{feed.title} is a recording: --watch goes with a running engine", MISUSED)
    with exit_on_signals():
        last = watch(feed, settings, arguments.fail_on, as_json=arguments.json)
    if last is None:
        return _failed(feed.status.sentence, FAILED)
    return _status_of(arguments.fail_on, last.level, last.reasons)


def _alert_settings(arguments: argparse.Namespace) -> AlertSettings:
    """Read the settings of alerts; options add to the file's settings, or take their place. Raises InvalidInput."""
    from radixkv_monitor.alert_settings import find_settings

    found = find_settings(arguments.alerts)
    return replace(found, bell=found.bell or arguments.bell)


def _status_of(fail_on: Level | None, level: Level, reasons: Sequence[Reason]) -> int:
    """Return the status of a verdict. If it has the level of --fail-on, its reasons go to standard error."""
    from radixkv_monitor.verdict_changes import reaches

    if fail_on is None or not reaches(level, fail_on):
        return OK
    for each in reasons:
        _failed(f"{each.level} ({each.name}): {each.sentence}", THRESHOLD)
    return THRESHOLD


MODES = (Mode("once", _once), Mode("watch", _watch), Mode("", _draw, draws=True))
"""The first mode whose option is given is run; the last one has no option."""
