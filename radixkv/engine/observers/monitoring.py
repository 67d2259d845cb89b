"""The engine's wire to the outside: whether there is one, how it begins, and what it leaves behind after a crash.

Knows the publisher and where its folder is. Knows no request, and no engine that it could keep alive: only the thread
that answers for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.engine.engine_thread import EngineThread
from radixkv.engine.observers.recorder import RequestRecorder
from radixkv.errors import RadixKVError
from radixkv.telemetry.records import Changes, EngineFacts

if TYPE_CHECKING:
    from radixkv.telemetry.publisher import Publisher

_log = logging.getLogger(__name__)

SWITCH = "RADIXKV_MONITOR"
"""An environment variable; 0 switches off what nobody asked for by an address."""

CRASHES = 3
"""How many recordings of crashes are kept."""


def wanted(monitor: bool | str) -> bool | str:
    """Return the setting, or False if the environment switches monitoring without an address off."""
    return os.environ.get(SWITCH, "1") != "0" if monitor is True else monitor


def engine_facts(**facts: Any) -> EngineFacts:
    """Facts with a name of the engine's own, this process and this version."""
    version = sys.modules["radixkv"].__version__  # an import of the front door would reach through to all behind it
    return EngineFacts(secrets.token_hex(8), os.getpid(), time.time(), version, **facts)


class Monitoring:
    """An engine's publisher, and its end."""

    def __init__(self, publisher: Publisher, engine_thread: EngineThread, telemetry: RequestRecorder) -> None:
        """Be there when the worker breaks."""
        self.publisher = publisher
        engine_thread.on_broken = partial(_leave_behind, publisher, telemetry)

    def flight(self, path: str | os.PathLike[str]) -> int:
        """Write the last minutes to a file; returns its bytes. Raises OSError."""
        return self.publisher.flight(path)

    def close(self) -> None:
        """Say goodbye to whoever watches. May be called twice."""
        self.publisher.close()


def begin(
    monitor: bool | str, facts: EngineFacts, engine_thread: EngineThread, telemetry: RequestRecorder
) -> Monitoring | None:
    """Have `engine_thread` answer whoever asks; None if that is not wanted, or cannot be, which is logged.

    Raises InvalidInput for an address that is none, or one that others could reach.
    """
    if monitor is False:
        return None
    from radixkv.telemetry.publisher import Publisher

    def collect() -> Future[Changes]:
        return engine_thread.call(telemetry.collect)

    publisher = Publisher(facts, collect, lambda: telemetry.pending, None if monitor is True else str(monitor))
    try:
        publisher.start()
    except (OSError, RadixKVError) as error:
        _log.warning("this engine cannot be watched by radixkv-monitor: %s", error)
        return None
    return Monitoring(publisher, engine_thread, telemetry)


def _leave_behind(publisher: Publisher, telemetry: RequestRecorder, error: BaseException) -> None:
    """The engine's thread breaks: write what the last minutes were like, and say where."""
    from radixkv.telemetry.protocol import CRASHED
    from radixkv.telemetry.socket_paths import own_folder

    why = f"{CRASHED}: {error!r}"
    try:
        folder = own_folder()
        path = folder / f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.rec"
        publisher.flight(path, _last(telemetry), why)
        _forget_old_ones(folder)
    except (OSError, RadixKVError) as trouble:
        _log.warning("the last minutes of this engine could not be written: %s", trouble)
    else:
        _log.error("the last minutes of this engine are in %s: radixkv-monitor --replay shows them", path)
    finally:
        publisher.close(why)


def _last(telemetry: RequestRecorder) -> Changes:
    """What there still is to tell, if it can be told: whatever broke may have been the cache's."""
    try:
        return telemetry.collect()
    except Exception:
        _log.exception("the last changes before the crash could not be collected")
        return Changes(time.time())


def _forget_old_ones(folder: Path) -> None:
    for path in sorted(folder.glob("crash-*.rec"), key=os.path.getmtime)[:-CRASHES]:
        path.unlink(missing_ok=True)
