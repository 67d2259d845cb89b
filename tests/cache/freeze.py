"""`freeze(objects)`: a flat list of all that is reachable from some objects, to compare two moments of them."""

import types
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def freeze(*roots: object) -> list[object]:
    """Return the graph below `roots` as a flat list: equal lists before and after mean that nothing has changed."""
    numbers: dict[int, int] = {}
    written: list[object] = []
    waiting: list[Any] = list(reversed(roots))
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _ATOMS):
            written.append(thing)
        elif isinstance(thing, _BY_NAME):
            written.append(id(thing))
        elif id(thing) in numbers:
            written.append(("seen", numbers[id(thing)]))
        else:
            numbers[id(thing)] = len(numbers)
            parts = list(_parts(thing))
            written.append((type(thing).__name__, len(parts)))
            waiting.extend(reversed(parts))
    return written


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, (list, tuple)):
        yield from thing
    elif isinstance(thing, np.ndarray):
        yield from (str(thing.dtype), str(thing.shape), thing.tobytes())
    elif isinstance(thing, (array, bytearray, memoryview)):
        yield bytes(thing)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield key
            yield value
    elif isinstance(thing, (set, frozenset, deque)):
        yield from thing
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif not _attributes(thing):
        yield repr(thing)
    yield from _attributes(thing)


def _attributes(thing: Any) -> list[Any]:
    found: list[Any] = []
    for name in _names(type(thing)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(thing, name, thing)
        if value is not thing:
            found += [name, value]
    for name, value in getattr(thing, "__dict__", {}).items():
        found += [name, value]
    return found


@cache
def _names(kind: type) -> list[str]:
    return [name for name in _slots(kind) if name not in ("__dict__", "__weakref__")]


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            hidden = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if hidden else name
