"""The thread that owns cache and model, and the client through which callers reach the core on it.

`EngineThread` runs steps while there is work, and posted calls between two steps. `CoreClient` posts the calls of the
engines for threads and for asyncio; none of its methods waits for the thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from radixkv.cache import Explanation
from radixkv.engine.audit import Auditor, check_blocks
from radixkv.engine.compressed import CompressedPrefix, Conversation
from radixkv.engine.core import Core
from radixkv.engine.input_processor import InputProcessor, Prompt, check_seconds
from radixkv.engine.output import Handle, Usage, Warmed
from radixkv.engine.request import Request
from radixkv.engine.runs import RunExchange
from radixkv.engine.stats import AuditReport, EngineStats
from radixkv.errors import DeviceLost, EngineClosed, InvalidInput, WeightsChanged
from radixkv.models.weights.fixed import State
from radixkv.settings.kinds import is_int
from radixkv.telemetry.tree_view import ALL, TreeView, tree_view

if TYPE_CHECKING:
    from radixkv.engine.observers.what_if import WhatIfThread
    from radixkv.telemetry.records import EngineFacts

_log = logging.getLogger(__name__)
_RAISED = "a call posted to the engine's thread raised"  # it must not end the thread, and with it every request
Result = TypeVar("Result")


class EngineThread:
    """A thread that calls `step` whenever `idle_for` allows, posted calls in between, and `finish` once at the end.

    `idle_for` returns the seconds for which a step would find nothing to do: 0.0 if it has work, None until a call is
    posted. `busy` returns whether a request has not ended yet, which a graceful end waits for.
    """

    def __init__(
        self,
        step: Callable[[], None],
        idle_for: Callable[[], float | None],
        busy: Callable[[], bool],
        finish: Callable[[EngineClosed], None],
        on_broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Start the thread; it ends with `close`. `finish` gets the error for requests that have not ended.

        `on_broken` is called on the thread, before the end, with an exception that escaped a step.
        """
        self._step, self._idle_for, self._busy, self._finish = step, idle_for, busy, finish
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Guards the end of the inbox. Reentrant: the garbage collector may run finalizers that post.
        self._gate = threading.RLock()
        self._pid = os.getpid()
        self.closed = False  # no more calls are taken
        self._broken: BaseException | None = None  # the exception that escaped a step, against its contract
        self._on_broken = on_broken
        self._draining = False
        self._drained = threading.Event()
        # A daemon thread, so that a program can exit without closing its engine.
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None], *, begins: bool = False) -> None:
        """Run `call` at the next step boundary; it must not raise.

        Raises EngineClosed after the end and in a forked child; with `begins`, for a call that starts something new,
        also while the thread drains.
        """
        if os.getpid() != self._pid:  # checked before the gate: the parent's thread may have held it during the fork
            raise EngineClosed(f"this engine belongs to process {self._pid}: load another one after the fork")
        with self._gate:
            if self.closed or (begins and self._draining):
                raise self._closed_error("the engine was closed: load a new one")
            self._inbox.put(call)

    def wake(self) -> None:
        """Check again whether there is work; no effect after the end."""
        if not self._is_forked:
            with self._gate:
                if not self.closed:
                    self._inbox.put(_nothing)

    def call(self, call: Callable[[], Result]) -> Future[Result]:
        """Run `call` at the next step boundary; the future gets its result or exception, and may be cancelled."""
        future: Future[Result] = Future()
        self.post(lambda: _answer(future, call))
        return future

    def ask(self, call: Callable[[], Result]) -> Result:
        """Run `call` at the next step boundary and wait for its result or exception."""
        return self.call(call).result()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # ---- the end

    def close(
        self, drain: bool = False, timeout: float | None = None, on_drain: Callable[[], None] | None = None
    ) -> None:
        """Stop after the current step, run the calls that were posted before, and wait for that. May be called twice.

        With `drain` first let running and waiting requests end, for at most `timeout` seconds; nothing new begins, and
        `on_drain` is called on the thread. An exception during that wait (Ctrl-C) makes it an immediate end.
        """
        if self._is_forked:
            return
        try:
            if drain and threading.current_thread() is not self._thread:
                self._drain(timeout, on_drain or _nothing)
        finally:
            self.stop()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def stop(self) -> None:
        """Close without waiting for the thread; also ends a drain that another thread waits for."""
        if not self._is_forked:
            with self._gate:
                if not self.closed:
                    self.closed = True
                    self._inbox.put(None)

    def _drain(self, timeout: float | None, on_drain: Callable[[], None]) -> None:
        with self._gate:
            self._draining = True
            if not self.closed:
                self._inbox.put(on_drain)  # after every call that began a request
        self._drained.wait(timeout)

    # ---- the thread

    def _loop(self) -> None:
        try:
            while self._read_inbox():
                self._step()
        except BaseException as error:  # closes the engine, so that no caller waits forever
            self._broken = error
            _log.exception("a step raised: the engine closes")
            if self._on_broken is not None:
                _guarded(partial(self._on_broken, error))
        with self._gate:
            self.closed = True
        self._drained.set()
        self._empty_inbox()
        _guarded(lambda: self._finish(self._closed_error("the engine was closed while the request ran")))

    def _closed_error(self, message: str) -> EngineClosed:
        if self._broken is None:
            return EngineClosed(message)
        reason = str(self._broken) if isinstance(self._broken, DeviceLost) else f"its thread stopped: {self._broken!r}"
        error = EngineClosed(f"the engine has closed, because {reason}")
        error.__cause__ = self._broken
        return error

    def _empty_inbox(self) -> None:
        """Run the calls that were posted before the end."""
        while not self._inbox.empty():
            if (call := self._inbox.get()) is not None:
                _guarded(call)

    def _read_inbox(self) -> bool:
        """Run posted calls; wait while a step would find nothing to do. Returns False at the end.

        A call that is posted meanwhile waits for the next step, so that posting again and again delays no request.
        """
        left = self._inbox.qsize()
        while True:
            if self._draining and self._inbox.empty() and not self._busy():
                self._drained.set()
            idle = self._idle_for()
            waits = idle is None or idle > 0
            if not left and not waits:
                return True
            try:
                call = self._inbox.get(waits, idle)
            except Empty:
                return True
            left = self._inbox.qsize() if waits else left - 1
            if call is None:
                return False
            try:
                call()
            except Exception:
                _log.exception(_RAISED)
            del call  # a waiting thread must not keep the objects of the last call alive, such as the engine


class CoreClient:
    """Prepares calls of the core on the caller's thread, and posts them to the engine's thread without waiting.

    `RequestEngine` and `AsyncRequestEngine` share one. `core` belongs to the engine's thread: only posted calls use it.
    """

    def __init__(
        self,
        core: Core,
        auditor: Auditor,
        thread: EngineThread,
        inputs: InputProcessor,
        runs: RunExchange,
        facts: EngineFacts,
        decode: Callable[[list[int]], str] | None,
        curve: WhatIfThread,
    ) -> None:
        """`decode` shows the tokens of a node in tree views; None shows none."""
        self.core, self.thread, self.inputs, self.runs, self.curve = core, thread, inputs, runs, curve
        self.prefixes = inputs.prefixes
        self._auditor, self._facts, self._decode = auditor, facts, decode
        self._loaded_at = time.perf_counter()
        self.loaded_again = False  # whether this process had unloaded the model before
        self._session_numbers = itertools.count(1)

    # ---- requests

    def handle(self, request: Request) -> Handle:
        """Return the caller's end of a request."""
        return Handle(request.channel, lambda: self._cancel(request))

    def begin(self, request: Request) -> None:
        """Queue a request that `InputProcessor` made. Raises EngineClosed."""
        request.channel.on_drained = self.thread.wake
        self.thread.post(lambda: self.core.add(request), begins=True)

    def start(self, request: Request) -> Handle:
        """Queue a request and return its handle."""
        self.begin(request)
        return self.handle(request)

    def _cancel(self, request: Request) -> None:
        try:
            self.thread.post(lambda: self.core.cancel(request))
        except EngineClosed:
            return  # closing ended the request

    def warming(
        self, prompt: Prompt, pin: bool, ttl: float | None, namespace: Hashable, timeout: float | None
    ) -> Request:
        """Return a request that only computes its prompt. Raises InvalidInput and its subclasses."""
        if ttl is not None and not pin:
            raise InvalidInput("ttl is how long a pin lasts: pass pin=True with it")
        ids = self.inputs.encode(prompt)
        return self.inputs.request(ids, namespace=namespace, timeout=timeout, sample=False)

    def warmed(self, request: Request, usage: Usage, ttl: float | None) -> Future[Warmed]:
        """Pin the prompt of a request that has computed it."""

        def pinned() -> Warmed:
            return Warmed(usage, self.core.admission.pin(request.prompt, request.namespace, ttl), self.thread.post)

        return self.thread.call(pinned)

    def planned(
        self, prompt: Prompt | Conversation, keep: float, method: str, namespace: Hashable, timeout: float | None
    ) -> tuple[CompressedPrefix, Hashable, float]:
        """Return the compressed prefix to make of a prompt, its namespace's number and a deadline; as `plan` raises."""
        check_seconds("timeout", timeout)
        source, deadline = None, inf if timeout is None else time.perf_counter() + timeout
        if isinstance(prompt, Conversation):
            prompt, namespace, source = prompt.frozen()
        number = self.inputs.namespaces.number(namespace)
        return self.prefixes.plan(self.inputs.encode(prompt), method, keep, namespace, source), number, deadline

    def release_prefix(self, prefix: CompressedPrefix) -> Future[None]:
        """Drop a compressed prefix. Raises InvalidInput for a value that is none."""
        if not isinstance(prefix, CompressedPrefix):
            raise InvalidInput(f"prefix is what engine.compress returns, got {prefix!r:.100}")
        number = self.inputs.namespaces.number(prefix.namespace)
        return self.thread.call(lambda: self.prefixes.release(prefix, number))

    # ---- the cache

    def probe(self, prompt: Prompt, namespace: Hashable, prefix: CompressedPrefix | None) -> Future[Explanation]:
        """Explain how much of a prompt, perhaps after a compressed prefix, is cached."""
        number = self.inputs.namespaces.number(namespace)
        ids = self.inputs.encode(prompt) if prefix is None else self.inputs.after_prefix(prefix, prompt, number)

        def explained() -> Explanation:
            found = self.core.cache.explain(ids, number)
            again = (
                time.perf_counter() - self._loaded_at if self.loaded_again and found.reason == "never_seen" else None
            )
            disk = max(0, self.core.records.reach(ids, number) - found.reached)
            return replace(found, disk=disk, reloaded_ago=again, prefix=str(prefix or ""))

        return self.thread.call(explained)

    def demote(self, prompt: Prompt, keep: int, namespace: Hashable) -> None:
        """Make cached blocks of a prompt the first to be evicted, except its first `keep` tokens."""
        ids, number = self.inputs.encode(prompt), self.inputs.namespaces.number(namespace)
        if not is_int(keep) or keep < 0:
            raise InvalidInput(f"keep is how many tokens to leave alone, an int >= 0; got {keep!r}")
        self.thread.post(lambda: self.core.demote(ids, keep, number))

    def audit(self, blocks: int) -> Future[AuditReport]:
        """Begin an audit of at least `blocks` cached blocks."""
        check_blocks(blocks)
        report: Future[AuditReport] = Future()
        self.thread.post(lambda: self._auditor.begin(blocks, report), begins=True)
        return report

    def clear_cache(self) -> Future[Future[None]]:
        """Drop every cached prefix that no request or pin holds; the inner future ends when none is left on a disk."""
        return self.thread.call(self.core.clear_cache)

    def reload_weights(self, state: State | None) -> Future[None]:
        """Make the model's present weights, or the weights of a state, count from the next step on."""
        weights = self.runs.weights
        checked = weights.checked(state)

        def reload() -> None:  # without the KV of the old weights, and the requests that use it
            self.core.forget(WeightsChanged("the weights were reloaded while the request ran: send it again"))
            try:
                weights.reload(checked)
            except Exception as error:
                self.core.refuse(WeightsChanged(f"a reload failed ({error}), so there are no weights: reload again"))
                raise
            self.core.refusal = None
            self.core.records.weights_changed()
            self.runs.weights_changed()

        return self.thread.call(reload)

    # ---- views

    def tree(self, namespace: Hashable) -> Future[TreeView]:
        """Take a view of the tree."""
        shown = ALL if namespace is ALL else self.inputs.namespaces.number(namespace)
        return self.thread.call(lambda: tree_view(self.core.cache, shown, decode=self._decode))

    def stats(self) -> EngineStats:
        """Return counters and gauges; on the engine's thread only."""
        core, facts = self.core, self._facts
        return EngineStats(
            model=facts.model,
            device=facts.device,
            dtype=facts.dtype,
            attention=facts.attention,
            max_length=facts.max_length,
            kv_bytes=facts.bytes_per_block * facts.num_blocks,
            uptime_s=time.perf_counter() - self._loaded_at,
            waiting=len(core.scheduler.waiting),
            running=len(core.scheduler.running),
            cache=core.cache.stats(),
            kv_dtype=facts.kv_dtype,
            disk=core.records.stats(),
            **{**vars(core.counters), **core.runner.stats()},
        )

    # ---- conversations

    def new_session(self) -> int:
        """Return a number for a conversation."""
        return next(self._session_numbers)

    def session_closed(self, number: int) -> None:
        """Notify the observers that a conversation is over."""

        def notify() -> None:
            for observer in self.core.observers:
                observer.session_closed(number)

        try:
            self.thread.post(notify)
        except EngineClosed:
            return


def _nothing() -> None:
    """Do nothing, so that posting this only wakes the thread."""


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        _log.exception(_RAISED)


def _answer(future: Future[Result], call: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
