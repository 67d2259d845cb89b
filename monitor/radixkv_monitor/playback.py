"""The moment that is on screen: the present, a frozen one, the past, or a position in a recording."""

from __future__ import annotations

from dataclasses import replace

from radixkv_monitor.feed import Feed
from radixkv_monitor.formatting import clock, duration, size
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state import Sample, State

STEP_NOTICE = 2.0
"""The seconds from which on a notice names the length of a running step, so that steps of a second do not flicker."""


class Playback:
    """Select the state to draw, and describe how it differs from a live one."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.frozen = False
        self._frozen_state: State | None = None
        self._position: float | None = None
        self._baseline: Sample | None = None
        self._shown: State | None = None

    @property
    def replay(self) -> FileFeed | None:
        """Return the feed if it plays a recording; pausing and seeking then act on the feed itself."""
        return self.feed if isinstance(self.feed, FileFeed) else None

    def state_to_draw(self) -> State | None:
        """Return the state to draw; None before the first."""
        state = self._frozen_state if self.frozen else self.feed.current
        if state is None:
            return None
        same_engine = self._baseline is not None and self._baseline.engine == state.facts.engine
        baseline = self._baseline if same_engine else state.baseline
        self._shown = replace(state, frozen=self.frozen, baseline=baseline)
        return self._shown

    # ---- commands

    def freeze(self) -> None:
        """Freeze the screen, or return to the present; a recording pauses or plays on."""
        if self.replay is not None:
            self.replay.pause()
        elif self.frozen:
            self._resume()
        else:
            self._pause(self._shown)

    def scrub(self, seconds: float) -> None:
        """Move by `seconds`, back if below 0; moving past the newest state returns to the present."""
        span = self.feed.span
        if span is None:
            return
        if self.replay is not None:
            self.replay.seek(self.replay.now + seconds)
            return
        start = self._position if self._position is not None else self._shown.received if self._shown else span[1]
        self._position = max(start + seconds, span[0])
        if seconds > 0 and self._position >= span[1]:
            self._resume()
        else:
            self._pause(self.feed.at(self._position))

    def set_baseline(self) -> bool:
        """Count deltas from the shown state on; the second time, from the earlier baseline again. Returns whether one
        was set.
        """
        if self._shown is None or self._baseline is not None:
            self._baseline = None
            return False
        self._baseline = Sample(self._shown.time, self._shown.facts.engine, self._shown.stats)
        return True

    def _pause(self, state: State | None) -> None:
        self.frozen = state is not None
        self._frozen_state = state

    def _resume(self) -> None:
        self.frozen, self._frozen_state, self._position = False, None, None

    # ---- texts

    @property
    def link(self) -> str:
        """Return the condition of the source, in a sign and a word or two."""
        if self.frozen:
            return "‖ past" if self._position is not None else "‖ frozen"
        status = self.feed.status
        if status.link == "silent":
            return f"◐ silent {status.silence:.0f} s"
        if self.replay is not None and status.link in ("replay", "ended"):
            return f"{'▶' if self.replay.playing else '‖'} replay {self.replay.speed:g}x"
        return {"connecting": "◌ connecting", "live": "● live", "stale": "✗ stale"}.get(status.link, "■ ended")

    @property
    def banner(self) -> tuple[str, str]:
        """Return notices, the most important first, and their kind: "bad", "warn" or "info"."""
        parts = (self._source_text(), self._step_text(), self._position_text(), self._recording_text())
        link = self.feed.status.link
        is_warning = self.frozen or link == "silent" or self.feed.ending.damaged_at is not None
        kind = "bad" if link == "stale" else "warn" if is_warning else "info"
        return "; ".join(each for each in parts if each), kind

    def _source_text(self) -> str:
        status = self.feed.status
        if status.link == "stale":
            return f"Not connected since {clock(status.since)}, showing the last state: {status.sentence}"
        if status.link == "connecting":
            return status.sentence or f"Looking for an engine at {self.feed.title}"
        return status.sentence

    def _step_text(self) -> str:
        seconds = self._shown.step_seconds if self._shown is not None else None
        if seconds is None or seconds < STEP_NOTICE or self.feed.status.link in ("silent", "stale"):
            return ""
        return f"Step running for {duration(seconds)}; state as of its start"

    def _position_text(self) -> str:
        state = self._frozen_state
        if self.replay is not None:
            span = self.feed.span
            return f"{length(self.feed.now - span[0])} of {length(span[1] - span[0])}" if span else ""
        if state is None:
            return ""
        ago = duration(max(0.0, self.feed.now - state.now))
        return f"{clock(state.now)}, {ago} ago; reading goes on; space: return to the present, [ ]: move"

    def _recording_text(self) -> str:
        recording = self.feed.recording
        if recording is None:
            return ""
        return recording.trouble or (
            f"● recording to {recording.path.name}, {size(recording.bytes)}" if recording.running else ""
        )


def length(seconds: float) -> str:
    """Format minutes and seconds.

    >>> length(0), length(65.2), length(3600)
    ('0:00', '1:05', '60:00')
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
