"""`radixkv worker MODEL`: load the engine, and serve it to a fleet until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

from radixkv.errors import RadixKVError
from radixkv.serve.command import engine_config, naming_options
from radixkv.server_settings import Settings
from radixkv.sizing.memory import limit_arenas

DYNAMO = "1.6.1"
_PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
_CLOSING = 30  # seconds, after the drain, for the engine's files


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return 0, or 1 if the engine broke.

    Raises RadixKVError without the version of Dynamo, and as `Engine.load`.
    """
    if arguments.role == "prefill":
        from radixkv.fleet.roles import serve_prefill

        return serve_prefill(arguments)
    check_version()
    with naming_options():
        config = engine_config(arguments)
        waiting, drain = arguments.max_waiting, arguments.drain_timeout
        limits = Settings(max_running=config.max_sequences, max_waiting=waiting, drain_timeout=drain)
    begin = _begin(arguments)  # refuses a missing key before the model is loaded
    set_environment(drain)
    if arguments.discovery_backend == "file":
        check_folder(os.environ.get("DYN_FILE_KV"))
    limit_arenas()
    print(f"radixkv: loading {arguments.model}", file=sys.stderr, flush=True)
    import uvloop
    from dynamo.common.backend.worker import Worker as DynamosWorker

    from radixkv.chat import AsyncEngine, Engine
    from radixkv.fleet.model_folder import write_files
    from radixkv.fleet.worker import Worker

    with naming_options():
        engine = Engine.load(arguments.model, config, tokenizer=arguments.tokenizer)
    with engine:
        own = arguments.tokenizer is None
        folder = str(write_files(arguments.model, engine.model, own_tokenizer=own, revision=config.revision))
        name = arguments.served_model_name or engine.model.name
        for number in (signal.SIGINT, signal.SIGTERM):  # Dynamo's from now on: it drains first
            signal.signal(number, signal.SIG_DFL)
        worker = Worker(AsyncEngine(engine), folder, name, limits, begin(engine))
        uvloop.run(DynamosWorker(worker, _settings(arguments, folder, name)).run())
    return int(worker.publisher.broken)


def _begin(arguments: argparse.Namespace) -> Callable[[Any], Any]:
    """Return a factory: of an engine it makes the function that starts requests, or None for `engine.submit`."""
    if arguments.role == "both":
        return lambda engine: None
    from radixkv.fleet.roles import place_of, remote_prefill

    place = place_of(arguments)
    return lambda engine: remote_prefill(arguments, place, engine).submit


def _settings(arguments: argparse.Namespace, folder: str, name: str) -> Any:
    """Return Dynamo's settings."""
    from dynamo.common.backend.worker import WorkerConfig

    return WorkerConfig(
        namespace=arguments.namespace,
        component=arguments.component or component_of(name),
        model_name=folder,
        served_model_name=name,
        discovery_backend=arguments.discovery_backend,
        event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
    )


def component_of(name: str) -> str:
    """Return the name of a model as a component, which is a label in Dynamo's metrics."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or f"model{crc32(name.encode())}"


def set_environment(drain: float) -> None:
    """Set variables that Dynamo reads, unless they are set: addresses, and the seconds until it ends the process."""
    for host in _HOSTS:  # Dynamo would take the machine's address
        os.environ.setdefault(host, "127.0.0.1")
    os.environ.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", str(int(drain) + _CLOSING))


def check_folder(place: str | None) -> None:
    """Raise OSError, which names the folder, unless processes can find each other there; None is Dynamo's own."""
    if place:
        os.makedirs(place, exist_ok=True)
        TemporaryFile(dir=place).close()


def check_version() -> None:
    """Raise RadixKVError unless the version of Dynamo is installed that the worker is made for."""
    for package in _PACKAGES:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "none"
        if found != DYNAMO:
            raise RadixKVError(
                f"`radixkv worker` needs {package} {DYNAMO}, and {found} is installed: docs/fleet.md says how"
            )
