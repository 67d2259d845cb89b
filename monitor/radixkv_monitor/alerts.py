"""Watch the verdict of a feed, and notify the user of the changes of its level; `--watch` does so without a screen.

Only feeds of the present notify. Alerts follow the source and not the screen, so a frozen screen or a look at the past
changes nothing here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from radixkv_monitor.alert_settings import AlertSettings
from radixkv_monitor.feed import Feed
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.summary import Level, summarise, verdict
from radixkv_monitor.verdict_changes import SEVERITIES, LevelChanges, VerdictChange, reaches, without


class Alerter:
    """Check the verdict of `feed` when asked, and notify the user of each change, as the settings say.

    `write_terminal` writes control sequences to a terminal; None if there is none.
    """

    def __init__(
        self,
        feed: Feed,
        settings: AlertSettings,
        *,
        write_terminal: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._write_terminal = write_terminal
        self._clock, self._ticks = clock, ticks
        self.watch(feed)

    def watch(self, feed: Feed) -> None:
        """Watch another feed from now on, whose first verdict has no level before it."""
        self._feed = feed
        self._levels = LevelChanges(self.settings.after)

    def check(self) -> VerdictChange | None:
        """Judge the newest state of the feed; return the change of the level, if there is one."""
        state = self._feed.current
        if state is None or isinstance(self._feed, FileFeed):
            return None
        found = without(verdict(state, summarise(state), self.settings.thresholds), self.settings.ignore)
        change = self._levels.take(state.facts.engine, found, self._clock(), self._ticks())
        if change is not None:
            self._notify(change)
        return change

    def _notify(self, change: VerdictChange) -> None:
        starts_well = change.previous is None and SEVERITIES[change.level] == 0
        if self.settings.bell and self._write_terminal is not None and not starts_well:
            self._write_terminal("\a")


# ---- without a screen


INTERVAL = 0.5
"""The seconds between two looks at the verdict."""


def watch(feed: Feed, settings: AlertSettings, fail_on: Level | None, *, as_json: bool = False) -> VerdictChange | None:
    """Print a line per change until the level reaches `fail_on`, and return that change.

    Returns None if the source can send nothing more, such as after a wrong token. A lost connection is no end: the
    verdict is then "bad", and the feed connects again. The feed is closed in any case.
    """
    terminal = _write_terminal if sys.stderr.isatty() else None
    alerter = Alerter(feed, settings, write_terminal=terminal)
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
