"""Run `radixkv-monitor`: turn options into a feed and a screen, and errors into one line and an exit status.

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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from radixkv.errors import EngineNotFound, RadixKVError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
GARBAGE = 50_000
"""New objects between two garbage collections. Records are in no reference cycles. With Python's default of 700,
collections take a third of the time to build a large tree's rows, and a tenth of the time to import Textual.
"""
PATIENCE = 5.0
"""The seconds that --once waits for an engine's state."""

VIEW_NAMES = ("overview", "tree", "pool", "sessions", "evictions", "requests")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 success, 1 a reported failure, 2 wrong usage, 130 Ctrl-C."""
    gc.set_threshold(GARBAGE)
    arguments = _parser().parse_args(argv)
    _log_to(arguments.log)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RadixKVError, OSError) as error:
        print(f"radixkv-monitor: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixkv-monitor",
        description="Show a running engine: its radix tree and block pool, requests, hits, misses and evictions.",
        epilog="Without a target, attach to the engine on this machine, or ask which one. The engine is not changed.",
    )
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="a process id, a socket, tcp://HOST:PORT, or a recording"
    )
    parser.add_argument(
        "--demo", action="store_true", help="show a made-up workload over a real cache; needs no engine"
    )
    parser.add_argument(
        "--host-blocks", metavar="N", type=int, default=0, help="with --demo: add a host tier of N blocks (of 2 MiB)"
    )
    parser.add_argument("--replay", metavar="FILE", type=Path, help="play a recording")
    parser.add_argument("--record", metavar="FILE", type=Path, help="record to a new file from the first state on")
    parser.add_argument("--view", choices=VIEW_NAMES, default="overview", help="the view to start with")
    parser.add_argument("--sort", metavar="NAME", help="sort the views by this column or order")
    parser.add_argument("--theme", choices=("dark", "light"), default="dark", help="the theme to start with")
    parser.add_argument("--once", action="store_true", help="print a summary and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print JSON")
    parser.add_argument(
        "--token", default="", help="the token of an engine at tcp://; not needed on the engine's own machine"
    )
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="write a log to this file; otherwise nothing is logged"
    )
    parser.add_argument("--version", action="version", version=f"radixkv {version('radixkv')}")
    return parser


def _log_to(path: Path | None) -> None:
    """Log to a file, or nowhere: the terminal is being drawn on."""
    if path is not None:
        form = "%(asctime)s %(name)s %(levelname)s %(message)s"
        logging.basicConfig(filename=path, level=logging.INFO, format=form)
    else:
        logging.getLogger("radixkv").addHandler(logging.NullHandler())
        logging.getLogger("radixkv_monitor").addHandler(logging.NullHandler())


def _run(arguments: argparse.Namespace) -> int:
    chosen = [each for each in (arguments.target, arguments.replay, arguments.demo or None) if each is not None]
    if len(chosen) > 1:
        print("radixkv-monitor: a target, --replay and --demo exclude each other: give one of them", file=sys.stderr)
        return MISUSED
    if arguments.host_blocks and not (arguments.demo and arguments.host_blocks > 0):
        print("radixkv-monitor: --host-blocks goes with --demo, and is a number above 0", file=sys.stderr)
        return MISUSED
    if arguments.json and not arguments.once:
        print("radixkv-monitor: --json goes with --once", file=sys.stderr)
        return MISUSED
    if arguments.record is not None and arguments.record.exists():
        print(f"radixkv-monitor: {arguments.record} is there already: name a new file to record to", file=sys.stderr)
        return MISUSED
    if not arguments.once and not all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        print("radixkv-monitor: this is no terminal to draw on; --once prints a summary", file=sys.stderr)
        return MISUSED
    if arguments.sort is not None and (complaint := _unknown_order(arguments.sort)):
        print(f"radixkv-monitor: {complaint}", file=sys.stderr)
        return MISUSED
    feed = _feed(arguments)
    if feed is None:
        return 0
    return _once(feed, as_json=arguments.json) if arguments.once else _draw(feed, arguments)


def _unknown_order(name: str) -> str:
    """Return an error message if no view can be sorted by `name`, else an empty text."""
    from radixkv_monitor.views import sorts

    known = sorts()
    if any(name.replace(" ", "-") in names for names in known.values()):
        return ""
    lines = (f"  {view:<10} {', '.join(names)}" for view, names in known.items())
    return "\n".join((f"nothing can be sorted by {name!r}; there are", *lines))


def _feed(arguments: argparse.Namespace) -> Any:
    """Return the feed to watch; None if no engine was chosen."""
    from radixkv.telemetry.discovery import engines
    from radixkv_monitor import feed_factory

    if arguments.demo:
        return feed_factory.demo(arguments.host_blocks)
    target = arguments.replay or arguments.target
    if target is not None:
        return feed_factory.feed_of(str(target), arguments.token)
    found = engines()
    if not found:
        raise EngineNotFound(feed_factory.NO_ENGINE)
    if len(found) == 1:
        return feed_factory.feed_of_found(found[0])
    lines = [feed_factory.describe(each, time.time()) for each in found]
    if arguments.once:
        raise EngineNotFound("several engines are running; name one by its process id or socket:\n" + "\n".join(lines))
    from radixkv_monitor.dialogs import PickerApp

    picker = PickerApp(lines)
    index = picker.run()
    if picker.return_code:  # a signal ended it
        raise SystemExit(picker.return_code)
    return None if index is None else feed_factory.feed_of_found(found[index])


def _draw(feed: Any, arguments: argparse.Namespace) -> int:
    from radixkv_monitor.app import MonitorApp
    from radixkv_monitor.self_usage import FrameLimiter, UsageMeter
    from radixkv_monitor.theme import DARK, LIGHT

    theme = LIGHT if arguments.theme == "light" else DARK
    app = MonitorApp(
        feed,
        arguments.view,
        sort=arguments.sort,
        record_to=arguments.record,
        usage_meter=UsageMeter(),
        frame_limiter=FrameLimiter(),
        theme=theme,
    )
    app.run()
    return app.return_code or 0


def _once(feed: Any, *, as_json: bool) -> int:
    from radixkv_monitor.print_once import first_state, to_dict, to_text

    state = first_state(feed, PATIENCE)
    print(json.dumps(to_dict(state), indent=2) if as_json else to_text(state), flush=True)
    return 0
