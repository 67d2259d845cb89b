"""How many blocks a request needs, and which request is preempted when blocks run out.

A request is admitted when the blocks that it is sure to take fit: its prompt, what it has sampled so far, and one block
more for each stream. Streams grow beyond that promise, so blocks may run out, and a request is preempted. A preempted
request is promised all that it may take at most, max_tokens included, when it comes back.

Every victim policy takes paused requests first (their answers are not being read), then the lowest priority, then
requests that were never preempted. The last matters: a preempted request is admitted only if all that it may take fits,
so while one of those is preempted there is always another that was promised less, and no request of the lowest priority
is preempted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from radixkv.engine.request import Request, Stream


def blocks_needed(request: Request, block_size: int, length: int | None = None, *, most: bool = False) -> int:
    """Blocks that all streams of a request may still take together, without the spare ones.

    `length` is where its first stream begins if it does not run yet. `most` counts up to max_tokens in any case.
    A part-filled last block counts: whoever writes behind somebody else's tokens takes a copy. So does each fork.
    """
    return sum(_blocks(end, block_size) - at // block_size for at, end in _spans(request, length, most))


def headroom_blocks(request: Request) -> int:
    """One block a stream: publishing what the tree has by then holds the tree's copy of a part-filled block as well."""
    return request.streams_left


def most_blocks_freed(request: Request, block_size: int) -> int:
    """At most how many blocks a running request would leave to others if it gave way."""
    active = [stream.sequence for stream in request.live if stream.active]
    shared = len(request.prompt) if len(active) > 1 else 0  # its streams hold their prompt together
    return sum(-(-(each.unshared_length + shared) // block_size) + 1 for each in active)


def _spans(request: Request, length: int | None, most: bool) -> Iterator[tuple[int, int]]:
    """For each stream that is left, from where to where it computes; those to be forked begin behind the prompt."""
    prompt = len(request.prompt)
    for index, stream in enumerate(request.live):
        at = stream.sequence.length if stream.active else prompt
        yield length if index == 0 and length is not None else at, _end(request, stream, most)
    for index in range(len(request.live), request.streams_left):
        yield (length or 0) if index == 0 else prompt, _end(request, None, most)


def _end(request: Request, stream: Stream | None, most: bool) -> int:
    if most or request.guaranteed:
        return request.computed_length
    return min(len(request.prompt) if stream is None else len(stream.tokens), request.computed_length)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


Key = tuple[int, int]


def victim(running: Iterable[Request], policy: str) -> Request:
    """The request to preempt; O(running * depth of the tree)."""
    key = VICTIMS[policy]
    return min(running, key=lambda each: (not each.channel.paused, each.priority, each.guaranteed, key(each)))


def _cheapest(request: Request) -> Key:
    """Tokens to compute again if all that only it holds is evicted; of equals the one that came last."""
    active = [stream for stream in request.live if stream.active]
    tokens = sum(stream.sequence.unshared_length for stream in active)
    if len(active) > 1:  # its streams share the prompt with each other
        tokens += max(len(request.prompt) - request.streams[0].cached_tokens, 0)
    return tokens, -request.number


def _last(request: Request) -> Key:
    """The one that was admitted last (vLLM)."""
    return -request.admitted, -request.number


VICTIMS: dict[str, Callable[[Request], Key]] = {"cheapest": _cheapest, "last": _last}
