"""Run a command: options that all commands share, errors in one line, and the exit status.

`radixkv` and `radixkv-replay` share this module.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from radixkv.errors import RadixKVError
from radixkv.version import __version__

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def parsers(
    program: str, about: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser], argparse.ArgumentParser]:
    """Return the parser of a program, its subparsers, and the parent parser of each command."""
    common = argparse.ArgumentParser(add_help=False)
    # Suppressed unless given, so that it may precede or follow the command.
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    parser = argparse.ArgumentParser(prog=program, description=about, parents=[common])
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True), common


def run(program: str, arguments: argparse.Namespace) -> int:
    """Run the command in `arguments.module`, after `arguments.check` if there is one; return the exit status.

    0 is success, 1 a failure that was reported, 2 wrong usage or unreadable input, 130 Ctrl-C. Errors are printed to
    stderr in one line; with --debug they are raised.
    """
    debug = "debug" in arguments
    try:
        if "check" in arguments:
            arguments.check(arguments)
        status = int(import_module(arguments.module).run(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Python would report it again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (RadixKVError, OSError) as error:
        if debug:
            raise
        print(f"{program}: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED
    except Exception as error:
        if debug:
            raise
        print(f"{program}: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return FAILED
