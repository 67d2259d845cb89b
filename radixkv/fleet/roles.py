"""Serve prompts as a prefill worker, and fetch the runs of long prompts as a decode worker."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import threading
import time
from argparse import Namespace
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from radixkv.chat import AsyncEngine, Engine
from radixkv.engine import AsyncHandle
from radixkv.engine.runs import Run
from radixkv.errors import InvalidInput, RadixKVError
from radixkv.fleet.run_transport import PrefillServer, Refused, SocketTransport
from radixkv.sampling.params import SamplingParams
from radixkv.serve.command import engine_config, naming_options, read_keys, say
from radixkv.sizing.memory import limit_arenas

KEY = "RADIXKV_PREFILL_KEY"
_LEAST_KEY = 16
_PAUSE = 10.0  # seconds for which a prefill worker is not asked after it has failed
_LONGEST = 1e9  # seconds
_CALLS = 32  # at once
_SHARE = 4  # a run is moved whole: a prompt of which less than a quarter is missing is computed here
_UNMEASURED = 2_048  # tokens: the threshold where no prefill worker answers at the start
_SIZES = (32, 64, 128, 256, 512, 1024, 2048)  # tokens of the texts that are measured
_MEASURED = "radixkv: measured at the start"  # their namespace

Place = tuple[tuple[str, int], bytes]  # address and key

_log = logging.getLogger(__name__)


def serve_prefill(arguments: Namespace) -> int:
    """Compute prompts until a signal; return 0, or 1 if the engine broke.

    Raises InvalidInput without a key, OSError for an address in use, and as `Engine.load`.
    """
    address, key = place_of(arguments)
    limit_arenas()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with naming_options():
        engine = Engine.load(arguments.model, engine_config(arguments), tokenizer=arguments.tokenizer)
    with engine, PrefillServer(engine, address, key) as server, suppress(KeyboardInterrupt):
        host, _, _ = arguments.prefill_address.rpartition(":")
        say(f"prefill at {host}:{server.server_address[1]}")
        while not engine.client.thread.closed:
            server.handle_request()
        return 1
    return 0


def remote_prefill(arguments: Namespace, place: Place, engine: Engine) -> RemotePrefill:
    """Return the part of a decode worker that starts requests."""
    transport, threshold = SocketTransport(*place, arguments.prefill_timeout), arguments.prefill_threshold
    try:
        threshold = measured_threshold(engine, transport) if threshold is None else threshold
    except (OSError, RadixKVError) as error:
        say(f"the prefill worker cannot be measured: {error}")
        threshold = _UNMEASURED if isinstance(error, OSError) else math.inf  # as for one with other weights
    say(f"prompts of more than {threshold:.0f} uncached tokens are computed at {arguments.prefill_address}")
    return RemotePrefill(AsyncEngine(engine), transport, threshold, arguments.prefill_timeout)


class RemotePrefill:
    """Starts requests of an engine; a prefill worker computes long prompts.

    If that fails, the engine computes the prompt, and the prefill worker is not asked for some seconds.
    """

    def __init__(self, engine: AsyncEngine, transport: SocketTransport, threshold: float, timeout: float) -> None:
        """Ask for prompts with more than `threshold` uncached tokens, and wait at most `timeout` seconds for a run."""
        self._engine, self._transport, self._threshold, self._timeout = engine, transport, max(threshold, 1), timeout
        self._paused_until = 0.0
        self._calls = asyncio.Semaphore(_CALLS)

    async def submit(
        self, prompt: list[int], params: SamplingParams, *, namespace: str | None, **options: Any
    ) -> AsyncHandle:
        """Start a request as `AsyncEngine.submit` does."""
        is_whole = params.prompt_logprobs is not None  # computed here in any case
        if not is_whole and len(prompt) > self._threshold and time.monotonic() >= self._paused_until:
            found = await self._engine.probe(prompt, namespace=namespace)
            missing = len(prompt) - found.reached - found.disk
            if missing > max(self._threshold, len(prompt) / _SHARE):
                await self._bring(prompt[:-1], namespace)  # the last token is computed for its logits
        return await self._engine.submit(prompt, params, namespace=namespace, **options)

    async def _bring(self, tokens: list[int], namespace: str | None) -> None:
        """Import the run of a text; log a warning if that fails."""
        try:
            run = await asyncio.wait_for(self._fetch(tokens, namespace), self._timeout)
            await self._engine.import_run(run, namespace=namespace)
        except Exception as error:
            if not isinstance(error, Refused):
                self._paused_until = time.monotonic() + _PAUSE
            _log.warning("a prompt of %d tokens is computed here, because no run came: %r", len(tokens), error)

    async def _fetch(self, tokens: list[int], namespace: str | None) -> Run:
        """Fetch a run on a thread that the end of the process does not wait for."""
        found: Future[Run] = Future()

        def fetch() -> None:
            try:
                found.set_result(self._transport.fetch(self._transport.offer(tokens, namespace)))
            except BaseException as error:
                found.set_exception(error)

        async with self._calls:
            found.set_running_or_notify_cancel()
            threading.Thread(target=fetch, name="radixkv-fetch", daemon=True).start()
            return await asyncio.wrap_future(found)


def measured_threshold(engine: Engine, transport: SocketTransport) -> float:
    """Return the size of the shortest text that arrives sooner than the engine computes it; infinity if there is none.

    Raises as the transport and `Engine.import_run`.
    """
    _arrives_sooner(engine, transport, _SIZES[0])  # the first export and import read all weights
    sizes = (size for size in _SIZES if size < engine.context_limit and _arrives_sooner(engine, transport, size))
    return next(sizes, math.inf)


def _arrives_sooner(engine: Engine, transport: SocketTransport, size: int) -> bool:
    moved, computed = (random.choices(range(engine.model.vocab_size), k=size) for _ in range(2))
    ticket = transport.offer(moved, _MEASURED)
    begun = time.perf_counter()
    engine.import_run(transport.fetch(ticket), namespace=_MEASURED)
    arrived = time.perf_counter()
    engine.warm(computed, namespace=_MEASURED)
    return arrived - begun < time.perf_counter() - arrived


def place_of(arguments: Namespace) -> Place:
    """Return the prefill worker's address and the key. Raises InvalidInput, which never contains the key."""
    host, _, port = arguments.prefill_address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidInput(f"--prefill-address {arguments.prefill_address}: HOST:PORT is needed, with a port's number")
    if not 0 < arguments.prefill_timeout <= _LONGEST or not (arguments.prefill_threshold or 0) >= 0:  # or NaN
        raise InvalidInput("--prefill-timeout is seconds above 0, and --prefill-threshold a number of at least 0")
    key = read_keys([f"prefill={os.environ.get(KEY, '')}"])["prefill"].encode()
    if len(key) < _LEAST_KEY:
        raise InvalidInput(f"{KEY} must be a secret of at least {_LEAST_KEY} bytes, or @FILE, the same for both roles")
    return (host.strip("[]"), int(port)), key
