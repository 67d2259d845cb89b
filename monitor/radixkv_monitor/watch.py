"""Run `--watch`: print the changes of the verdict's level, without a screen, for services and for scripts."""

from __future__ import annotations

import json
import signal
import sys
import time
from types import FrameType

from radixkv_monitor.alert_settings import AlertSettings
from radixkv_monitor.alerts import Alerter
from radixkv_monitor.feed import Feed
from radixkv_monitor.summary import Level
from radixkv_monitor.verdict_log import VerdictChange, reaches

INTERVAL = 0.5
"""The seconds between two looks at the verdict."""


def watch(feed: Feed, settings: AlertSettings, fail_on: Level | None, *, as_json: bool = False) -> VerdictChange | None:
    """Print a line per change until the level reaches `fail_on`, and return that change.

    Returns None if the source can send nothing more, such as after a wrong token. A lost connection is no end: the
    verdict is then "bad", and the feed connects again. The feed is closed in any case. Raises InvalidInput if the log
    of verdicts cannot be opened.
    """
    terminal = _write_terminal if sys.stderr.isatty() else None
    alerter = Alerter(feed, settings, write_terminal=terminal, report=_report)
    notice = ""
    feed.start()
    try:
        while feed.status.link != "ended":
            change = alerter.check()
            if change is not None:
                print(json.dumps(change.as_dict()) if as_json else change, flush=True)
                if fail_on is not None and reaches(change.level, fail_on):
                    return change
            elif feed.latest is None and feed.status.sentence and not notice:
                notice = feed.status.sentence
                _report(notice)
            time.sleep(INTERVAL)
        return None
    finally:
        feed.close()


def exit_on_signals() -> None:
    """End the process on SIGTERM and SIGHUP with 128 plus their number, also as the first process of a container.

    A signal that was ignored at the start, as under nohup, stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _report(sentence: str) -> None:
    print(f"radixkv-monitor: {sentence}", file=sys.stderr, flush=True)


def _write_terminal(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
