"""What the cache tells whoever listens: telemetry and recordings hang here. Costs nothing while nobody does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol, cast

from radixkv.cache.ghosts import Pressure
from radixkv.cache.types import Purpose

_log = logging.getLogger("radixkv.cache.observer")  # named in the docs


class Observer(Protocol):
    """Called synchronously, after the fact, with plain numbers; node ids are never used twice.

    It must not call the cache. One that raises is named in the log, and told nothing more.
    """

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        """A sequence was opened: `hit` of `asked` tokens were cached; only a "request" counts in the stats."""

    def forked(self, sequence: int, parent: int) -> None:
        """A sequence was forked off another."""

    def closed(self, sequence: int, length: int) -> None:
        """A sequence of `length` committed tokens was closed."""

    def rooted(self, node: int, namespace: Hashable) -> None:
        """A namespace has its root now."""

    def uprooted(self, node: int) -> None:
        """Nothing is left below a root, and nobody holds it: it is gone."""

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        """A node was published that covers tokens [start, start + tokens) below `parent`."""

    def grown(self, node: int, tokens: int) -> None:
        """The node's end moved down by `tokens`."""

    def split(self, node: int, upper: int, tokens: int) -> None:
        """The first `tokens` of the node became a new node above it."""

    def merged(self, node: int, upper: int) -> None:
        """The node took over the tokens of `upper`, which is gone."""

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        """The last `tokens` of the node were evicted, which freed `blocks`; `gone` if nothing is left of it."""

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
        """As `trimmed`, to make room, which is what `pressure` says; the `number` is the eviction's own, from 1 on.

        The run began at token `start`; its node was last used `idle` seconds before, and `hits` opens had ended there.
        """

    def regretted(self, number: int, tokens: int, ago: float) -> None:
        """A "request" asked for `tokens` of what eviction `number` dropped, `ago` seconds after it did."""

    def copied(self, sequence: int, source: int, target: int) -> None:
        """A plan of the sequence copies one block before it writes."""


def guarded(observer: Observer, drop: Callable[[], None]) -> Observer:
    """The observer, but none of its exceptions reaches the cache: the first one is logged, and `drop` is called."""
    return cast(Observer, _Guarded(observer, drop))


class _Guarded:
    """Passes on every event; whom to tell is looked up once, when there is something of the kind to tell."""

    def __init__(self, observer: Observer, drop: Callable[[], None]) -> None:
        self._observer = observer
        self._drop = drop

    def __getattr__(self, event: str) -> Callable[..., None]:
        hear = getattr(self._observer, event, None) or _deaf
        if hear is unheard:
            setattr(self, event, unheard)
            return unheard

        def fail() -> None:
            self._drop()
            _log.exception("the cache's observer failed at %r: it is told nothing more", event)

        tell = _guard(hear, fail, getattr(Observer, event))
        setattr(self, event, tell)
        return tell


def _guard(hear: Callable[..., None], fail: Callable[[], None], event: Callable[..., None]) -> Callable[..., None]:
    """Calls `hear` with the facts of an event; `fail` if it raises.

    It is made with the event's own arguments, as namedtuple makes its classes: `*facts` would build a tuple for each
    event and take it apart again, which is a fifth of what telemetry costs.
    """
    code = event.__code__
    facts = ", ".join(code.co_varnames[1 : code.co_argcount])
    lines = (f"def tell({facts}):", "    try:", f"        hear({facts})", "    except Exception:", "        fail()")
    made = {"hear": hear, "fail": fail}
    exec("\n".join(lines), made)
    return cast(Callable[..., None], made["tell"])


def unheard(*facts: object) -> None:
    """For an observer's events of which it wants to know nothing: they cost it a third of what others do."""


def _deaf(*facts: object) -> None:
    """What an observer hears that lacks an ear for it."""
    raise AttributeError("the observer has no method for this event")
