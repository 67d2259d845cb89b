"""Conversations as telemetry tells them: what the requests of each asked for and found. Knows requests, no history."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from radixkv.engine.request import Request
from radixkv.telemetry.mirror import SESSIONS
from radixkv.telemetry.records import SessionRecord, namespace_label


class Sessions:
    """Those that were used last, by number; one that was forgotten and speaks again begins anew."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, SessionRecord] = OrderedDict()

    def asked(self, request: Request, now: float) -> SessionRecord | None:
        """A request came in; None if it is no session's."""
        if request.session is None:
            return None
        old = self._known.get(request.session) or _new(request.session, namespace_label(request.namespace), now)
        return self._keep(
            replace(old, requests=old.requests + 1, live=old.live + 1, tokens=len(request.prompt), used=now)
        )

    def answered(self, request: Request, now: float) -> SessionRecord | None:
        """A request ended, well or not."""
        old = None if request.session is None else self._known.get(request.session)
        if old is None:
            return None
        first = request.streams[0] if request.streams else None
        said = 0 if first is None else first.output_length
        return self._keep(
            replace(
                old,
                live=max(old.live - 1, 0),
                tokens=len(request.prompt) + said,
                prompt_tokens=old.prompt_tokens + (len(request.prompt) if request.counted else 0),
                cached_tokens=old.cached_tokens + (first.cached_tokens if first is not None and request.counted else 0),
                output_tokens=old.output_tokens + sum(stream.output_length for stream in request.streams),
                used=now,
            )
        )

    def closed(self, number: int) -> SessionRecord | None:
        """A conversation is over; None if it never asked for anything."""
        old = self._known.get(number)
        return None if old is None else self._keep(replace(old, closed=True))

    def _keep(self, record: SessionRecord) -> SessionRecord:
        self._known[record.number] = record
        self._known.move_to_end(record.number)
        if len(self._known) > SESSIONS:
            self._known.popitem(last=False)
        return record


def _new(number: int, namespace: str | None, now: float) -> SessionRecord:
    return SessionRecord(number, namespace, 0, 0, 0, 0, 0, 0, started=now, used=now)
