"""Modules of another engine, imported from a folder that the user names, without the engine.

The folder holds packages in the layout of their wheels. Only the requested modules of a package run, never its
`__init__`, which would import a whole engine. The caller names the modules to replace by stubs, and their contents.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Stubs = Mapping[str, Mapping[str, Any]]
"""Stub modules: their names and contents."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `package` and its modules in `folder`, except the stubs."""

    def __init__(self, package: str, folder: Path, stubs: Stubs) -> None:
        self._package, self._folder, self._stubs = package, folder, stubs

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._package and not name.startswith(self._package + "."):
            return None
        if name in self._stubs:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        place = self._folder.joinpath(*name.split("."))
        if place.with_suffix(".py").is_file():
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        if place.is_dir() or any(stub.startswith(name + ".") for stub in self._stubs):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a stub; a package that is no stub stays empty."""
        module.__path__ = []
        module.__dict__.update(self._stubs.get(module.__name__, {}))


@contextmanager
def _finding(finder: _Finder, package: str) -> Iterator[None]:
    """Put the finder first while this is open; afterwards only modules that it found can import each other."""
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def load(name: str, folder: Path, stubs: Stubs) -> types.ModuleType:
    """Import the module `name` from `folder`; raises ImportError with the missing name.

    An engine of this name that is installed is left alone, and so are modules of it that were imported before.
    """
    package = name.partition(".")[0]
    if not folder.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise ImportError(f"{folder} has no {name.replace('.', '/')}.py")
    before = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == package}
    for key in before:
        del sys.modules[key]
    try:
        with _finding(_Finder(package, folder, stubs), package):
            return importlib.import_module(name)
    finally:
        sys.modules.update(before)
