"""Close the requests of a replay with the recorded facts, and with the hints that follow a + in a policy's name.

"returns" announces when the results of tool calls come: the median of the tenant's earlier gaps after such calls. "end"
demotes the text of a session's last request, as `ChatSession.close` does. It is an oracle: traces have no such event.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable
from statistics import median

from radixkv.cache import Hint, PrefixCache, Sequence
from radixkv_traces.workload import Workload

HINTS = ("returns", "end")
LEAST, KEPT = 5, 64  # gaps that a median needs, and the number of latest gaps that are kept


class Closing:
    """Close the sequences of a replay in the order of its requests."""

    def __init__(self, workload: Workload, hints: Collection[str]) -> None:
        self._requests, self._times, self._hints = workload.requests, workload.times, hints
        self._last = {(each.namespace, each.session): index for index, each in enumerate(workload.requests)}
        self._gaps = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=KEPT))  # by tenant and stop reason
        self._called = dict[Hashable, tuple[deque[float], float]]()  # by session: its gaps, and the time of its call

    def close(self, index: int, sequence: Sequence, cache: PrefixCache) -> None:
        """Close the sequence of a request. O(depth)."""
        request = self._requests[index]
        hints = () if request.session is None else self._hints
        returns_in = self._returns_in(index) if "returns" in hints else None
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length, returns_in=returns_in))
        if "end" in hints and self._last[request.namespace, request.session] == index:
            match = cache.match(request.blocks, request.namespace)
            cache.demote(request.blocks[: match.matched + match.host], request.namespace)

    def _returns_in(self, index: int) -> float | None:
        """Learn from a request, and return the median gap after calls such as its own; None before LEAST gaps."""
        request, now = self._requests[index], self._times[index]
        gaps, since = self._called.pop((request.namespace, request.session), (deque(), now))
        gaps.append(now - since)
        if not (request.stop or "").startswith("tool_"):  # tool_use, tool_calls
            return None
        gaps = self._gaps[request.namespace, request.stop]
        self._called[request.namespace, request.session] = gaps, now
        return median(gaps) if len(gaps) >= LEAST else None
