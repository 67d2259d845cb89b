"""Publish the records of an engine for radixkv-monitor, and write the last minutes to a file after a crash.

Nothing here keeps the engine alive: only its thread is referenced.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from radixkv.engine.engine_thread import EngineThread
from radixkv.engine.observers.request_recorder import RequestRecorder
from radixkv.errors import RadixKVError
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import Changes, EngineFacts

if TYPE_CHECKING:
    from radixkv.device import Device
    from radixkv.engine.core import Core
    from radixkv.telemetry.command_queue import Execute
    from radixkv.telemetry.publisher import Publisher

_log = logging.getLogger(__name__)

SWITCH = "RADIXKV_MONITOR"
"""An environment variable; 0 switches monitoring off, except for engines with an address of their own."""

WRITABLE = "rw"
"""The value of `monitor` that executes commands, alone or before + and an address."""

CRASHES = 3
"""How many recordings of crashes are kept."""


class Monitoring:
    """The publisher of an engine, and the recorder that it collects from."""

    def __init__(self, publisher: Publisher, recorder: RequestRecorder) -> None:
        self.publisher, self.recorder = publisher, recorder

    def crashed(self, error: BaseException) -> None:
        """Write a recording, as the engine's thread has raised; on that thread."""
        _record_crash(self.publisher, self.recorder, error)

    def flight(self, path: str | os.PathLike[str]) -> int:
        """Write the last minutes to a file; returns its bytes. Raises OSError."""
        return self.publisher.flight(path)

    def close(self) -> None:
        """Say goodbye to the clients. May be called twice."""
        self.publisher.close()


def start(
    monitor: bool | str,
    facts: EngineFacts,
    core: Core,
    thread: EngineThread,
    decode: Callable[[list[int]], str] | None,
    device: Device,
    what_if: Callable[[], dict[str, Any] | None],
) -> Monitoring | None:
    """Record the requests and the cache of `core` from now on, and publish them.

    `monitor` is True, "rw" to execute the commands of this user's monitors, an address, or "rw+" and an address.
    Returns None if it is False, if the environment switches monitoring off, or if no socket can be opened, which is
    logged. Raises InvalidInput for an address that is malformed, or that others could reach.
    """
    writable, address = _parsed(monitor)
    if monitor is False or (address is None and os.environ.get(SWITCH, "1") == "0"):
        return None
    from radixkv.telemetry.process_figures import ProcessFigures
    from radixkv.telemetry.publisher import Publisher

    cache_recorder = Recorder(decode=decode)
    cache_recorder.attach(core.cache)
    kv_bytes = facts.bytes_per_block * facts.num_blocks
    constants = {"max_length": facts.max_length, "kv_bytes": kv_bytes, **core.token_costs()}
    recorder = RequestRecorder(core, cache_recorder, constants)

    def collect() -> Future[Changes]:
        return thread.call(recorder.collect)

    execute = _execute(core, thread) if writable else None
    options: dict[str, Any] = {"figures": ProcessFigures(_device_memory(device)), "what_if": what_if}
    publisher = Publisher(facts, collect, lambda: recorder.pending, address, execute=execute, **options)
    try:
        publisher.start()
    except (OSError, RadixKVError) as error:
        _log.warning("this engine cannot be watched by radixkv-monitor: %s", error)
        return None
    return Monitoring(publisher, recorder)


def _parsed(monitor: bool | str) -> tuple[bool, str | None]:
    """Return whether commands are executed, and the address to listen at; None for the Unix socket alone."""
    text = "" if isinstance(monitor, bool) else monitor
    mode, plus, address = text.partition("+")
    writable = mode == WRITABLE
    return writable, (address if plus else None) if writable else text or None


def _execute(core: Core, thread: EngineThread) -> Execute:
    """Return a function that schedules a command on the engine's thread."""
    from radixkv.engine.observers.engine_control import EngineControl

    control = EngineControl(core)
    return lambda command, process: thread.call(partial(control.execute, command, process))


def _device_memory(device: Device) -> Callable[[], tuple[int, int]] | None:
    """Return a function of the reserved and the whole memory of a GPU; None for a CPU."""
    if not device.is_gpu:
        return None
    total = device.properties().memory
    return lambda: (device.reserved(), total)


def _record_crash(publisher: Publisher, recorder: RequestRecorder, error: BaseException) -> None:
    """Write the last minutes before the engine's thread broke, and log where."""
    from radixkv.telemetry.protocol import CRASHED
    from radixkv.telemetry.socket_paths import own_folder

    why = f"{CRASHED}: {error!r}"
    try:
        folder = own_folder()
        path = folder / f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.rec"
        publisher.flight(path, _last_changes(recorder), why)
        for older in sorted(folder.glob("crash-*.rec"), key=os.path.getmtime)[:-CRASHES]:
            older.unlink(missing_ok=True)
    except (OSError, RadixKVError) as trouble:
        _log.warning("the last minutes of this engine could not be written: %s", trouble)
    else:
        _log.error("the last minutes of this engine are in %s: radixkv-monitor --replay shows them", path)
    finally:
        publisher.close(why)


def _last_changes(recorder: RequestRecorder) -> Changes:
    """Return the changes since the last frame; none if the cache is too damaged to collect them."""
    try:
        return recorder.collect()
    except Exception:
        _log.exception("the last changes before the crash could not be collected")
        return Changes(time.time())
