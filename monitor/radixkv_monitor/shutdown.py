"""End the app on signals, also when its terminal is gone, and check whether the process may suspend itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from textual.app import App

ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
GRACE = 3.0
"""The seconds in which the app may restore the terminal; a lost or stopped terminal could block it for ever."""


def exit_on_signals(app: App[Any], last: Callable[[], None] = lambda: None) -> None:
    """End the running `app` on SIGNALS, with the exit status of a shell; call `last` if the app cannot end.

    Signals that were ignored at the start, as under nohup, stay ignored. Does nothing without a terminal.
    """
    if app.is_headless or threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    # The loop may be blocked by the terminal, so the handler is not one of the loop's.
    def leave(number: int, _: object) -> None:
        status = 128 + number
        watch = threading.Timer(GRACE, _force, (status, last))
        watch.daemon = True
        watch.start()
        loop.call_soon_threadsafe(lambda: app.exit(return_code=status))

    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def has_shell() -> bool:
    """Return whether a shell can resume this process after it stops: a shell is a parent in the same session."""
    try:
        return os.getppid() > 0 and os.getsid(os.getppid()) == os.getsid(0)
    except OSError:
        return False


def _force(status: int, last: Callable[[], None]) -> None:
    try:
        last()
    finally:
        os._exit(status)
