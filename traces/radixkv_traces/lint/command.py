"""`radixkv-replay lint`: the parts of prompts that break caching in a log, their cost, and a remedy for each."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict

from radixkv.cli.entry_point import FAILED, AddCommand, table
from radixkv.errors import InvalidInput
from radixkv_traces.cli import Progress, add_trace, interrupted_by_signals, name_of, source, window
from radixkv_traces.formats import FORMAT_TABLE, TEXT_FORMATS, ChatRequest, TraceReader, open_trace
from radixkv_traces.lint.linter import Linter, LintReport
from radixkv_traces.text_blocks import estimate, tokenizer
from radixkv_traces.workload import interleave

_ABOUT = "find the parts of prompts that break caching in a log, with their cost and a remedy; loads no model"


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = add_command(
        "lint", _ABOUT, __name__,
        epilog="Each prompt is compared with earlier ones of its namespace, in a cache without limit. With "
        "--block-tokens, hits end at full blocks. Ctrl-C prints the findings so far.",
    )  # fmt: skip
    add_trace(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--show-text", action="store_true", help="show both texts around the first difference")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    about = "return 1 if all findings together cost more than this share, such as 5%%"
    shown.add_argument("--fail-over", type=_share, default=1.0, metavar="SHARE", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if they cost more than the allowed share, or the status of an interrupt."""
    encode = estimate if arguments.tokenizer is None else tokenizer(arguments.tokenizer)
    trace, status = open_trace(source(arguments.trace), arguments.format), 0
    linter = Linter(encode, arguments.block_tokens or 1)
    with interrupted_by_signals() as stop, Progress("reading") as progress:
        try:
            for request in progress.counted(_requests(trace, arguments)):
                linter.add(request)
        except KeyboardInterrupt:
            status = stop.status
    report = linter.report()
    if not report.requests and not status:
        raise InvalidInput(f"{arguments.trace}: no request, or none between --start and --end")
    lacks = FORMAT_TABLE[trace.format].lacks if report.requests else ()
    found = {"trace": arguments.trace, "finished": not status, **asdict(report), "not_in_file": lacks}
    for finding in [] if arguments.show_text else found["findings"]:
        del finding["before"], finding["after"]
    lines = _text(report, name_of(arguments.trace), show=arguments.show_text)
    lines += [f"not in the file: {text}" for text in lacks]
    print(json.dumps(found) if arguments.json else "\n".join(lines))
    return status or (FAILED if report.cost > arguments.fail_over * report.prompt_tokens else 0)


def _requests(trace: TraceReader, arguments: argparse.Namespace) -> Iterator[ChatRequest]:
    chosen = window(trace, arguments)
    for request in interleave([*chosen], arguments.interleave) if arguments.interleave else chosen:
        if not isinstance(request, ChatRequest):
            formats = ", ".join(TEXT_FORMATS)
            raise InvalidInput(f"{arguments.trace}: this trace has no text; formats with text are {formats}")
        yield request


def _share(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", text):
        raise argparse.ArgumentTypeError(f"{text}: allowed is a share such as 5%")
    return float(text[:-1]) / 100


def _text(report: LintReport, name: str, *, show: bool) -> list[str]:
    cost, size = report.cost, report.prompt_tokens
    lines = [
        f"{name}: {report.requests:,} requests, {size:,} prompt tokens, {report.missed_tokens:,} missed; "
        f"breaks cost {cost:,} ({cost / max(1, size):.1%})"
    ]
    rows = []
    for each in report.findings:
        day = "-" if each.tokens_a_day is None else f"{each.tokens_a_day:,.0f}"
        rows.append((each.rule, each.place, f"{each.requests:,}", f"{each.tokens:,}", f"{each.share:.1%}", day))
        lines.append(f"{each.rule}: {each.remedy}")
        lines += [f"  before {each.before!r}", f"  after  {each.after!r}"] if show else []
    columns = "rule", "place", "requests", "tokens", "share", "tokens a day"
    lines[1:1] = ["", table(columns, rows, left=(0, 1)), ""] if rows else []
    return lines
