"""Run a command: options that several commands share, errors in one line, the exit status, and tables.

`radixkv` and `radixkv-replay` share this module.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from radixkv.errors import RadixKVError
from radixkv.version import __version__

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command, in addition to Ctrl-C."""
AddCommand = Callable[..., argparse.ArgumentParser]


def parser(program: str, about: str) -> tuple[argparse.ArgumentParser, AddCommand]:
    """Return the parser of a program, and a function that adds a command by its name, its help and its module.

    That function passes other arguments to argparse, and returns the command's parser.
    """
    common = argparse.ArgumentParser(add_help=False)
    # Suppressed unless given, so that it may precede or follow the command.
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    made = argparse.ArgumentParser(prog=program, description=about, parents=[common])
    made.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, about: str, module: str, **options: Any) -> argparse.ArgumentParser:
        described = {"help": about, "description": f"{about[0].upper()}{about[1:]}."}
        command = commands.add_parser(name, parents=[common], **(described | options))
        command.set_defaults(module=module)
        return command

    return made, add


def run(program: str, arguments: argparse.Namespace) -> int:
    """Run the command in `arguments.module`, after `arguments.check` if there is one; return the exit status.

    0 is success, 1 a failure that was reported, 2 wrong usage or unreadable input, 130 Ctrl-C. Errors are printed to
    stderr in one line; with --debug they are raised. SIGTERM and SIGHUP raise SystemExit with 128 plus their number.
    """
    debug = "debug" in arguments
    try:
        if "check" in arguments:
            arguments.check(arguments)
        with exit_on_signals():
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


def exit_on_signals() -> AbstractContextManager[None]:
    """Leave the command by SystemExit on SIGTERM and SIGHUP, so that it restores the terminal and removes its files.

    A second signal ends the process at once.
    """

    def leave(number: int) -> None:
        raise SystemExit(128 + number)

    return handled([each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_DFL], leave)


@contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int], object], *, once: bool = True) -> Iterator[None]:
    """Call `handle` for these signals while the block runs; with `once`, a second one ends the process at once.

    Signals that are ignored, as under nohup, stay ignored. Does nothing on another thread than the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in numbers if is_main}
    before = {each: handler for each, handler in before.items() if handler is not signal.SIG_IGN}

    def take(number: int, _: object) -> None:
        for each in before if once else ():
            signal.signal(each, signal.SIG_DFL)
        handle(number)

    try:
        for each in before:
            signal.signal(each, take)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Format a table, without a newline at the end; the columns in `left` are left-aligned, all others right-aligned.

    >>> print(table(("name", "n"), [("one", "1"), ("ten", "10")]))
    name   n
    one    1
    ten   10
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (columns, *rows)
    )
