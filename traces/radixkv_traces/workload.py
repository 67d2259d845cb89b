"""A trace made ready to be replayed many times: every different prefix has a number, and who had it before is known.

Knows recorded requests. Knows no cache and no policy. A recorded block id is looked up below the block before it and
within its namespace, so that two prompts share a number exactly if they share all text up to there, whether or not the
trace's own ids promise that.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import inf
from operator import attrgetter, is_
from typing import TypeVar

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.prefixes import Numbers, prefix_numbers
from radixkv_traces.records import TraceRequest

_NONE = array("q")
R = TypeVar("R", bound=TraceRequest | ChatRequest)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests whose blocks are numbered 0, 1, ... in order of first use; made by `prepare`."""

    requests: list[TraceRequest]  # `blocks` has typecode "i" and names prefixes
    block_tokens: int
    unique_blocks: int  # the capacity at which nothing is ever evicted
    above: array[int]  # block -> the block before it, -1 for a prompt's first
    known: array[int]  # request -> its leading blocks that earlier requests had: what an infinite cache hits
    times: array[float]  # request -> seconds on a clock that never goes back; its number, if the trace tells no times

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests. O(requests)."""
        return sum(request.input_length for request in self.requests)

    def hit_tokens(self, index: int, blocks: int) -> int:
        """Tokens that a hit of so many leading blocks saves a request: never more than its prompt has."""
        return min(blocks * self.block_tokens, self.requests[index].input_length)


def prepare(requests: Iterable[TraceRequest], block_tokens: int) -> Workload:
    """Number the blocks of all requests, which may be made as they are read. InvalidInput for a block without tokens.

    O(n log n) in the blocks of all, and some 30 bytes for each while it works; 4 are kept.

    >>> from radixkv_traces.formats import parse
    >>> line = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [70, 50]}'
    >>> workload = prepare([parse(line), parse(line)], block_tokens=5)
    >>> workload.requests[0].blocks, workload.unique_blocks, workload.known
    (array('i', [0, 1]), 2, array('i', [0, 2]))
    """
    if not isinstance(block_tokens, int) or isinstance(block_tokens, bool) or block_tokens < 1:
        raise InvalidInput(f"block_tokens={block_tokens!r}: allowed is an int of at least 1")
    ids, counts, roots = array("q"), array("q"), array("q")
    names: dict[str | None, int] = {}
    bare = []
    for request in requests:
        ids += array("q", request.blocks)
        counts.append(len(request.blocks))
        roots.append(names.setdefault(request.namespace, len(names)))
        bare.append(replace(request, blocks=_NONE))
    numbers, above = prefix_numbers(ids, counts, roots)
    return _workload(bare, counts, numbers, array("i", above.tobytes()), block_tokens)


def _workload(
    bare: list[TraceRequest], counts: array[int], numbers: Numbers, above: array[int], block_tokens: int
) -> Workload:
    """The requests with their shares of the numbers. New blocks have the next numbers, and end a prompt."""
    numbered, known = [], array("i")
    seen = end = 0
    for request, count in zip(bare, counts, strict=True):
        end += count
        chain = array("i", numbers[end - count : end].tobytes())
        new = max(0, chain[-1] + 1 - seen) if chain else 0
        seen += new
        known.append(count - new)
        numbered.append(replace(request, blocks=chain))
    return Workload(numbered, block_tokens, len(above), above, known, _times(numbered))


def by_time(workload: Workload) -> Workload:
    """The same requests in the order of their times, those of one time as they were. O(n log n), O(blocks) if it turns.

    >>> from radixkv_traces.formats import parse
    >>> line = '{"timestamp": %d, "input_length": 5, "output_length": 1, "hash_ids": [7]}'
    >>> [each.timestamp for each in by_time(prepare([parse(line % 9), parse(line % 3)], 5)).requests]
    [3.0, 9.0]
    """
    ordered = sorted(workload.requests, key=attrgetter("timestamp"))
    if all(map(is_, ordered, workload.requests)):
        return workload
    return prepare(ordered, workload.block_tokens)


def _times(requests: Sequence[TraceRequest]) -> array[float]:
    times = array("d", accumulate((request.timestamp / 1000 for request in requests), max))
    return times if times and times[-1] > times[0] else array("d", range(len(times)))


def block_tokens_of(requests: Sequence[TraceRequest]) -> int:
    """The tokens of a block: what the lines say, or what fits all their lengths; InvalidInput if that is not clear.

    A prompt of n ids has between n - 1 and n + 1 blocks, as writers count the part-filled last one or not. 512, which
    is Mooncake's, is taken if it fits, else the one power of two that does. O(requests).
    """
    said = {request.block_tokens for request in requests} - {None}
    if len(said) > 1:
        raise InvalidInput(f"the lines' block_size differs ({sorted(map(str, said))}): give --block-tokens")
    for only in said:
        assert only is not None
        return only
    low = max((each.input_length / (len(each.blocks) + 1) for each in requests), default=0.0)
    high = min((each.input_length / (len(each.blocks) - 1) for each in requests if len(each.blocks) > 1), default=inf)
    fitting = [size for size in (1 << power for power in range(21)) if low < size <= high]
    if low < 512 <= high:
        return 512
    if len(fitting) != 1:
        raise InvalidInput(f"the lengths fit blocks of {low:.1f} to {high:.1f} tokens: say which by --block-tokens")
    return fitting[0]


def interleave(requests: Iterable[R], sessions: int) -> Iterator[R]:
    """Sessions in turn, `sessions` of them at a time: one request each, then a session that is over makes way.

    For traces that tell no times; what has no session is one of its own. The order within a session stays, and times
    are forgotten (0.0), because they say another order. O(requests).
    """
    queues: dict[object, deque[R]] = {}
    for number, request in enumerate(requests):
        queues.setdefault(number if request.session is None else request.session, deque()).append(request)
    waiting = iter(queues.values())
    open_now = deque(islice(waiting, sessions))
    while open_now:
        queue = open_now.popleft()
        yield replace(queue.popleft(), timestamp=0.0)
        queue = queue or next(waiting, queue)
        if queue:
            open_now.append(queue)
