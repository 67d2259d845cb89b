"""`radixkv-replay`: arguments to a command, and errors to one line and an exit status.

Knows which commands there are. Does not know what they do; none is imported but to add its options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from radixkv.errors import RadixKVError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
COMMANDS = ("simulate_command", "fragmentation_command", "generate_command", "live.command", "report.command")
"""Modules of this package with `add(commands, common)`, which sets the default `module`, and `run(arguments)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns the exit status.

    0 is success, 1 a failure that was reported, 2 wrong usage or a trace that cannot be read, 130 Ctrl-C. Errors are
    one line on stderr; with --debug they are raised.
    """
    arguments = _parser().parse_args(argv)
    debug = "debug" in arguments  # suppressed unless given, so that it may stand before the command or behind it
    try:
        status = int(import_module(arguments.module).run(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) left. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RadixKVError, OSError) as error:
        if debug:
            raise
        print(f"radixkv-replay: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED
    except Exception as error:
        if debug:
            raise
        print(f"radixkv-replay: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    parser = argparse.ArgumentParser(
        prog="radixkv-replay",
        description="Recorded workloads: what a cache would have done with them, and what an engine does.",
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"radixkv {version('radixkv')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"radixkv_traces.{name}").add(commands, common)
    return parser
