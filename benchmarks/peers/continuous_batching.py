"""Run transformers' continuous batching as a peer: its manager, its paged cache, with prefix sharing.

Uses the manager's public calls (`add_request` with streaming, `get_result`), and wraps a private one to count hits,
which the manager does not count. Pages have 16 tokens instead of 256, since only whole pages are shared, and a step has
up to 1,024 tokens. These settings were the fastest.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from serving_parts.servers import FLOAT32_TIE, Counted, bytes_per_token
from transformers import ContinuousBatchingConfig, GenerationConfig

PAGE = 16


class ContinuousBatching:
    """One manager over one model."""

    name = "continuous batching"
    tie = FLOAT32_TIE

    def __init__(self, model: Any, *, slots: int, kv_tokens: int, step_tokens: int = 1024) -> None:
        """Serve `model` from a cache of `kv_tokens`, `slots` requests and `step_tokens` tokens at most a step."""
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=kv_tokens // PAGE,
            max_batch_tokens=step_tokens,
            max_requests_per_batch=slots,
            allow_block_sharing=True,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(greedy, config)
        self._kv_bytes = kv_tokens * bytes_per_token(model.config)
        self._lock = threading.Lock()
        self._replies: dict[str, queue.SimpleQueue[Any]] = {}
        self._numbers = iter(range(1 << 62))
        self._hits = self._asked = 0
        self._manager.start()
        self._count_hits()
        self._closing = threading.Event()
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Greedy reply ids as they arrive."""
        mine: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            name = f"r{next(self._numbers)}"
            self._replies[name] = mine
            self._asked += len(prompt) + tokens - 1
        self._manager.add_request(prompt, request_id=name, max_new_tokens=tokens, streaming=True, eos_token_id=-1)
        seen = 0
        while seen < tokens:
            output = mine.get()
            if output is None or output.error is not None:
                raise RuntimeError(f"continuous batching: {'it stopped' if output is None else output.error}")
            new = output.generated_tokens[seen:]
            seen += len(new)
            if new:
                yield new

    def counted(self) -> Counted:
        """Totals since the start."""
        return Counted(self._hits, self._asked - self._hits, None, self._kv_bytes)

    def close(self) -> None:
        """Stop its threads."""
        self._closing.set()
        self._collector.join()
        self._manager.stop(block=True)
        self._manager.destroy()

    def _collect(self) -> None:
        """Pass each output to its stream, and end all streams when the manager has died."""
        while not self._closing.is_set():
            output = self._manager.get_result(timeout=0.1)
            with self._lock:
                waiting = list(self._replies.values()) if output is None else [self._replies[output.request_id]]
                if output is not None and output.is_finished():
                    del self._replies[output.request_id]
            if output is not None or not self._manager.is_running():
                for each in waiting:
                    each.put(output)

    def _count_hits(self) -> None:
        while self._manager.batch_processor is None:
            if not self._manager.is_running():
                raise RuntimeError("continuous batching did not start")
            time.sleep(0.01)
        cache = self._manager.batch_processor.cache
        search = cache.search_prefix_match

        def counted(request_id: str, prompt_ids: list[int]) -> int:
            found: int = search(request_id, prompt_ids)
            self._hits += found
            return found

        cache.search_prefix_match = counted
