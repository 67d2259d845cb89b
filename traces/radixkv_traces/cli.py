"""The commands of `radixkv-replay`, and the options, sizes and progress that they share."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TextIO, TypeVar

from radixkv.cli import entry_point
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.removed import parse_arguments
from radixkv.sizing.kv_shapes import kv_shape
from radixkv.sizing.kv_size import KV_DTYPES, UNITS
from radixkv_traces.formats import FORMATS, SAMPLES, ChatRequest, Request, Source, TraceRequest, open_trace, sample
from radixkv_traces.text_blocks import estimate, text_blocks, tokenizer
from radixkv_traces.time_checks import warnings
from radixkv_traces.workload import Workload, block_tokens_of, by_time, interleave, prepare

T = TypeVar("T")

_PERIOD = 0.1  # seconds between two drawings
_LINE_PERIOD = 10.0  # seconds between two lines in a file

_FORMS = "a share of the trace's unique blocks (2.5%), blocks (4096), tokens (500ktok) or bytes (16GB, with --model)"
MAX_BLOCKS = 1 << 26
"""The most blocks of a simulated pool, which takes a few bytes for each: petabytes of a large model's KV."""

TEXT_BLOCK_TOKENS = 16
"""The default block size of text traces."""

PROGRAM = "radixkv-replay"
COMMANDS = (
    "simulate_command", "fragmentation", "generate", "import_command", "lint.command", "live.command", "report_command",
)  # fmt: skip
"""Modules of this package with `add(add_command)`, which adds the command, and `run(arguments)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns its status."""
    return entry_point.run(PROGRAM, parse_arguments(_parser(), argv))


def _parser() -> argparse.ArgumentParser:
    about = "Simulate a cache on recorded workloads, or replay them against an engine."
    parser, add = entry_point.parser(PROGRAM, about)
    for name in COMMANDS:
        import_module(f"radixkv_traces.{name}").add(add)
    return parser


def add_trace(parser: argparse.ArgumentParser, *, tokenizer: bool = True) -> None:
    """Add the TRACE argument and the options that read and cut it; `tokenizer` where text becomes block ids."""
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a file (.gz too), - for standard input, or sample:NAME ({', '.join(SAMPLES)})"
    )
    reading = parser.add_argument_group("reading the trace")
    formats = f"one of {', '.join(FORMATS)}; auto, the default, recognises it by the first line"
    reading.add_argument("--format", choices=FORMATS, default="auto", metavar="FORMAT", help=formats)
    reading.add_argument(
        "--block-tokens", type=positive, metavar="N",
        help="tokens of a recorded block (default: stated in the file or derived from its lengths; 16 for text)",
    )  # fmt: skip
    if tokenizer:
        reading.add_argument(
            "--tokenizer", metavar="PATH",
            help="tokenizer for text: a folder, a tokenizer.json or 'tiny' (default: a token for every 4 bytes)",
        )  # fmt: skip
    reading.add_argument("--start", type=seconds, default=0.0, metavar="S", help="skip requests before second S")
    reading.add_argument("--end", type=seconds, metavar="S", help="skip requests from second S on")
    reading.add_argument("--limit", type=positive, metavar="N", help="read at most N requests")
    reading.add_argument(
        "--interleave", type=positive, metavar="N",
        help="alternate between N sessions at a time instead of file order, for traces without times",
    )  # fmt: skip


def load(arguments: argparse.Namespace, reader: Iterator[Request] | None = None) -> Workload:
    """Load the part of the trace that the options name, in the order of its times.

    `reader` are the requests of the trace if they were opened before.
    Raises InvalidInput if no request is left, or for a bad line. Only one line's ids are in memory as they were read;
    the others are held as numbers.
    """
    with Progress("reading") as progress:
        chosen = window(reader or open_trace(source(arguments.trace), arguments.format), arguments)
        workload = prepare(_blocks(progress.counted(chosen), arguments), 1)
    if not workload.requests:
        raise InvalidInput(f"{arguments.trace}: no request, or none between --start and --end")
    block_tokens = arguments.block_tokens or block_tokens_of(workload.requests)
    warn(workload.requests)
    workload = by_time(replace(workload, block_tokens=block_tokens))
    return (
        prepare(interleave(workload.requests, arguments.interleave), block_tokens) if arguments.interleave else workload
    )


def warn(requests: Iterable[Request]) -> None:
    """Print a warning to stderr for each property of a trace's times that is not plausible. O(n log n)."""
    for text in warnings(requests):
        print(f"{PROGRAM}: warning: {text}", file=sys.stderr)


def source(name: str) -> Source:
    """Return a shipped sample, or the path unchanged."""
    return sample(name.removeprefix("sample:")) if name.startswith("sample:") else name


def window(requests: Iterable[Request], arguments: argparse.Namespace) -> Iterator[Request]:
    """Return the requests from --start to --end, at most --limit. The whole file is read, because it may be out of
    order.
    """
    begin = arguments.start * 1000 or float("-inf")  # where lines are out of order, times may be negative
    end = float("inf") if arguments.end is None else arguments.end * 1000
    return islice((each for each in requests if begin <= each.timestamp < end), arguments.limit)


def name_of(trace: str) -> str:
    """Return the name of a trace for a table."""
    return "standard input" if trace == "-" else trace if trace.startswith("sample:") else Path(trace).name


def positive(text: str) -> int:
    """Parse an int >= 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is an int of at least 1")
    return number


def seconds(text: str) -> float:
    """Parse a number >= 0, for argparse."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: allowed are seconds >= 0")
    return number


def _blocks(requests: Iterator[Request], arguments: argparse.Namespace) -> Iterator[TraceRequest]:
    """Convert text to block ids; a file has only one kind of request."""
    first = next(requests, None)
    if isinstance(first, ChatRequest):
        encode = estimate if arguments.tokenizer is None else tokenizer(arguments.tokenizer)
        texts = (each for each in chain([first], requests) if isinstance(each, ChatRequest))
        yield from text_blocks(texts, arguments.block_tokens or TEXT_BLOCK_TOKENS, encode)
    elif first is not None:
        if arguments.tokenizer is not None:
            raise InvalidInput("--tokenizer: this trace has block ids, no text")
        yield from (each for each in chain([first], requests) if isinstance(each, TraceRequest))


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool's size as the user wrote it, and in blocks."""

    text: str
    blocks: int


def parse_capacity(
    text: str, unique_blocks: int, block_tokens: int, kv_bytes: int | None = None, name: str = "capacity"
) -> Capacity:
    """Parse a share, a number, tokens or bytes into blocks; `kv_bytes` are the bytes of one token. Raises InvalidInput.

    >>> [parse_capacity(each, 1000, 512, 131072).blocks for each in ("2.5%", "300", "1Mtok", "16GiB")]
    [25, 300, 1953, 256]
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|(?:[kmgt]i?)?(?:b|tok)|)\s*", text, re.IGNORECASE)
    if match is None:
        raise InvalidInput(f"{name} {text!r}: allowed is {_FORMS}")
    number, unit = match[1], match[2].lower()
    if unit == "%":
        blocks = int(unique_blocks * float(number) / 100)
    elif unit == "":
        if "." in number:
            raise InvalidInput(f"{name} {text!r}: blocks are a whole number")
        blocks = int(number)
    elif unit.endswith("tok"):
        blocks = int(float(number) * UNITS[unit[:-3]]) // block_tokens
    else:
        if kv_bytes is None:
            raise InvalidInput(f"{name} {text!r}: bytes say nothing without a model; give --model or --kv-bytes")
        blocks = int(float(number) * UNITS[unit[:-1]]) // (kv_bytes * block_tokens)
    if blocks > MAX_BLOCKS:
        raise InvalidInput(f"{name} {text!r}: {blocks:,} blocks; at most {MAX_BLOCKS:,} can be simulated")
    if blocks < 1 and (unit != "%" or not float(number)):
        raise InvalidInput(f"{name} {text!r}: not even one block of {block_tokens} tokens")
    return Capacity(text.strip(), max(1, blocks))


def kv_bytes_per_token(model: str, kv_dtype: str = "auto") -> int:
    """Return the bytes of keys and values of a token in all layers of a model: its folder or file, or a name.

    They are counted as `radixkv plan` counts them, in the dtype of the saved weights or in the format `kv_dtype`.
    Raises InvalidInput where nothing says so; --kv-bytes gives the figure directly.

    >>> kv_bytes_per_token("llama-3.1-8b")
    131072
    """
    try:
        return kv_shape(model).bytes_per_token(kv_dtype=kv_dtype)
    except (InvalidInput, UnsupportedModel) as error:
        raise InvalidInput(f"{error}; or give --kv-bytes") from error


def add_kv_bytes(group: argparse._ArgumentGroup) -> None:
    """Add the options that state the bytes of a token."""
    group.add_argument(
        "--model", metavar="NAME", help="model that defines the bytes of a token: a folder, a config.json, or a name"
    )
    group.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), default="auto", help="format of KV, for --model")
    group.add_argument("--kv-bytes", type=positive, metavar="N", help="bytes of KV for each token, instead of --model")


def kv_bytes_of(arguments: argparse.Namespace) -> int | None:
    """Return the bytes of a token that the options state; None without them. Raises InvalidInput for a lone format."""
    if arguments.kv_bytes or not arguments.model:
        if arguments.kv_dtype != "auto":
            raise InvalidInput(f"--kv-dtype {arguments.kv_dtype} is a format of --model, without --kv-bytes")
        return arguments.kv_bytes or None
    return kv_bytes_per_token(arguments.model, arguments.kv_dtype)


@dataclass
class Stop:
    """The exit status after an interrupt: 130, or 128 plus the number of the signal."""

    status: int = entry_point.INTERRUPTED


@contextmanager
def interrupted_by_signals() -> Iterator[Stop]:
    """Interrupt the block on SIGTERM and SIGHUP as Ctrl-C does, so that results are printed; a second one ends the
    process.
    """
    stop = Stop()

    def interrupt(number: int) -> None:
        stop.status = 128 + number
        handler = signal.getsignal(signal.SIGINT)  # asyncio has its own
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)

    with entry_point.handled(entry_point.STOP_SIGNALS, interrupt):
        yield stop


class Progress:
    """A line on a terminal that is drawn over, and cleared at the end; in a file, a new line every ten seconds."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._drawn_over = self._stream.isatty()
        self._drawn = 0.0 if self._drawn_over else time.monotonic()
        self._width = 0

    def __call__(self, done: int, total: int | None = None, figures: Iterable[str] = ()) -> None:
        """Report that `done` of `total` are done, and some figures. O(1); drawn at most ten times a second."""
        if (now := time.monotonic()) - self._drawn < (_PERIOD if self._drawn_over else _LINE_PERIOD):
            return
        self._drawn = now
        share = f"{done:,}" if not total else f"{done:,} of {total:,} ({done / total:.0%})"
        line = " · ".join((f"{self._name}: {share} requests", *figures))
        if self._drawn_over:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def counted(self, each: Iterable[T]) -> Iterator[T]:
        """Return the same items, counted as they pass."""
        for number, item in enumerate(each):
            self(number)
            yield item

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
