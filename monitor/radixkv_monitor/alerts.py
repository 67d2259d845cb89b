"""Watch the verdict of a feed, and notify the user of the changes of its level; `--watch` does so without a screen.

Only feeds of the present notify. A recording is logged at its own times. Alerts follow the source and not the screen,
so a frozen screen or a look at the past changes nothing here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from radixkv import private_files
from radixkv.errors import InvalidInput
from radixkv_monitor.alert_settings import AlertSettings
from radixkv_monitor.feed import Feed
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.summary import Level, summarise, verdict
from radixkv_monitor.verdict_log import KEPT, SEVERITIES, VerdictChange, VerdictLog, reaches, without

_log = logging.getLogger(__name__)


class Alerter:
    """Check the verdict of `feed` when asked, and notify the user of each change, as the settings say.

    `write_terminal` writes control sequences to a terminal; None if there is none. `report` gets a sentence if the file
    of the log cannot be written. Raises InvalidInput if that file cannot be opened.
    """

    def __init__(
        self,
        feed: Feed,
        settings: AlertSettings,
        *,
        write_terminal: Callable[[str], None] | None = None,
        report: Callable[[str], None] = _log.error,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.log = VerdictLog()
        self.watch(feed)
        self._write_terminal = write_terminal
        self._report = report
        self._clock, self._ticks = clock, ticks
        self._unwritten: deque[VerdictChange] = deque(maxlen=KEPT)
        self._in_trouble = False
        if settings.log is not None:
            _open_once(settings.log)

    def watch(self, feed: Feed) -> None:
        """Watch another feed from now on. The log is kept.

        Time stops at the end of a recording, so there a level counts at once.
        """
        self._feed = feed
        self.log.restart()
        self.log.after = 0.0 if isinstance(feed, FileFeed) else self.settings.after

    @property
    def now(self) -> float:
        """The time up to which the last level of the log lasts: the present, or the shown time of a recording."""
        return self._feed.now if isinstance(self._feed, FileFeed) else self._clock()

    def check(self) -> VerdictChange | None:
        """Judge the newest state of the feed; return the change of the level, if there is one."""
        state = self._feed.current
        if state is None:
            return None
        found = without(verdict(state, summarise(state), self.settings.thresholds), self.settings.ignore)
        if isinstance(self._feed, FileFeed):
            return self.log.take(state.facts.engine, found, state.now, state.now)
        change = self.log.take(state.facts.engine, found, self._clock(), self._ticks())
        if change is not None:
            self._notify(change)
            self._unwritten.append(change)
        if self.settings.log is not None:
            self._write_log(self.settings.log)
        return change

    def _notify(self, change: VerdictChange) -> None:
        starts_well = change.previous is None and SEVERITIES[change.level] == 0
        if self.settings.bell and self._write_terminal is not None and not starts_well:
            self._write_terminal("\a")

    def _write_log(self, path: Path) -> None:
        """Append the changes that are not in the file yet. A full disk is reported once, and later checks try again."""
        try:
            while self._unwritten:
                private_files.append_line(path, json.dumps(self._unwritten[0].as_dict()).encode())
                self._unwritten.popleft()
                self._in_trouble = False
        except OSError as error:
            if not self._in_trouble:
                self._in_trouble = True
                self._report(f"the log of verdicts, {path}, cannot be written: {error.strerror or error}")


def _open_once(path: Path) -> None:
    """Open the log of verdicts, so that a wrong path is reported at the start."""
    try:
        private_files.append_line(path, b"")
    except OSError as error:
        reason = error.strerror or error
        raise InvalidInput(
            f"the log of verdicts, {path}, cannot be written: {reason}; name another file with --verdict-log"
        ) from error


# ---- without a screen


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


def _report(sentence: str) -> None:
    print(f"radixkv-monitor: {sentence}", file=sys.stderr, flush=True)


def _write_terminal(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
