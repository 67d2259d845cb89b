"""`radixkv-replay`: which commands there are.

Does not know what they do; none is imported but to add its options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from radixkv.cli import entry_point

PROGRAM = "radixkv-replay"
COMMANDS = ("simulate_command", "fragmentation_command", "generate_command", "live.command", "report.command")
"""Modules of this package with `add(commands, common)`, which sets the default `module`, and `run(arguments)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns its status."""
    return entry_point.run(PROGRAM, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    about = "Recorded workloads: what a cache would have done with them, and what an engine does."
    parser, commands, common = entry_point.parsers(PROGRAM, about)
    for name in COMMANDS:
        import_module(f"radixkv_traces.{name}").add(commands, common)
    return parser
