"""`radixkv-replay generate`: a made-up workload on standard output, in the Mooncake line format.

Knows options. Does not know the distributions: their docstrings are what --help shows.
"""

from __future__ import annotations

import argparse
import inspect

from radixkv_traces.generate import generate
from radixkv_traces.generate_kinds import KINDS
from radixkv_traces.generate_kinds import __doc__ as conventions
from radixkv_traces.mooncake import to_line
from radixkv_traces.trace_options import positive


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    about = "a workload from a seed, on standard output: the same arguments give the same bytes"
    parser = commands.add_parser(
        "generate", help=about, description=about.capitalize() + ".", parents=[common], epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(module="radixkv_traces.generate_command")
    parser.add_argument("kind", choices=KINDS, help="what the sessions do; see below")
    parser.add_argument("--sessions", type=positive, default=100, metavar="N", help="default 100")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="sessions that begin in a second; default 1"
    )
    parser.add_argument("--block-tokens", type=positive, default=64, metavar="N", help="tokens of a block; default 64")


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each request."""
    session = KINDS[arguments.kind]
    for request in generate(
        session, arguments.sessions, arguments.seed, rate=arguments.rate, block_tokens=arguments.block_tokens
    ):
        print(to_line(request))
    return 0


def _epilog() -> str:
    kinds = [f"{name}: {inspect.getdoc(session)}".replace("\n", "\n  ") for name, session in KINDS.items()]
    return "\n\n".join([*kinds, inspect.cleandoc(conventions or "").split("\n\n", 1)[1]])
