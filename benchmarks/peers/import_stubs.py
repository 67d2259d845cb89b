"""Let a serving engine's wheel be imported where its GPU libraries and web servers are not installed.

Only packages that a prefix cache never calls are stubbed. A stubbed package yields empty classes for every attribute,
so `import` lines and class statements run; calling into one does nothing useful.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class _EmptyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _empty(name)
        setattr(cls, name, value)
        return value

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


def _nothing(self: Any, *args: Any, **keywords: Any) -> None:
    return None


def _as_decorator(self: Any, *args: Any, **keywords: Any) -> Any:
    return args[0] if args else None


def _empty(name: str) -> Any:
    members = {"__init__": _nothing, "__call__": _as_decorator, "__init_subclass__": classmethod(_nothing)}
    return _EmptyMeta(name, (), members)


class _EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a module attribute of every package, not a class default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _empty(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def install(packages: frozenset[str]) -> None:
    """From now on an import of one of these top-level packages, if it is not installed, yields an empty module."""
    missing = frozenset(name for name in packages if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
