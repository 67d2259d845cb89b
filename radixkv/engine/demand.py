"""How many blocks a request may still take: the arithmetic behind admission.

Knows lengths and the block size. Knows no pool: what is free there is the scheduler's to ask.

A request is admitted when what it is *sure* to take fits: its prompt, what it has sampled so far, and one block more
for each stream. Streams grow beyond that promise, so blocks may run out, and somebody is preempted. Who was preempted
once is promised all that it may take at *most*, max_tokens included, when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.engine.request import Request, Stream


def still_to_take(request: Request, block_size: int, length: int | None = None, *, most: bool = False) -> int:
    """Blocks that all streams of a request may still take together, without the spare ones.

    `length` is where its first stream begins if it does not run yet. `most` counts up to max_tokens in any case.
    A part-filled last block counts: whoever writes behind somebody else's tokens takes a copy. So does each fork.
    """
    return sum(_blocks(end, block_size) - at // block_size for at, end in _spans(request, length, most))


def to_spare(request: Request) -> int:
    """One block a stream: publishing what the tree has by then holds the tree's copy of a part-filled block as well."""
    return request.streams_left


def blocks_alone(request: Request, block_size: int) -> int:
    """At most how many blocks a running request would leave to others if it gave way."""
    awake = [stream.sequence for stream in request.live if stream.awake]
    shared = len(request.prompt) if len(awake) > 1 else 0  # its streams hold their prompt together
    return sum(-(-(each.unshared_length + shared) // block_size) + 1 for each in awake)


def _spans(request: Request, length: int | None, most: bool) -> Iterator[tuple[int, int]]:
    """For each stream that is left, from where to where it computes; those to be forked begin behind the prompt."""
    prompt = len(request.prompt)
    for index, stream in enumerate(request.live):
        at = stream.sequence.length if stream.awake else prompt
        yield length if index == 0 and length is not None else at, _end(request, stream, most)
    for index in range(len(request.live), request.streams_left):
        yield (length or 0) if index == 0 else prompt, _end(request, None, most)


def _end(request: Request, stream: Stream | None, most: bool) -> int:
    if most or request.guaranteed:
        return request.computed_length
    return min(len(request.prompt) if stream is None else len(stream.tokens), request.computed_length)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
