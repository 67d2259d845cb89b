"""`radixkv serve MODEL`: convert options to settings, load the engine, and run the server.

The socket answers before torch is imported.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.config import EngineConfig, settings_in
from radixkv.errors import InvalidInput
from radixkv.serve.loading import LoadingServer, address, bind, tls_context
from radixkv.serve.models.specs import ModelSpec, specs_of
from radixkv.server_settings import Settings
from radixkv.settings import command_line
from radixkv.settings.declared import given_in
from radixkv.sizing.memory import limit_arenas

if TYPE_CHECKING:
    from radixkv.serve.served_models import Models

KEYS = "RADIXKV_API_KEYS"
_OF_SEVERAL = ("keep_alive", "load_timeout", "max_loaded", "model_memory")
_EXIT_DELAY = 1.0  # seconds for closing the engine and a trace that it writes


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. Return 0, or 128 plus the number of a second signal.

    Raises InvalidInput for arguments that are wrong or unsafe, OSError for an address in use, and UnsupportedModel.
    """
    with naming_options():
        settings = read_settings(arguments, os.environ)
        tls = tls_context(settings)
        config = engine_config(arguments)
        specs = specs_of(arguments.models, arguments.models_file, config, arguments.tokenizer, settings.model_name)
        several = _is_several(arguments, specs)
    limit_arenas()
    with (
        bind(settings.host, settings.port) as sock,
        LoadingServer(sock, settings.connection_limit, tls) as waiting,
        ExitStack() as cleanup,
    ):
        _log_to_stderr(arguments.quiet)
        first = None if arguments.lazy else specs[0]
        loading = "torch" if first is None else first.source
        say(f"loading {loading}; until then, port {sock.getsockname()[1]} answers with status 503")
        models = _models(specs, settings, first, waiting, cleanup, several=several)
        from radixkv.serve.models.loading import is_loading
        from radixkv.serve.server import Server

        names, where = ", ".join(each.name for each in models.statuses()), address(sock, tls=tls is not None)
        with naming_options():
            server = Server(models, None, lambda: say(f"{names} at {where}/v1"), _exit_soon)
        waiting.stop()
        server.run(sockets=[sock])
        gc.unfreeze()  # the interpreter frees all objects at its end; nanobind warns of each that it does not
    if server.cut_by is not None:
        os._exit(128 + server.cut_by)  # with torch loaded, a regular exit takes seconds
    if is_loading():
        os._exit(0)  # a regular exit would end the thread inside torch, which aborts the process
    return 0


def _models(
    specs: Sequence[ModelSpec],
    settings: Settings,
    first: ModelSpec | None,
    waiting: LoadingServer,
    cleanup: ExitStack,
    *,
    several: bool,
) -> Models:
    """Load the first model, if there is one; return the models of the server. `cleanup` closes an only engine."""
    from radixkv.chat import AsyncEngine  # takes seconds: it imports torch
    from radixkv.chat.calls.formats import format_named
    from radixkv.serve.models.loading import load_engine, remember
    from radixkv.serve.models.several import SeveralModels
    from radixkv.serve.served_models import OneModel

    waiting.phase = "loading the model"
    with naming_options():
        for each in specs:
            format_named(each.config.tool_format)  # an unknown one is refused now
        engine = None if first is None else load_engine(first)
        if engine is None or several:
            return SeveralModels(specs, settings, engine)  # which unloads it: a reference here would keep its memory
        models = OneModel(AsyncEngine(cleanup.enter_context(engine)), settings, specs[0].source)
        remember()
        return models


def _is_several(arguments: argparse.Namespace, specs: Sequence[ModelSpec]) -> bool:
    """Whether models are loaded and unloaded; raise InvalidInput for options that need one model, or several."""
    given = [name for name in _OF_SEVERAL if getattr(arguments, name) != getattr(Settings, name)]
    if arguments.model_memory is not None and any(each.config.kv_memory == "auto" for each in specs):
        raise InvalidInput("model_memory needs pools of a given size, and kv_memory is auto: give --kv-memory")
    return len(specs) > 1 or arguments.models_file is not None or arguments.lazy or bool(given)


def _exit_soon(number: int) -> None:
    """End the process soon after a second signal, even during a long step or while a long text is encoded."""
    leaving = threading.Timer(_EXIT_DELAY, os._exit, [128 + number])
    leaving.daemon = True
    leaving.start()


def read_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Return the settings of the command line and the environment; raise InvalidInput."""
    keys = read_keys([*filter(None, environment.get(KEYS, "").split(",")), *arguments.api_key])
    given = given_in(arguments, Settings)
    return Settings(**given, api_keys=keys, max_running=arguments.max_sequences)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings; a step always has a token for each sequence. Raises InvalidInput."""
    if arguments.max_batch_tokens < 1:
        raise InvalidInput(f"max_batch_tokens must be a number, at least 1, got {arguments.max_batch_tokens}")
    most = max(arguments.max_batch_tokens, arguments.max_sequences)
    return EngineConfig(**{**settings_in(arguments), "max_batch_tokens": most})


def naming_options() -> AbstractContextManager[None]:
    """In an InvalidInput that starts with a setting's name, replace the name by the command-line option."""
    return command_line.naming_options(EngineConfig, Settings)


def read_keys(given: Iterable[str]) -> dict[str, str]:
    """Return name -> key, from NAME=KEY or NAME=@FILE each; raise InvalidInput, which never contains a key.

    >>> read_keys(["ada=correct-horse"])
    {'ada': 'correct-horse'}
    """
    keys: dict[str, str] = {}
    for each in given:
        name, equals, key = each.strip().partition("=")
        if not equals or not name:
            raise InvalidInput("an API key is NAME=KEY, or NAME=@FILE with the key in a file")
        if name in keys:
            raise InvalidInput(f"two API keys have the name {name!r}: each tenant has one")
        keys[name] = _from_file(key[1:]) if key.startswith("@") else key
    return keys


def _from_file(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the API key in {path} cannot be read: {error}") from error


def _log_to_stderr(quiet: bool) -> None:
    """Log one line per request, unless `quiet`, and errors in any case."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("radixkv.serve").setLevel(logging.WARNING if quiet else logging.INFO)


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f"radixkv: {text}", file=sys.stderr, flush=True)
