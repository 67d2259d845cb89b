"""The options that every command on a trace has, and the trace that they name, ready to be replayed.

Knows argparse, formats and workloads. Does not know what the commands do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from radixkv.errors import InvalidInput
from radixkv_traces.formats import FORMATS, SAMPLES, ChatRequest, Request, Source, TraceRequest, open_trace, sample
from radixkv_traces.progress import Progress
from radixkv_traces.text_blocks import estimate, text_blocks, tokenizer
from radixkv_traces.workload import Workload, block_tokens_of, by_time, interleave, prepare

TEXT_BLOCK_TOKENS = 16
"""Of a text trace, if nobody says another number."""


def add_trace(parser: argparse.ArgumentParser, *, tokenizer: bool = True) -> None:
    """TRACE, and what says how to read it and which part of it; `tokenizer` where text is to become block ids."""
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a file (.gz too), - for standard input, or sample:NAME ({', '.join(SAMPLES)})"
    )
    reading = parser.add_argument_group("reading the trace")
    reading.add_argument("--format", choices=FORMATS, default="auto", help="default: seen by how it begins")
    reading.add_argument(
        "--block-tokens", type=positive, metavar="N",
        help="tokens of a recorded block (default: what the file says, or what its lengths fit; of a text trace 16)",
    )  # fmt: skip
    if tokenizer:
        reading.add_argument(
            "--tokenizer", metavar="PATH",
            help="of text traces: a folder, a tokenizer.json or 'tiny' (default: a token for every 4 bytes)",
        )  # fmt: skip
    reading.add_argument("--start", type=seconds, default=0.0, metavar="S", help="skip requests before this second")
    reading.add_argument("--end", type=seconds, metavar="S", help="stop before this second")
    reading.add_argument("--limit", type=positive, metavar="N", help="at most so many requests")
    reading.add_argument(
        "--interleave", type=positive, metavar="N",
        help="take turns between N sessions at a time, in the place of file order: for traces without times",
    )  # fmt: skip


def load(arguments: argparse.Namespace) -> Workload:
    """The part of the trace that the options name, in the order of its times. InvalidInput if nothing is left of it,
    or at a bad line. The ids of one line are in memory as they were read, those of the others as numbers.
    """
    with Progress("reading") as progress:
        chosen = window(open_trace(source(arguments.trace), arguments.format), arguments)
        workload = prepare(_blocks(progress.counted(chosen), arguments), 1)
    if not workload.requests:
        raise InvalidInput(f"{arguments.trace}: no request, or none between --start and --end")
    block_tokens = arguments.block_tokens or block_tokens_of(workload.requests)
    workload = by_time(replace(workload, block_tokens=block_tokens))
    return (
        prepare(interleave(workload.requests, arguments.interleave), block_tokens) if arguments.interleave else workload
    )


def source(name: str) -> Source:
    """A shipped sample, or the path as it is."""
    return sample(name.removeprefix("sample:")) if name.startswith("sample:") else name


def window(requests: Iterable[Request], arguments: argparse.Namespace) -> Iterator[Request]:
    """Those from --start to --end, at most --limit; a file may be out of order, so all of it is looked at."""
    begin = arguments.start * 1000
    end = float("inf") if arguments.end is None else arguments.end * 1000
    return islice((each for each in requests if begin <= each.timestamp < end), arguments.limit)


def name_of(trace: str) -> str:
    """How a trace is called in a table."""
    return "standard input" if trace == "-" else trace if trace.startswith("sample:") else Path(trace).name


def positive(text: str) -> int:
    """An int >= 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is an int of at least 1")
    return number


def seconds(text: str) -> float:
    """A number >= 0, for argparse."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: allowed are seconds >= 0")
    return number


def _blocks(requests: Iterator[Request], arguments: argparse.Namespace) -> Iterator[TraceRequest]:
    """Text as block ids; a file has either."""
    first = next(requests, None)
    if isinstance(first, ChatRequest):
        encode = estimate if arguments.tokenizer is None else tokenizer(arguments.tokenizer)
        texts = (each for each in chain([first], requests) if isinstance(each, ChatRequest))
        yield from text_blocks(texts, arguments.block_tokens or TEXT_BLOCK_TOKENS, encode)
    elif first is not None:
        if arguments.tokenizer is not None:
            raise InvalidInput("--tokenizer: this trace has block ids, no text")
        yield from (each for each in chain([first], requests) if isinstance(each, TraceRequest))
