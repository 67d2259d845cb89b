"""How an app ends that was told to from outside: by a signal, or because its terminal is gone; and whether it may stop.

Knows signals, the app's loop, and that a terminal may take nothing any more. Knows no feed and no screen.
"""

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
"""Seconds in which the app may put the terminal back; one that is gone, or stopped, could hold it up for ever."""


def exit_on_signals(app: App[Any], last: Callable[[], None] = lambda: None) -> None:
    """End the running `app` on these signals, with the status that shells give; `last` is called if it cannot end.

    Signals that whoever started it has ignored, as nohup does, stay so. Where there is no terminal nothing changes.
    """
    if app.is_headless or threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    # No handler of the loop's: the loop may be what waits for the terminal.
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
    """Whether somebody could wake this process if it stopped: its parent is of the same session, as a shell is."""
    try:
        return os.getppid() > 0 and os.getsid(os.getppid()) == os.getsid(0)
    except OSError:
        return False


def _force(status: int, last: Callable[[], None]) -> None:
    try:
        last()
    finally:
        os._exit(status)
