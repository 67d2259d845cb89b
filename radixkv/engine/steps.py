"""The two ways of a step: finished before the next one is scheduled, or after the next one was launched.

`Steps`, `Halves` and `PublishAtOnce` serve the first way. `OverlappedSteps`, `AfterStep` and `PublishLate` serve the
second one, in which KV is published once the results show that it is finite. Drafts, whose KV is verified first, are
published late in both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from radixkv.device import refuse_fatal
from radixkv.engine.draws import ChunkScores, Row
from radixkv.engine.fault_isolation import Fail, Item, Result, is_over, release_tensors
from radixkv.engine.request import Stream
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.scheduler import Work
from radixkv.engine.stats import Counters
from radixkv.errors import InvalidInput
from radixkv.sampling.sampler import Pending, Sampled, finite_rows

if TYPE_CHECKING:
    from torch import Tensor


_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was launched, or a part of one, and its draws: one for all rows, or several after one that raised."""

    work: list[Work]
    draws: list[tuple[list[Row], Pending]]
    scores: list[ChunkScores]


class Steps:
    """Steps that are finished before the next one is scheduled: depth 0."""

    flight: Flight | None = None  # the step that was launched and is not finished

    def push(self, launched: list[Flight]) -> list[Flight]:
        """Add a step in one or several parts; returns the ones to finish now."""
        return launched


class OverlappedSteps:
    """Steps that are finished after the next one was launched: depth 1. A step in several parts is finished at once."""

    flight: Flight | None = None

    def push(self, launched: list[Flight]) -> list[Flight]:
        """Add a step; returns the preceding one, and the parts of this one if there are several."""
        before, whole = self.flight, len(launched) == 1 and len(launched[0].draws) == 1
        self.flight = launched[0] if whole else None
        return ([] if before is None else [before]) + ([] if whole else launched)


class Halves:
    """Repeats a call that raised on each half of its items, and so on, if steps do not overlap."""

    def __init__(self, fail: Fail) -> None:
        """`fail` ends the request of an item that raises alone."""
        self._fail = fail

    def run(
        self,
        items: list[Item],
        call: Callable[[list[Item]], Result],
        owner: Callable[[Item], Stream] = attrgetter("stream"),
    ) -> list[tuple[list[Item], Result]]:
        """See Parts. Costs 2 log n calls of falling size for each item that fails."""
        try:
            return [(items, call(items))]
        except Exception as error:
            refuse_fatal(error)
            if len(items) == 1:
                self._fail(owner(items[0]).request, error)
                return []
            _log.warning("a step of %d parts raised %r: trying its halves", len(items), error)
            release_tensors(error)
        middle = len(items) // 2
        results: list[tuple[list[Item], Result]] = []
        for half in (items[:middle], items[middle:]):
            live = [item for item in half if not is_over(owner(item))]
            results += self.run(live, call, owner) if live else []
        return results

    def draw(
        self, rows: list[Item], call: Callable[[list[Item]], Result], owner: Callable[[Item], Stream]
    ) -> list[tuple[list[Item], Result]]:
        """Run a draw if there are rows."""
        return self.run(rows, call, owner) if rows else []


class AfterStep:
    """Finishes the step in flight before a call that raised is tried again, first on all items."""

    def __init__(self, finish_step: Callable[[], object], fail: Fail) -> None:
        """`finish_step` takes the results of the step in flight."""
        self._finish_step, self._halves = finish_step, Halves(fail)

    def run(
        self,
        items: list[Item],
        call: Callable[[list[Item]], Result],
        owner: Callable[[Item], Stream] = attrgetter("stream"),
    ) -> list[tuple[list[Item], Result]]:
        """See Parts."""
        try:
            return [(items, call(items))]
        except Exception as error:
            self._recover(error)
        live = [item for item in items if not is_over(owner(item))]
        return self._halves.run(live, call, owner) if live else []

    def draw(
        self, rows: list[Item], call: Callable[[list[Item]], Result], owner: Callable[[Item], Stream]
    ) -> list[tuple[list[Item], Result]]:
        """Run a draw; without rows, too, as it finds the rows of logits that are finite."""
        if rows and (found := self.run(rows, call, owner)):
            return found
        try:
            return [([], call([]))]
        except Exception as error:
            self._recover(error)
        return [([], call([]))]

    def _recover(self, error: Exception) -> None:
        refuse_fatal(error)
        _log.warning("a part of a step raised %r: trying it again after the preceding step", error)
        release_tensors(error)
        self._finish_step()


class Publishing(Protocol):
    """Commits and publishes the chunks of a step."""

    def commit(self, work: list[Work], logits: Tensor) -> None:
        """Commit the chunks of a forward, from its logits [chunks + additional rows, vocab]."""

    def publish(self, flight: Flight, results: list[tuple[list[Row], Sampled]]) -> None:
        """Publish the chunks of a step, and set the tokens that the following step has as placeholders."""

    def publish_rest(self, stream: Stream) -> None:
        """Publish the last tokens of a stream that is about to be closed."""

    def close(self, stream: Stream) -> None:
        """Close a stream that has finished, now or after the step in flight."""


class ChunkCounts:
    """Counts the tokens of computed chunks."""

    def __init__(self, counters: Counters, reuse: ReusePolicy) -> None:
        """Count in `counters`."""
        self._counters, self._reuse = counters, reuse

    def count(self, work: Work, is_finite: bool) -> bool:
        """Count a computed chunk; return whether to publish it now. Raises InvalidInput if it computed NaN."""
        if not is_finite:
            raise InvalidInput("the model's logits have no finite maximum: it computed NaN or infinity")
        counters, stream, count = self._counters, work.stream, len(work.tokens)
        new, hits = stream.counts.count_computed(work.start, count)
        counters.computed_tokens += new
        counters.recomputed_tokens += count - new
        counters.cached_tokens += hits
        request, prompt_tokens = stream.request, len(stream.request.prompt)
        decoded = new if work.start >= prompt_tokens else min(new, max(work.start + count - prompt_tokens, 0))
        counters.decode_tokens += decoded
        prompts = not request.reported.counted
        if prompts:
            request.reported.counted = True
            counters.prompt_tokens += prompt_tokens
        if new > decoded:
            miss, counted = request.reported.miss, vars(counters)
            reason = "full" if miss is None else miss.reason
            counted[f"lookups_{reason}"] += prompts
            counted[f"missed_{reason}"] += new - decoded
        return self._reuse.publishes(stream, work.start, count, isolated=work.isolated)


class PublishAtOnce:
    """Publishes each chunk when it is committed: one commit costs half as much as commit and publish."""

    def __init__(self, counts: ChunkCounts, reuse: ReusePolicy, fail: Fail) -> None:
        """Publish as `reuse` allows. `fail` ends the one request that raised."""
        self._counts, self._reuse, self._fail = counts, reuse, fail

    def commit(self, work: list[Work], logits: Tensor) -> None:
        """Commit and publish."""
        for each, is_finite in zip(work, finite_rows(logits[: len(work)]), strict=True):
            request = each.stream.request
            try:
                if not request.channel.ended:  # another stream of it failed
                    each.stream.sequence.commit(self._counts.count(each, is_finite))
            except Exception as error:
                self._fail(request, error)

    def publish(self, flight: Flight, results: list[tuple[list[Row], Sampled]]) -> None:
        """Do nothing: all is published, and no stream has a placeholder."""

    def publish_rest(self, stream: Stream) -> None:
        """See Publishing."""
        self._reuse.publish_rest(stream)

    def close(self, stream: Stream) -> None:
        """Close it now."""
        self._reuse.publish_rest(stream)
        stream.close()


class PublishLate:
    """Commits chunks when they are launched, and publishes them when their logits are known to be finite.

    Every later launch comes after them in the device's stream, so blocks can be reused as soon as the cache frees them.
    """

    def __init__(
        self, counts: ChunkCounts, reuse: ReusePolicy, counters: Counters, closing: list[Stream], rows: int, fail: Fail
    ) -> None:
        """Publish as `reuse` allows. `closing` are the streams that are closed after the step in flight.

        With `rows` of recurrent state a stream cannot go back, so that it is closed after the step in flight.
        """
        self._counts, self._reuse, self._counters, self._fail = counts, reuse, counters, fail
        self._closing, self._rows = closing, rows

    def commit(self, work: list[Work], logits: Tensor) -> None:
        """Commit chunks that the device will compute, and publish none of them yet."""
        for each in work:
            if each.stream.active:  # another stream of its request may have failed
                each.stream.sequence.commit(publish=False)
                each.stream.in_flight += len(each.tokens)

    def publish(self, flight: Flight, results: list[tuple[list[Row], Sampled]]) -> None:
        """Count and publish the chunks of a step, which were committed when it was launched."""
        finite = flight.draws[0][1].finite()  # additional rows follow the last rows of the chunks
        for each, is_finite in zip(flight.work, finite, strict=False):
            stream, count = each.stream, len(each.tokens)
            try:
                if is_over(stream) or not is_finite:
                    self._counters.wasted_tokens += count
                if not is_over(stream):
                    stream.in_flight -= count
                    if self._counts.count(each, is_finite):
                        stream.sequence.publish(each.end)
                elif is_finite and stream in self._closing:
                    stream.in_flight -= count
            except Exception as error:
                self._fail(stream.request, error)

        for rows, sampled in results:
            for (_, stream, *_), token in zip(rows, sampled.tokens, strict=True):
                if stream.active and stream.sequence.has_unknown:
                    stream.sequence.resolve(token)

    def publish_rest(self, stream: Stream) -> None:
        """Drop the tokens of a step in flight, and publish the rest, unless a plan is pending."""
        if stream.active and not stream.sequence.has_plan:
            first = stream.request.streams[0]  # computes the prompt for all; forks hold its tokens in flight, too
            done = first.computed_length >= len(stream.request.prompt)
            length = stream.computed_length if done else first.computed_length
            if not self._rows:  # a row of recurrent state would go back to a snapshot
                stream.sequence.truncate(length)
                stream.in_flight = 0
            self._reuse.publish_rest(stream, length)

    def close(self, stream: Stream) -> None:
        """Close it now, or after the step in flight if its row of recurrent state has passed the last token.

        The state and the KV after that token are kept: templates repeat it in the next turn of a conversation.
        """
        if not stream.in_flight or not self._rows:
            self.publish_rest(stream)
            stream.close()
        elif stream.active and stream not in self._closing:
            stream.times.finished = time.perf_counter()
            self._closing.append(stream)
