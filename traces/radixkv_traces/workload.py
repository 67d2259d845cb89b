"""A trace prepared for many replays: every distinct prefix has a number, and its first appearance is recorded.

A recorded block id is looked up below the block before it and within its namespace. Two prompts therefore share a
number exactly if they share all text up to there, even where a trace reuses its ids. All ids are sorted at once, which
takes about 30 bytes for each and no Python object; an id that appears below several others is looked up one by one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import inf
from operator import attrgetter, is_
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.records import TraceRequest

Numbers: TypeAlias = npt.NDArray[np.int32]
_NONE = array("q")
R = TypeVar("R", bound=TraceRequest | ChatRequest)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests whose blocks are numbered 0, 1, ... in order of first use; made by `prepare`."""

    requests: list[TraceRequest]  # `blocks` has typecode "i" and names prefixes
    block_tokens: int
    unique_blocks: int  # the capacity at which nothing is ever evicted
    parents: array[int]  # for each block, the block before it; -1 for a prompt's first
    known: array[int]  # for each request, its leading blocks that earlier requests had: the hit of an infinite cache
    times: array[
        float
    ]  # for each request, seconds on a clock that never goes back; its number, if the trace has no times

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests. O(requests)."""
        return sum(request.input_length for request in self.requests)

    @property
    def lengths_only(self) -> bool:
        """Whether the trace has prompts but no blocks, so that no hit can be computed. O(requests)."""
        return not self.unique_blocks and self.input_tokens > 0

    def hit_tokens(self, index: int, blocks: int) -> int:
        """The tokens that a hit of this number of leading blocks saves: at most the prompt's length."""
        return min(blocks * self.block_tokens, self.requests[index].input_length)


def prepare(requests: Iterable[TraceRequest], block_tokens: int) -> Workload:
    """Number the blocks of all requests, which may be an iterator. Raises InvalidInput for a block without tokens.

    O(n log n) in the blocks of all requests. It takes about 30 bytes for each block while it works, and keeps 4.

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
    numbers, parents = prefix_numbers(ids, counts, roots)
    return _workload(bare, counts, numbers, array("i", parents.tobytes()), block_tokens)


def _workload(
    bare: list[TraceRequest], counts: array[int], numbers: Numbers, parents: array[int], block_tokens: int
) -> Workload:
    """Assign the numbers to the requests. New blocks have the next numbers, and are at the end of a prompt."""
    numbered, known = [], array("i")
    seen = end = 0
    for request, count in zip(bare, counts, strict=True):
        end += count
        chain = array("i", numbers[end - count : end].tobytes())
        new = max(0, chain[-1] + 1 - seen) if chain else 0
        seen += new
        known.append(count - new)
        numbered.append(replace(request, blocks=chain))
    return Workload(numbered, block_tokens, len(parents), parents, known, _times(numbered))


def by_time(workload: Workload) -> Workload:
    """Sort the requests by time; requests of the same time keep their order. O(n log n), and O(blocks) if it changes
    anything.

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
    """Return the tokens of a block: as the lines state, or as fits all their lengths. Raises InvalidInput if unclear.

    A prompt of n ids has between n - 1 and n + 1 blocks, because writers differ in counting a part-filled last block.
    512, the size of Mooncake's traces, is taken if it fits, otherwise the only power of two that does. It is also taken
    for a trace without blocks, which has lengths only. O(requests).
    """
    said = {request.block_tokens for request in requests} - {None}
    if len(said) > 1:
        raise InvalidInput(f"the lines' block_size differs ({sorted(map(str, said))}): give --block-tokens")
    for only in said:
        assert only is not None
        return only
    if not any(len(each.blocks) for each in requests):
        return 512
    low = max((each.input_length / (len(each.blocks) + 1) for each in requests), default=0.0)
    high = min((each.input_length / (len(each.blocks) - 1) for each in requests if len(each.blocks) > 1), default=inf)
    fitting = [size for size in (1 << power for power in range(21)) if low < size <= high]
    if low < 512 <= high:
        return 512
    if len(fitting) != 1:
        raise InvalidInput(f"the lengths fit blocks of {low:.1f} to {high:.1f} tokens: say which by --block-tokens")
    return fitting[0]


def interleave(requests: Iterable[R], sessions: int) -> Iterator[R]:
    """Take turns between `sessions` sessions at a time, one request each; a finished session is replaced by the next.

    For traces without times. A request without a session is a session of its own. The order within a session stays, and
    times become 0.0, because they would give another order. O(requests).
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


def prefix_numbers(ids: array[int], counts: array[int], roots: array[int]) -> tuple[Numbers, Numbers]:
    """Number the prefixes: an int32 for each id, in order of first use, and for each number its parent, -1 for a first
    block.

    The ids of all chains follow each other; `counts` are their lengths. Chains with different `roots` (>= 0) share
    nothing. O(n log n).

    >>> [each.tolist() for each in prefix_numbers(array("q", [70, 50, 70, 60]), array("q", [2, 2]), array("q", [0, 0]))]
    [[0, 1, 0, 2], [-1, 0, 0]]
    """
    numbers = _by_id(np.frombuffer(ids, np.int64))
    lengths, below = np.frombuffer(counts, np.int64), -1 - np.frombuffer(roots, np.int64)
    heads = (np.cumsum(lengths) - lengths)[lengths > 0]
    before = _before(numbers, heads, below[lengths > 0])
    parents = _parents(numbers, before)
    if not np.array_equal(parents[numbers], before):
        numbers = _by_path(numbers, heads, below[lengths > 0])
        parents = _parents(numbers, _before(numbers, heads, below[lengths > 0]))
    return numbers, np.maximum(parents, -1)


def _by_id(ids: npt.NDArray[np.int64]) -> Numbers:
    """Number equal ids equally, wherever they occur."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    new = np.ones(len(ids), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    del ordered
    first = order[new]  # first use of each id
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    numbers = np.empty(len(ids), np.int32)
    numbers[order] = rank[np.cumsum(new, dtype=np.int32) - 1]
    return numbers


def _by_path(ids: Numbers, heads: npt.NDArray[np.int64], roots: npt.NDArray[np.int64]) -> Numbers:
    """Number each id below the block before it, for ids that occur below several blocks. O(n) Python objects."""
    known: dict[tuple[int, int], int] = {}
    numbers = np.empty(len(ids), np.int32)
    for head, end, at in zip(heads.tolist(), [*heads[1:].tolist(), len(ids)], roots.tolist(), strict=True):
        for place, each in enumerate(ids[head:end].tolist(), head):
            numbers[place] = at = known.setdefault((at, each), len(known))
    return numbers


def _before(numbers: Numbers, heads: npt.NDArray[np.int64], roots: npt.NDArray[np.int64]) -> Numbers:
    """Return the number before each block, or its chain's root."""
    before = np.empty_like(numbers)
    before[1:] = numbers[:-1]
    before[heads] = roots
    return before


def _parents(numbers: Numbers, before: Numbers) -> Numbers:
    parents = np.empty(int(numbers.max(initial=-1)) + 1, np.int32)
    parents[numbers] = before
    return parents
