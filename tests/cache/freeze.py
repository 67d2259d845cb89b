"""`freeze(objects)`: a flat list of all that is reachable from some objects, to compare two moments of them."""

import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from radixkv.disk.tier import DiskTier

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})  # the most frequent atoms, found by their exact type
_ABSENT = "an attribute without a value"


def freeze(*roots: object) -> list[object]:
    """Return the graph below `roots` as a flat list: equal lists before and after mean that nothing has changed."""
    numbers: dict[int, int] = {}
    written: list[object] = []
    waiting: list[Any] = list(reversed(roots))
    while waiting:
        thing = waiting.pop()
        if type(thing) in _PLAIN or isinstance(thing, _ATOMS):
            written.append(thing)
        elif isinstance(thing, _BY_NAME):
            written.append(id(thing))
        elif id(thing) in numbers:
            written.append(("seen", numbers[id(thing)]))
        else:
            numbers[id(thing)] = len(numbers)
            parts = _parts(thing)
            written.append((type(thing).__name__, len(parts)))
            if _PLAIN.issuperset(map(type, parts)):
                written.extend(parts)
            else:
                waiting.extend(reversed(parts))
    return written


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, DiskTier):  # its threads change what it has seen
        return []
    contents, slots = _shape(type(thing))  # type: ignore[arg-type]  # a class is hashable
    parts = [] if contents is None else contents(thing)
    parts += [getattr(thing, name, _ABSENT) for name in slots]
    attributes = getattr(thing, "__dict__", None)
    if attributes:
        parts += attributes.keys()
        parts += attributes.values()
    return [repr(thing)] if contents is None and not parts else parts


@cache
def _shape(kind: type) -> tuple[Callable[[Any], list[Any]] | None, list[str]]:
    """A function that lists the contents of a kind of object, if it has some, and the names of its slots."""
    slots = [name for name in _slots(kind) if name not in ("__dict__", "__weakref__")]
    for kinds, contents in _CONTENTS:
        if issubclass(kind, kinds):
            return contents, slots
    return None, slots


_CONTENTS: list[tuple[tuple[type, ...], Callable[[Any], list[Any]]]] = [
    ((list, tuple), list),
    ((np.ndarray,), lambda thing: [str(thing.dtype), str(thing.shape), thing.tobytes()]),
    ((array, bytearray, memoryview), lambda thing: [bytes(thing)]),
    ((Mapping,), lambda thing: [*thing.keys(), *thing.values()]),
    ((set, frozenset, deque), list),
    ((types.MethodType,), lambda thing: [thing.__func__, thing.__self__]),
]


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            hidden = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if hidden else name
