"""Count latencies and sizes of requests as they end, on the engine's thread."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from radixkv.engine.core import Core
from radixkv.engine.latency import Histogram
from radixkv.engine.observers import EngineObserver
from radixkv.engine.output import Completion
from radixkv.engine.request import Request
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
    """Counters of finished requests, in addition to the engine's own. `streams` are by finish reason."""

    streams: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=_histograms)

    def copy(self) -> RequestCounts:
        """Return a copy of all counters."""
        return RequestCounts(Counter(self.streams), {name: each.copy() for name, each in self.histograms.items()})


class RequestWatch(EngineObserver):
    """Count the requests of a core."""

    def __init__(self, core: Core) -> None:
        """Count the requests that are queued from now on."""
        self.counts = RequestCounts()
        self.counts.histograms["gap"] = core.token_times.histogram  # of all requests since the load
        core.observers.append(self)

    def added(self, request: Request) -> None:
        """Count a request at its end. The channel logs an exception of that."""
        request.channel.listen(partial(self._ended, request), end=True)

    def _ended(self, request: Request) -> None:
        try:
            reply = request.channel.wait(0)
        except RadixKVError:
            return
        if request.max_tokens:  # 0: only the prompt was computed
            self._finished(request, [reply, *reply.alternatives])

    def _finished(self, request: Request, replies: list[Completion]) -> None:
        usage, histograms = replies[0].usage, self.counts.histograms
        assert request.reported.started_at is not None
        queued = request.reported.started_at - request.reported.submitted
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
