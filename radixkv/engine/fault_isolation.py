"""Find the request that makes a step fail, so that only that request ends.

A forward or a draw that raises is repeated on each half of its parts, and so on. A part that ran writes the same values
again, so a request fails only if it fails alone. A step that needs too much memory at once gets through in parts.

A forward over recurrent state cannot be repeated: it updates rows in place. The requests of such a forward are
preempted, and go on from their last snapshots, each in forwards of its own until it has passed that step. Where steps
overlap, so does a request that was alone in the forward: the step in flight may have held the memory.

An error of the device that no later call survives is not isolated: DeviceLost leaves the step and ends the engine.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from radixkv.device import refuse_fatal
from radixkv.errors import RequestFailed

if TYPE_CHECKING:
    from radixkv.engine.request import Request, Stream

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
Fail: TypeAlias = "Callable[[Request, Exception], None]"


class StreamChunk(Protocol):
    """A part of a forward: the tokens of one stream from `start` on; `scheduler.Work` is one."""

    @property
    def stream(self) -> Stream:
        """The stream."""

    @property
    def start(self) -> int:
        """The position of the first token."""

    @property
    def tokens(self) -> Sized:
        """The tokens."""


Work = TypeVar("Work", bound=StreamChunk)


class OwnForwards:
    """Preempts the requests of a forward that raised, and lets each pass that step in forwards of its own."""

    def __init__(self, preempt: Callable[[Request], None], fail: Fail, *, overlaps: bool) -> None:
        """`preempt` finishes the step in flight first; `overlaps` means that there may be one."""
        self._preempt, self._fail, self._overlaps = preempt, fail, overlaps
        self._until: dict[Stream, int] = {}  # the tokens that a stream must have computed, to share forwards again

    def run(self, work: list[Work], call: Callable[[list[Work]], Result]) -> list[tuple[list[Work], Result]]:
        """Call `call` on all work, in as few parts as possible; fail the requests that raise alone.

        Where steps overlap, it fails those that raise alone again after the preceding step.
        """
        results: list[tuple[list[Work], Result]] = []
        for planned in self._parts(work) if self._until else [work]:
            part = [each for each in planned if not is_over(each.stream)] if results else planned
            try:
                results.append((part, call(part)))
                continue
            except Exception as raised:
                refuse_fatal(raised)
                error = raised
            requests = list(dict.fromkeys(each.stream.request for each in part))
            if len(requests) == 1 and (not self._overlaps or any(each.stream in self._until for each in part)):
                self._fail(requests[0], error)
                continue
            _log.warning("a step of %d requests raised %r: each goes on alone", len(requests), error)
            release_tensors(error)
            self._until.update((each.stream, each.start + len(each.tokens)) for each in part)
            for request in requests:
                self._preempt(request)
        return results

    def _parts(self, work: list[Work]) -> list[list[Work]]:
        """Return the work of each request that must run alone, then all other work."""
        until = {stream: end for stream, end in self._until.items() if stream.finish_reason is None}
        until = {stream: end for stream, end in until.items() if not stream.request.channel.ended}
        self._until = {
            stream: end for stream, end in until.items() if not stream.active or stream.sequence.length < end
        }
        alone: dict[Request, list[Work]] = {stream.request: [] for stream in self._until}
        others: list[Work] = []
        for each in work:
            alone.get(each.stream.request, others).append(each)
        return [part for part in (*alone.values(), others) if part]


class Parts(Protocol):
    """Runs a part of a step for some items, in several calls only if one raises."""

    def run(
        self, items: list[Item], call: Callable[[list[Item]], Result], owner: Callable[[Item], Stream] = ...
    ) -> list[tuple[list[Item], Result]]:
        """Call `call` on all items, in as few parts as possible; fail the requests whose items raise alone.

        Leaves out items whose `owner` has ended meanwhile. Raises DeviceLost if the device is lost.
        """
        ...

    def draw(
        self, rows: list[Item], call: Callable[[list[Item]], Result], owner: Callable[[Item], Stream]
    ) -> list[tuple[list[Item], Result]]:
        """Run a draw, perhaps of no rows."""
        ...


def is_over(stream: Stream) -> bool:
    """Return whether a stream has ended, so that late results of it are ignored."""
    return stream.finish_reason is not None or stream.request.channel.ended


def failure(error: Exception) -> RequestFailed:
    """Return the error for the caller of a request that raised `error`; raises DeviceLost if the device is lost."""
    refuse_fatal(error)
    failed = RequestFailed(f"a step of this request raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def release_tensors(error: BaseException | None) -> None:
    """Clear the frames of an exception and of its causes: they hold tensors, and it may have been out of memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
