"""Run a command: options that all commands share, errors in one line, and the exit status.

`radixkv` and `radixkv-replay` share this module.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    stderr in one line; with --debug they are raised. SIGTERM and SIGHUP raise SystemExit with 128 plus their number.
    """
    debug = "debug" in arguments
    try:
        if "check" in arguments:
            arguments.check(arguments)
        with _exit_on_signals():
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
        print(f"{program}: {reason(error)}", file=sys.stderr)
        return MISUSED if isinstance(error, ValueError) else FAILED
    except Exception as error:
        if _is_interrupt(error):
            return INTERRUPTED
        if debug:
            raise
        print(f"{program}: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return FAILED


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is among the causes of `error`: the lazy imports of transformers turn it into an ImportError."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


def reason(error: Exception) -> str:
    """Return the text of an error; of an error of the operating system, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Leave the command by SystemExit on SIGTERM and SIGHUP, so that it restores the terminal and removes its files.

    A second signal ends the process at once. Signals that are ignored, as under nohup, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)
        raise SystemExit(128 + number)

    changed = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in changed:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)
