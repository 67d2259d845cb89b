"""The events of a cache, and the guard between the cache and the object that receives them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol, cast

from radixkv.cache.ghosts import Pressure
from radixkv.cache.types import Purpose

_log = logging.getLogger("radixkv.cache.observer")  # the name that the docs give


class Observer(Protocol):
    """Receives events synchronously, after each change, as plain numbers; node ids are never used twice.

    It must not call the cache. An observer that raises is named in the log and receives no further events.
    """

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        """A sequence was opened: `hit` of `asked` tokens were cached; only a "request" counts in the stats."""

    def forked(self, sequence: int, parent: int) -> None:
        """A sequence was forked off another."""

    def closed(self, sequence: int, length: int) -> None:
        """A sequence of `length` committed tokens was closed."""

    def rooted(self, node: int, namespace: Hashable) -> None:
        """A namespace got its root."""

    def uprooted(self, node: int) -> None:
        """A root without children and holders was removed."""

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        """A node was published that covers tokens [start, start + tokens) below `parent`."""

    def grown(self, node: int, tokens: int) -> None:
        """The node's end moved down by `tokens`."""

    def split(self, node: int, upper: int, tokens: int) -> None:
        """The first `tokens` of the node became a new node above it."""

    def merged(self, node: int, upper: int) -> None:
        """The node took over the tokens of `upper`, which is gone."""

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        """The last `tokens` of the node were removed, which freed `blocks`; `gone` if the whole node was removed."""

    def evicted(
        self,
        number: int,
        node: int,
        start: int,
        tokens: int,
        blocks: int,
        gone: bool,
        idle: float,
        hits: int,
        pressure: Pressure,
    ) -> None:
        """As `trimmed`, to make room: `pressure` is the cause, and `number` counts evictions from 1 on.

        The run began at token `start`. Its node was last used `idle` seconds before, and was hit `hits` times.
        """

    def regretted(self, number: int, tokens: int, ago: float) -> None:
        """A "request" asked for `tokens` that eviction `number` had dropped `ago` seconds before."""

    def copied(self, sequence: int, source: int, target: int) -> None:
        """A plan of the sequence copies one block before it writes."""


class TierObserver(Observer, Protocol):
    """Receives the events of a cache with a host tier too. Observers without these methods do not receive them."""

    def offloaded(self, node: int, host_node: int, start: int, tokens: int, blocks: int) -> None:
        """The last `tokens` of a node, from token `start` on, are host-resident after the next step.

        They are the first tokens of `host_node` now, and a step must copy `blocks` of its blocks. A `trimmed` event of
        the node comes first.
        """

    def loaded(self, sequence: int, tokens: int) -> None:
        """A sequence has committed `tokens` that it loaded from the host."""


def guarded(observer: Observer, drop: Callable[[], None]) -> Observer:
    """Wrap an observer: its first exception is logged, `drop` is called, and the cache goes on."""
    return cast(Observer, _Guarded(observer, drop))


class _Guarded:
    """Passes on every event; each of the observer's methods is looked up once, at the first event of its kind."""

    def __init__(self, observer: Observer, drop: Callable[[], None]) -> None:
        self._observer = observer
        self._drop = drop

    def __getattr__(self, event: str) -> Callable[..., None]:
        receive = getattr(self._observer, event, None) or (_missing if hasattr(Observer, event) else ignore)
        if receive is ignore:
            setattr(self, event, ignore)
            return ignore

        def fail() -> None:
            self._drop()
            _log.exception("the cache's observer failed at %r: it receives no more events", event)

        call = _guard(receive, fail, getattr(TierObserver, event))
        setattr(self, event, call)
        return call


def _guard(receive: Callable[..., None], fail: Callable[[], None], event: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `receive` with the arguments of an event, and `fail` if that raises.

    It is compiled with the event's own arguments, as namedtuple compiles its classes: `*facts` would build a tuple for
    each event and unpack it again, which is a fifth of the cost of telemetry.
    """
    code = event.__code__
    facts = ", ".join(code.co_varnames[1 : code.co_argcount])
    lines = (f"def call({facts}):", "    try:", f"        receive({facts})", "    except Exception:", "        fail()")
    made = {"receive": receive, "fail": fail}
    exec("\n".join(lines), made)
    return cast(Callable[..., None], made["call"])


def ignore(*facts: object) -> None:
    """Stand in for the methods of events that an observer does not need: they cost a third of guarded ones."""


def _missing(*facts: object) -> None:
    """Fail for an observer that lacks the method of an event."""
    raise AttributeError("the observer has no method for this event")
