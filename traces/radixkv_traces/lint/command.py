"""`radixkv-replay lint`: the prompts of a log that break caching, the cost of each kind of break, and its remedy."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from radixkv.cli.entry_point import FAILED, AddCommand, table
from radixkv.errors import InvalidInput
from radixkv_traces.cli import Progress, add_trace, interrupted_by_signals, name_of, source, window
from radixkv_traces.formats import TEXT_FORMATS, ChatRequest, open_trace
from radixkv_traces.lint.linter import Finding, Linter, LintReport
from radixkv_traces.text_blocks import estimate, tokenizer
from radixkv_traces.workload import interleave

_ABOUT = "find the parts of prompts that break caching, with their cost and a remedy; loads no model"
_COLUMNS = ("rule", "place", "requests", "tokens", "share", "tokens a day")


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = add_command(
        "lint", _ABOUT, __name__,
        epilog="Each prompt is compared with the earlier ones of its namespace in a cache without limit. With "
        "--block-tokens, hits end at full blocks. Ctrl-C prints the findings so far.",
    )  # fmt: skip
    add_trace(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument("--show-text", action="store_true", help="show both texts around the first difference")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument(
        "--fail-over",
        type=_share,
        metavar="SHARE",
        help="exit with 1 if the findings cost more of all prompt tokens: 5%%",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if they cost more than the allowed share, or the status of an interrupt."""
    linter = Linter(
        estimate if arguments.tokenizer is None else tokenizer(arguments.tokenizer), arguments.block_tokens or 1
    )
    status = 0
    with interrupted_by_signals() as stop, Progress("reading") as progress:
        try:
            for request in progress.counted(_requests(arguments)):
                linter.add(request)
        except KeyboardInterrupt:
            status = stop.status
    report = linter.report()
    print(json.dumps(_fields(arguments, report, status)) if arguments.json else _text(arguments, report))
    over = arguments.fail_over is not None and report.share > arguments.fail_over
    return status or (FAILED if over else 0)


def _requests(arguments: argparse.Namespace) -> Iterator[ChatRequest]:
    chosen = window(open_trace(source(arguments.trace), arguments.format), arguments)
    for request in interleave([*chosen], arguments.interleave) if arguments.interleave else chosen:
        if not isinstance(request, ChatRequest):
            raise InvalidInput(
                f"{arguments.trace}: this trace has no text; these formats have: {', '.join(TEXT_FORMATS)}"
            )
        yield request


def _share(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", text) or float(text[:-1]) > 100:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a share from 0% to 100%")
    return float(text[:-1]) / 100


def _fields(arguments: argparse.Namespace, report: LintReport, status: int) -> dict[str, Any]:
    fields = {"trace": arguments.trace, "finished": not status, "share": report.share, **asdict(report)}
    for finding in [] if arguments.show_text else fields["findings"]:
        del finding["before"], finding["after"]
    return fields


def _text(arguments: argparse.Namespace, report: LintReport) -> str:
    head = (
        f"{name_of(arguments.trace)}: {report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{report.missed_tokens:,} missed, {report.tokens:,} ({report.share:.1%}) by breaks"
    )
    if not report.findings:
        return head
    lines = [head, "", table(_COLUMNS, [_row(each) for each in report.findings], left=(0, 1)), ""]
    for each in report.findings:
        lines.append(f"{each.rule}: {each.remedy}")
        lines += [
            f"  {name} {text!r}"
            for name, text in (("before", each.before), ("after ", each.after))
            if arguments.show_text
        ]
    return "\n".join(lines)


def _row(found: Finding) -> tuple[str, ...]:
    day = "" if found.tokens_a_day is None else f"{found.tokens_a_day:,.0f}"
    return found.rule, found.place, f"{found.requests:,}", f"{found.tokens:,}", f"{found.share:.1%}", day
