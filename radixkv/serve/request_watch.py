"""Count cache hits and latencies of requests as they end, on the engine's thread.

An error in this module is logged and ends the counting, never a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from radixkv.cache import Sequence
from radixkv.engine.core import Core
from radixkv.engine.latency import Histogram
from radixkv.engine.observers import EngineObserver
from radixkv.engine.output import Completion
from radixkv.engine.request import Request, TokenIds
from radixkv.errors import RadixKVError
from radixkv.telemetry.records import ITL_BOUNDS

_log = logging.getLogger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
STREAMS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def _histograms() -> dict[str, Histogram]:
    """Create the histograms of finished requests. `ttft_hit` is for requests with half of their prompt cached or more.

    `longest` counts the tokens of a request's longest reply. `gap_mean` is the mean time between two tokens of a
    stream, counted once a stream.
    """
    seconds = ("ttft_hit", "ttft_miss", "queue", "prefill", "decode", "inference", "total")
    counts = ("prompt_tokens", "output_tokens", "longest", "max_tokens")
    return {
        **{name: Histogram(SECONDS) for name in seconds},
        "gap_mean": Histogram(ITL_BOUNDS),
        **{name: Histogram(TOKENS) for name in counts},
        "streams": Histogram(STREAMS),
    }


@dataclass
class RequestCounts:
    """Counters of requests, in addition to the engine's own; they only grow.

    `lookups` and `missed_tokens` are by the reason of the cache miss, "full" for a whole hit. A request counts once, at
    its end, with the reason at its admission. `streams` are by finish reason.
    """

    lookups: Counter[str] = field(default_factory=Counter)
    missed_tokens: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=_histograms)

    def copy(self) -> RequestCounts:
        """Return a copy of all counters."""
        histograms = {name: each.copy() for name, each in self.histograms.items()}
        return RequestCounts(Counter(self.lookups), Counter(self.missed_tokens), Counter(self.streams), histograms)


class RequestWatch(EngineObserver):
    """Count the requests of a core."""

    def __init__(self, core: Core) -> None:
        """Count the requests that are opened from now on."""
        self.counts = RequestCounts()
        self.counts.histograms["gap"] = core.token_times.histogram  # of all requests since the load
        self._core = core
        self._failed = False
        self._live: dict[Request, tuple[str, int]] = {}  # request -> (reason of the miss, missed tokens)
        core.observers.append(self)

    def opened(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> None:
        """Note that a request was admitted, perhaps after a preemption.

        Costs a match if tokens are missing and no observer has explained the miss yet.
        """
        if self._failed or request.streams:  # a preempted request was counted at its first admission
            return
        try:
            self._note(request, tokens, limit, sequence)
        except Exception:
            self._failed = True
            _log.exception("metrics of requests failed: they are counted no more")

    def _note(self, request: Request, tokens: TokenIds, limit: int, sequence: Sequence) -> None:
        missed = len(tokens) - sequence.length
        reason = "full"
        if missed > 1:  # the last token is always computed, for its logits
            # The monitor's recorder may have just explained the miss.
            explained = request.scheduling.miss or self._core.cache.explain(tokens, request.namespace, limit)
            missed -= explained.host
            reason = explained.reason if missed > 1 else "full"
        begins = request not in self._live
        self._live[request] = (reason, missed)
        if begins:
            request.channel.listen(partial(self._ended, request), end=True)

    def _ended(self, request: Request) -> None:
        """Count a request at its end. The channel logs an exception of this method."""
        reason, missed = self._live.pop(request)
        if not request.streams:
            return  # the request was never admitted
        if self._core.config.prefix_cache:
            self.counts.lookups[reason] += 1
            self.counts.missed_tokens[reason] += missed
        try:
            reply = request.channel.wait(0)
        except RadixKVError:
            return
        if request.max_tokens:  # 0: only the prompt was computed
            self._finished(request, [reply, *reply.alternatives])

    def _finished(self, request: Request, replies: list[Completion]) -> None:
        usage, histograms = replies[0].usage, self.counts.histograms
        assert request.scheduling.started_at is not None
        queued = request.scheduling.started_at - request.submitted
        total = max(reply.usage.total_s for reply in replies)
        found = 2 * usage.cached_tokens >= usage.prompt_tokens
        values = {
            "ttft_hit" if found else "ttft_miss": usage.ttft_s,
            "queue": queued,
            "prefill": usage.ttft_s - queued,
            "decode": total - usage.ttft_s,
            "inference": total - queued,
            "total": total,
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": sum(reply.usage.output_tokens for reply in replies),
            "longest": max(reply.usage.output_tokens for reply in replies),
            "max_tokens": request.max_tokens,
            "streams": request.replies.width,
        }
        for name, value in values.items():
            histograms[name].observe(value)
        for reply in replies:
            self.counts.streams[reply.finish_reason] += 1
            if (gaps := reply.usage.output_tokens - 1) > 0 and request.params.beam_width == 1:
                histograms["gap_mean"].observe((reply.usage.total_s - reply.usage.ttft_s) / gaps)
