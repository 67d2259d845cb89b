"""Observers of an engine's requests: telemetry records, monitoring, trace recording.

request_recorder.py  builds the records that radixkv-monitor shows
monitoring.py        publishes them, and writes the last minutes after a crash
engine_control.py    executes the commands of radixkv-monitor
trace_writer.py      writes a trace of all requests that can be replayed
what_if.py           measures the hit rates of smaller and larger pools, from a queue of ended requests
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache import Sequence
    from radixkv.engine.request import Request, TokenIds


class EngineObserver:
    """Notified of each request by the engine's thread; every method does nothing unless a subclass overrides it.

    A method must not raise, and must return soon: the engine's step waits for it. `Core.observers` lists the observers
    of an engine; without monitor and recording it is empty.
    """

    def added(self, request: Request) -> None:
        """Notify that a request was queued."""

    def opened(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> None:
        """Notify that a request got `sequence` for `tokens`; at most `limit` of them could be a hit.

        That is at its admission, before it has a stream; after a preemption; and for each stream that resumes.
        """

    def preempted(self, request: Request) -> None:
        """Notify that a running request was preempted; `opened` follows at its next admission."""

    def ended(self, request: Request, error: Exception | None) -> None:
        """Notify that a request ended: finished, or with an error."""

    def session_closed(self, number: int) -> None:
        """Notify that a conversation is over."""
