"""Who makes room when blocks run out: the policies, as a table of keys; the request with the least key goes.

Knows requests and what it costs to bring one back. Knows no pool.

Every policy takes paused requests first (nobody reads their answers now), then the lowest priority, then those that
were never preempted. The last matters: who comes back is admitted only if all that it may take fits, so while one of
those must give way there is always another that was promised less, and nobody of the lowest priority loses its place
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.engine.request import Request

Key = tuple[int, int]


def victim(running: Iterable[Request], policy: str) -> Request:
    """The request to preempt; O(running * depth of the tree)."""
    key = VICTIMS[policy]
    return min(running, key=lambda each: (not each.outlet.lagging, each.priority, each.guaranteed, key(each)))


def _cheapest(request: Request) -> Key:
    """Tokens to compute again if all that only it holds is evicted; of equals the one that came last."""
    awake = [stream for stream in request.live if stream.awake]
    tokens = sum(stream.sequence.unshared_length for stream in awake)
    if len(awake) > 1:  # its streams share the prompt with each other
        tokens += max(len(request.prompt) - request.streams[0].cached_tokens, 0)
    return tokens, -request.number


def _last(request: Request) -> Key:
    """The one that was admitted last (vLLM)."""
    return -request.admitted, -request.number


VICTIMS: dict[str, Callable[[Request], Key]] = {"cheapest": _cheapest, "last": _last}
