"""Measure how much of a KV memory holds tokens if each sequence gets one slab, a buddy block, or pages.

Prefixes are not shared here, so that only fragmentation is measured. Requests are admitted in trace order while they
fit. At every step each running sequence grows by one token, and finished sequences leave. Measuring ends when the last
request is admitted, so the draining memory does not count. `radixkv-replay fragmentation` prints the result.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.cli.entry_point import AddCommand, table
from radixkv.errors import InvalidInput
from radixkv_traces.cli import add_kv_bytes, add_trace, kv_bytes_of, load, name_of, parse_capacity, positive

Lengths: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The result of one reservation scheme on a trace; shares are means over the steps while requests waited."""

    scheme: str  # "contiguous", "buddy" or "paged"
    block_size: int | None  # of "paged"
    memory_tokens: int
    used: float  # share of the memory that holds tokens
    reserved_unused: float  # share of the memory that is reserved for a sequence, and empty
    unreserved: float  # share of the memory that is free, and too small for the next request
    sequences: float  # mean number of running sequences
    most_sequences: int
    preemptions: int
    refused: int  # requests that would not fit alone under this scheme
    left_out: int  # requests that would not fit alone under at least one scheme; no scheme runs them
    steps: int

    @property
    def used_of_reserved(self) -> float:
        """The share of reserved memory that holds tokens; 0.0 if nothing ran."""
        reserved = self.used + self.reserved_unused
        return self.used / reserved if reserved else 0.0


class Scheme(Protocol):
    """A way to reserve memory for sequences."""

    def admit(self, running: Lengths, length: int, final: int) -> bool:
        """Reserve for a sequence of `length` tokens that will have `final`; return False, and reserve nothing, if it
        does not fit.
        """

    def release(self, index: int) -> None:
        """Release the sequence at this place in the order of admission."""

    def fits_alone(self, final: int) -> bool:
        """Whether it would fit in an empty memory."""

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Tokens reserved, summed over the next `steps` steps, when all sequences grow by one a step."""

    def can_grow(self, lengths: Lengths, steps: int) -> bool:
        """Whether all sequences can grow by this number of tokens."""


def fragmentation(
    lengths: Iterable[tuple[int, int]], memory_tokens: int, slab: int, block_sizes: Sequence[int] = (8, 16, 32, 64, 128)
) -> list[Fragmentation]:
    """Compare slabs of `slab` tokens, buddy blocks, and pages of each size, for sequences of (prompt, output) tokens.

    All schemes do the same work: a request that one of them could never hold is left out of all. O(requests x running
    sequences) for each.
    """
    if slab < 1 or memory_tokens < slab:
        raise InvalidInput(f"{memory_tokens} tokens of memory hold no slab of {slab}")
    for size in block_sizes:
        if not 1 <= size <= memory_tokens:
            raise InvalidInput(f"block size {size}: allowed is 1 to the {memory_tokens} tokens of memory")
    schemes: list[tuple[str, int | None, Scheme]] = [
        ("contiguous", None, Paged(memory_tokens, slab, most=1)),  # one page that holds all of it
        ("buddy", None, Buddy(memory_tokens)),
        *(("paged", size, Paged(memory_tokens, size)) for size in block_sizes),
    ]
    asked = [(prompt, prompt + max(1, output)) for prompt, output in lengths]
    served = [each for each in asked if all(scheme.fits_alone(each[1]) for _, _, scheme in schemes)]
    return [
        replace(
            _run(name, size, scheme, served, memory_tokens),
            refused=sum(not scheme.fits_alone(final) for _, final in asked),
            left_out=len(asked) - len(served),
        )
        for name, size, scheme in schemes
    ]


def _run(
    name: str, block_size: int | None, scheme: Scheme, lengths: Sequence[tuple[int, int]], memory: int
) -> Fragmentation:
    """Run a scheme on sequences that would each fit alone."""
    replay = _Replay(scheme, lengths)
    replay.run()
    total = max(1, replay.steps) * memory
    return Fragmentation(
        name,
        block_size,
        memory,
        replay.used / total,
        (replay.reserved - replay.used) / total,
        1.0 - replay.reserved / total if replay.steps else 0.0,
        replay.sequences / max(1, replay.steps),
        replay.most,
        replay.preemptions,
        0,
        0,
        replay.steps,
    )


class _Replay:
    """The running sequences, in the order of admission, and sums over steps."""

    def __init__(self, scheme: Scheme, lengths: Sequence[tuple[int, int]]) -> None:
        self._scheme = scheme
        self._waiting = deque(lengths)
        self._lengths = np.zeros(0, np.int64)
        self._finals = np.zeros(0, np.int64)
        self.steps = self.used = self.reserved = self.sequences = self.most = self.preemptions = 0

    def run(self) -> None:
        self._admit()
        while self._waiting:
            rest = int((self._finals - self._lengths).min())
            steps = most_steps(self._scheme, self._lengths, rest)
            if steps:
                self._advance(steps)
            if steps < rest:
                self._preempt()  # no request is admitted before a sequence has left
            else:
                self._finish()
                self._admit()

    def _admit(self) -> None:
        while self._waiting:
            length, final = self._waiting[0]
            if not self._scheme.admit(self._lengths, length, final):
                break
            self._waiting.popleft()
            self._lengths = np.append(self._lengths, length)
            self._finals = np.append(self._finals, final)
        self.most = max(self.most, len(self._lengths))

    def _advance(self, steps: int) -> None:
        count = len(self._lengths)
        self.used += int(self._lengths.sum()) * steps + count * steps * (steps + 1) // 2
        self.reserved += self._scheme.reserved(self._lengths, steps)
        self.sequences += count * steps
        self.steps += steps
        self._lengths += steps

    def _preempt(self) -> None:
        """Preempt the last admitted sequence; it is the first to be admitted again, with all its tokens."""
        self.preemptions += 1
        last = len(self._lengths) - 1
        self._waiting.appendleft((int(self._lengths[last]), int(self._finals[last])))
        self._leave(last)

    def _finish(self) -> None:
        for index in np.flatnonzero(self._lengths == self._finals)[::-1]:
            self._leave(int(index))

    def _leave(self, index: int) -> None:
        self._scheme.release(index)
        self._lengths = np.delete(self._lengths, index)
        self._finals = np.delete(self._finals, index)


class Buddy:
    """The smallest power of two that holds the final length, which is known in advance: the best case of this scheme.

    A memory that is not a power of two is divided into several areas that are. A free block merges with its buddy when
    that is free too.
    """

    def __init__(self, memory: int) -> None:
        self._free: dict[int, list[int]] = {1 << order: [] for order in range(memory.bit_length())}
        self._taken: list[tuple[int, int]] = []  # (address, size) in order of admission
        at = 0
        for size in sorted(self._free, reverse=True):
            if memory & size:
                self._free[size].append(at)
                at += size
        self._largest = max(self._free)

    def admit(self, running: Lengths, length: int, final: int) -> bool:
        """Take the smallest free block that is large enough, halved as often as possible."""
        size = _power(final)
        found = next((each for each in sorted(self._free) if each >= size and self._free[each]), None)
        if found is None:
            return False
        at = self._free[found].pop(0)
        while found > size:
            found //= 2
            insort(self._free[found], at + found)
        self._taken.append((at, size))
        return True

    def release(self, index: int) -> None:
        """Free the block, and merge it with its buddy while that is free."""
        at, size = self._taken.pop(index)
        while size < self._largest and (at ^ size) in self._free[size]:
            self._free[size].remove(at ^ size)
            at &= ~size
            size *= 2
        insort(self._free[size], at)

    def fits_alone(self, final: int) -> bool:
        """Whether the largest area holds it."""
        return _power(final) <= self._largest

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Count whole blocks."""
        return sum(size for _, size in self._taken) * steps

    def can_grow(self, lengths: Lengths, steps: int) -> bool:
        """Return True: a block has room from the start."""
        return True


class Paged:
    """Pages of a fixed number of tokens, one more when the last is full; at most `most` pages for a sequence."""

    def __init__(self, memory: int, block_size: int, most: int | None = None) -> None:
        self._size = block_size
        self._blocks = memory // block_size
        self._most = self._blocks if most is None else most

    def admit(self, running: Lengths, length: int, final: int) -> bool:
        """Admit if there are pages for all sequences, and for one more token each."""
        return self.can_grow(np.append(running, length), 1)

    def release(self, index: int) -> None:
        """Do nothing: the lengths determine the pages."""

    def fits_alone(self, final: int) -> bool:
        """Whether the memory holds all of it in its pages."""
        return -(-final // self._size) <= self._most

    def reserved(self, lengths: Lengths, steps: int) -> int:
        """Sum the pages of the lengths at each step."""
        return self._size * int((_ceilings(lengths + steps, self._size) - _ceilings(lengths, self._size)).sum())

    def can_grow(self, lengths: Lengths, steps: int) -> bool:
        """Whether there are enough pages."""
        return int((-(-(lengths + steps) // self._size)).sum()) <= self._blocks


def most_steps(scheme: Scheme, lengths: Lengths, wanted: int) -> int:
    """Return the most steps, up to `wanted`, that all sequences can grow by. Bisection."""
    if scheme.can_grow(lengths, wanted):
        return wanted
    return bisect_left(range(1, wanted), True, key=lambda steps: not scheme.can_grow(lengths, steps))


def _power(tokens: int) -> int:
    return 1 << max(0, tokens - 1).bit_length()


def _ceilings(lengths: Lengths, size: int) -> Lengths:
    """Return the sum of ceil(k / size) for k = 1..n, for each n."""
    full, rest = np.divmod(lengths, size)
    found: Lengths = size * full * (full + 1) // 2 + rest * (full + 1)
    return found


# ---- the command


_SLABS = 32  # slabs in the default memory


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    about = "simulate the memory wasted by slabs, buddy blocks and pages on a trace; loads no model"
    epilog = "Requests run in the order of their times while they fit in the memory; prefixes are not shared."
    parser = add_command("fragmentation", about, __name__, epilog=epilog)
    add_trace(parser)
    pool = parser.add_argument_group("memory")
    pool.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens of a slab; default: the longest request with its answer",
    )
    pool.add_argument(
        "--memory", metavar="SIZE", help=f"size: tokens (500ktok), or bytes (16GB) with --model; default {_SLABS} slabs"
    )
    pool.add_argument(
        "--block-sizes",
        type=_sizes,
        default=[8, 16, 32, 64, 128],
        metavar="LIST",
        help="page sizes; default 8,16,32,64,128",
    )
    add_kv_bytes(pool)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Replay the lengths under each scheme, and print the result."""
    workload = load(arguments)
    lengths = [(request.input_length, request.output_length) for request in workload.requests]
    slab = arguments.max_length or max(prompt + max(1, output) for prompt, output in lengths)
    rows = fragmentation(lengths, _memory(arguments, slab), slab, arguments.block_sizes)
    summary = {
        "trace": name_of(arguments.trace),
        "requests": len(lengths),
        "left_out": rows[0].left_out,
        "max_length": slab,
        "longest": max(prompt + max(1, output) for prompt, output in lengths),
    }
    if arguments.json:
        each = [{**asdict(row), "used_of_reserved": row.used_of_reserved} for row in rows]
        print(json.dumps({**summary, "memory_tokens": rows[0].memory_tokens, "rows": each}))
    else:
        print(_text(summary, rows))
    return 0


def _memory(arguments: argparse.Namespace, slab: int) -> int:
    if arguments.memory is None:
        return _SLABS * slab
    if arguments.memory.strip().endswith("%"):
        raise InvalidInput(f"memory {arguments.memory!r}: allowed are tokens (500ktok), or bytes (16GB) with --model")
    return parse_capacity(arguments.memory, 0, 1, kv_bytes_of(arguments), name="memory").blocks


def _text(summary: dict[str, Any], rows: list[Fragmentation]) -> str:
    head = (
        f"{summary['trace']}: {summary['requests']:,} requests of at most {summary['longest']:,} tokens, "
        f"in a memory of {rows[0].memory_tokens:,} tokens, with slabs of {summary['max_length']:,}"
    )
    columns = ("reserved as", "used", "reserved, empty", "unreserved", "sequences", "most", "preemptions", "refused")
    lines = [_cells(row) for row in rows]
    parts = [head, table(columns, lines)]
    left_out, served = summary["left_out"], summary["requests"] - summary["left_out"]
    if left_out:
        parts.append(
            f"{left_out:,} of {summary['requests']:,} requests are in no row: "
            "under at least one scheme each would not fit even alone."
        )
    if not served:
        parts.append("No request is left: give a larger --max-length or --memory.")
    elif not all(row.steps for row in rows):
        parts.append("Rows without figures had room for all remaining requests at once: give a smaller --memory.")
    return "\n\n".join(parts)


def _cells(row: Fragmentation) -> list[str]:
    name = row.scheme if row.block_size is None else f"{row.scheme}, {row.block_size}"
    if not row.steps:
        return [name, "", "", "", "", f"{row.most_sequences:,}", "", f"{row.refused:,}"]
    return [
        name,
        f"{row.used:.1%}",
        f"{row.reserved_unused:.1%}",
        f"{row.unreserved:.1%}",
        f"{row.sequences:,.1f}",
        f"{row.most_sequences:,}",
        f"{row.preemptions:,}",
        f"{row.refused:,}",
    ]


def _sizes(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]
