"""Measure on a second thread which hit rates an LRU pool of other sizes would have.

The engine's thread only queues each request that ended. The curve keeps hashes of tokens, with a random key.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.engine.observers.trace_writer import CLOSE_TIMEOUT
from radixkv.telemetry.what_if import SIZES, WhatIf, WhatIfReport, prefix_ids

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.config import EngineConfig
    from radixkv.engine.request import Request

_log = logging.getLogger(__name__)
MAX_QUEUED = 1_000  # requests in the inbox: while there are more, the oldest ones are dropped and counted
PAUSE = 0.25  # seconds until a request is added, unless a report is requested: steps that follow do not wait for that


class WhatIfThread:
    """Collects the curve of one engine; `inbox` takes each `Request` that has ended."""

    def __init__(self, config: EngineConfig, cache: PrefixCache) -> None:
        """Start the thread, if `what_if` is set. It does not keep the cache alive."""
        self.inbox: SimpleQueue[Request | Future[WhatIfReport | None] | None] = SimpleQueue()
        self._config, self._cache, self._block_size = config, weakref.ref(cache), cache.block_size
        self._curve: WhatIf | None = WhatIf(cache.num_blocks + cache.host_blocks, cache.block_size)
        self._report: WhatIfReport | None = None
        self._secret, self._asked = secrets.token_bytes(32), threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixkv-what-if", daemon=True)
        if config.what_if:
            self._thread.start()

    def ask(self) -> Future[WhatIfReport | None]:
        """Request a report that includes every request in the inbox; None if it is off, or after a fault."""
        answer = Future[WhatIfReport | None]()
        if self._thread.is_alive():
            self.inbox.put(answer)
            self._asked.set()
        else:
            answer.set_result(None)
        return answer

    def latest(self) -> dict[str, Any] | None:
        """Return the fields of the newest report at once, and request a report for the next call."""
        self.ask()
        return None if self._report is None else self._report.as_fields()

    def crashed(self, error: BaseException) -> None:
        """Do nothing: there is no file to end."""

    def close(self) -> None:
        """End the thread after the requests in the inbox. May be called twice."""
        if self._thread.is_alive():
            self.inbox.put(None)
            self._asked.set()
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        """Take requests and answer callers until the end. A fault is logged, and ends the curve only."""
        while (item := self.inbox.get()) is not None:
            if not isinstance(item, Future) and self.inbox.empty():
                self._asked.wait(PAUSE)
            try:
                if self._curve is not None:
                    self._take(self._curve, item)
            except Exception:
                self._curve = self._report = None
                _log.exception("the what-if curve has ended; the engine goes on")
            if isinstance(item, Future):
                self._asked.clear()
                item.set_result(self._report)
            del item  # a waiting thread must not keep the last request alive

    def _take(self, curve: WhatIf, item: Request | Future[WhatIfReport | None]) -> None:
        """Add a request whose prompt the engine has counted, drop it if too many wait, or make a report."""
        if isinstance(item, Future):
            report = curve.report(time.monotonic())
            self._report = replace(report, reasons=reasons(self._config, self._cache(), report))
        elif item.reported.counted and self.inbox.qsize() > MAX_QUEUED:
            curve.drop()
        elif item.reported.counted and not item.parts.slots:  # the curve has no compressed prefixes
            key = self._secret + str(item.namespace).encode()  # the number of the namespace
            kept = (np.array(each.tokens, np.int32)[: each.counts.reached] for each in item.streams)
            first, *others = (prefix_ids(each, self._block_size, key) for each in kept)
            curve.add(first, len(item.prompt), item.streams[0].counts.cached_tokens, time.monotonic())
            for ids in others:
                curve.touch(ids)


def reasons(config: EngineConfig, cache: PrefixCache | None, report: WhatIfReport) -> tuple[str, ...]:
    """Return why the measured hit rate is far above or below the rate of the curve at the pool's size; () if not."""
    gap = report.curve.measured - report.curve.hit_rates[SIZES.index(1.0)]
    if cache is None or abs(gap) <= 0.03:
        return ()
    above, below = gap > 0, gap < 0
    held = {
        "another policy evicts": config.eviction != "lru",
        "pins hold blocks": cache.state.pins.nodes(),
        "prefix_cache is off": below and not config.prefix_cache,
        "hits need a recurrent state": below and cache.state_rows,
        "the curve begins at device + host blocks": below and cache.host_blocks,
        "hits end on multiples of prefill_chunk": below and config.deterministic,
        "running requests and part-filled blocks take room": below and config.prefix_cache,
        "hits are read from a disk, too": above and config.disk_cache is not None,
        "hits may end inside a block": above,
    }
    return tuple(reason for reason, holds in held.items() if holds)
