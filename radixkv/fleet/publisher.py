"""Publish the cached blocks of an engine, and the use of its pool, for Dynamo's router."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from radixkv.cache.block_events import BlockChanges, BlockEvents
from radixkv.engine.engine_thread import CoreClient
from radixkv.errors import EngineClosed
from radixkv.telemetry.records import namespace_value

INTERVAL = 0.1
"""Seconds between two looks at the cache."""
_LOOKS_PER_LOAD = 10

_log = logging.getLogger(__name__)


class Publisher:
    """One thread, which asks the engine's thread for changes between two steps, if there are any.

    If the engine ends before `close`, the process gets SIGTERM, and `broken` is set.
    """

    def __init__(self, client: CoreClient, snapshot: Callable[..., Any]) -> None:
        """`snapshot` makes Dynamo's record of the pool's use."""
        self._client, self._snapshot = client, snapshot
        self.broken = False
        self._stopped = threading.Event()
        self._loads: Any = None
        self._last_load: Any = None
        self._thread: threading.Thread | None = None

    def publish_loads(self, to: Any) -> None:
        """Publish the pool's use to Dynamo's `SnapshotPublisher`, from `start` on."""
        self._loads = to

    def start(self, to: Any) -> None:
        """Publish blocks to Dynamo's `KvEventPublisher` from now on."""
        core, call = self._client.core, self._client.thread.call
        events = call(lambda: BlockEvents(core.cache, salt_of)).result()
        self._thread = threading.Thread(target=self._run, args=(events, to), name="radixkv-fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish no more. May be called twice."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, events: BlockEvents, to: Any) -> None:
        waiting: list[dict[str, Any]] = []  # to be published
        looks = itertools.count()
        while not self._stopped.wait(INTERVAL):
            try:
                if len(events):
                    waiting += batch_of(self._client.thread.call(events.take).result())
                if waiting:
                    to.publish_batch(waiting)
                    waiting = []
                if next(looks) % _LOOKS_PER_LOAD == 0:
                    self._publish_load()
            except EngineClosed:  # it broke; without its process, Dynamo would send requests to it for ever
                self.broken = True
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except Exception:
                _log.exception("the router was not told what is cached; it is tried again")

    def _publish_load(self) -> None:
        if self._loads is None:
            return
        stats = self._client.thread.call(self._client.stats).result()
        load = self._snapshot(
            kv_used_blocks=stats.cache.held_blocks,
            kv_total_blocks=stats.cache.num_blocks,
            gpu_cache_usage=stats.cache.held_blocks / stats.cache.num_blocks,
            kv_cache_hit_rate=stats.hit_rate if stats.prompt_tokens else None,
            dp_rank=0,
        )
        if load != self._last_load:
            self._loads.publish(0, load)
            self._last_load = load


def salt_of(namespace: Any) -> str | None:
    """Return the `cache_salt` of the requests of a namespace, whose value it is."""
    value = namespace_value(namespace)
    return None if value is None else str(value)


def batch_of(changes: BlockChanges) -> list[dict[str, Any]]:
    """Return changes as Dynamo's events."""
    removed = [{"type": "removed", "block_hashes": changes.removed}] if changes.removed else []
    return [
        *removed,
        *(
            {
                "type": "stored",
                "token_ids": each.tokens.tolist(),
                "num_block_tokens": [len(each.tokens) // len(each.ids)] * len(each.ids),
                "block_hashes": each.ids.tolist(),
                "parent_hash": each.parent,
                "cache_salt": each.salt,
            }
            for each in changes.stored
        ),
    ]
