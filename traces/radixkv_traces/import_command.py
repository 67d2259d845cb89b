"""`radixkv-replay import`: convert a trace of any format to lines of block ids, without its text.

The lines go to stdout, in the format of radixkv's own recordings. Facts that the file does not have go to stderr.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from radixkv.cli.entry_point import AddCommand
from radixkv_traces.cli import add_trace, load, name_of, source
from radixkv_traces.formats import FORMAT_TABLE, ChatRequest, Request, open_trace
from radixkv_traces.mooncake import to_line
from radixkv_traces.records import TraceRequest
from radixkv_traces.workload import Workload

_ABOUT = "convert a trace of any format to lines of block ids, and list the facts that it lacks; loads no model"


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = add_command(
        "import", _ABOUT, __name__,
        epilog=f"Formats: {', '.join(FORMAT_TABLE)}. The output has lengths, times and numbers of blocks, no text. It "
        "is sorted by time, and its times begin at 0.",
    )  # fmt: skip
    add_trace(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each request on stdout, and a summary on stderr."""
    reader = open_trace(source(arguments.trace), arguments.format)
    first = next(reader, None)
    requests: Iterator[Request] = chain([] if first is None else [first], reader)
    workload = load(arguments, requests)
    for line in lines(workload):
        print(line)
    sys.stdout.flush()
    estimated = isinstance(first, ChatRequest) and arguments.tokenizer is None
    for text in summary(name_of(arguments.trace), reader.format, workload, estimated=estimated):
        print(text, file=sys.stderr)
    return 0


def lines(workload: Workload) -> Iterator[str]:
    """Return a line of the Mooncake format for each request; times count from the first request. O(blocks)."""
    begin = workload.requests[0].timestamp if workload.requests else 0.0
    size = None if workload.lengths_only else workload.block_tokens
    for request in workload.requests:
        time = round(request.timestamp - begin, 3)
        yield to_line(replace(request, timestamp=time, blocks=array("q", request.blocks), block_tokens=size))


def summary(name: str, format: str, workload: Workload, *, estimated: bool) -> list[str]:
    """Return a line with the size of a trace, and one for each fact that its file does not have."""
    requests = workload.requests
    sessions = len({request.session for request in requests if request.session is not None})
    blocks = "no blocks" if workload.lengths_only else f"{workload.unique_blocks:,} unique blocks"
    head = (
        f"{name} ({format}): {len(requests):,} requests, {sessions:,} sessions, {workload.input_tokens:,} prompt tokens"
    )
    lacks = [*FORMAT_TABLE[format].lacks, *_missing(requests)]
    if workload.lengths_only and not FORMAT_TABLE[format].lacks:
        lacks.append("the prompts, and with them all shared prefixes")
    if estimated:
        lacks.append("token ids: one token is assumed for every 4 bytes (--tokenizer counts them)")
    return [f"{head}, {blocks}", *(f"  not in the file: {text}" for text in lacks)]


def _missing(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Name the facts that no request has, or some requests have not."""
    if len({request.timestamp for request in requests}) == 1 < len(requests):
        yield "times: requests stay in file order (--interleave alternates between sessions)"
    if all(request.session is None for request in requests):
        yield "sessions"
    if all(request.stop is None for request in requests):
        yield "the reasons why answers ended"
    unanswered = sum(not request.output_length for request in requests)
    if unanswered:
        yield f"{unanswered:,} of {len(requests):,} answers or their lengths"
