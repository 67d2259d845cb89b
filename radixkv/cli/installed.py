"""Are the packages that are installed those that radixkv was made for?

Knows versions, and the ranges that radixkv's own metadata states: nothing is imported to look. Knows no device.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from radixkv import __version__
from radixkv.cli.finding import Finding, note, ok, problem

PYTHON = SpecifierSet(">=3.11")
_NAMED = ("torch", "triton", "transformers")  # a line each, also where nothing is wrong


def versions() -> Iterator[Finding]:
    """What is installed against what is supported: a line for the largest packages, and for each that does not fit."""
    yield ok("radixkv", __version__)
    python = f"{platform.python_version()} ({sys.platform}, {platform.machine()})"
    suits = PYTHON.contains(platform.python_version(), prereleases=True)
    yield ok("python", python) if suits else problem("python", f"{python}: {PYTHON} is needed")
    try:
        stated = requires("radixkv") or []
    except PackageNotFoundError:
        yield note("packages", "radixkv runs from a folder, not installed: nothing says which versions it supports")
        stated = list(_NAMED)
    for requirement in map(Requirement, stated):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = _judged(requirement)
            if requirement.name in _NAMED or found.status != "ok":
                yield found


def _judged(requirement: Requirement) -> Finding:
    """One package: too new is worth a note, as nobody has tested it; missing or too old is a problem."""
    name, range_ = requirement.name, requirement.specifier
    wanted = f"supported: {range_}" if range_ else "no range stated"
    try:
        here = version(name)
    except PackageNotFoundError:
        if name == "triton":
            return note(name, f"not installed ({wanted}): attention runs in torch")
        return problem(name, f"not installed ({wanted})")
    if range_.contains(here, prereleases=True):
        return ok(name, f"{here} ({wanted})")
    oldest = SpecifierSet(",".join(str(each) for each in range_ if each.operator in (">=", ">", "==", "~=")))
    if oldest.contains(here, prereleases=True):
        return note(name, f"{here} is newer than what was tested ({wanted})")
    return problem(name, f"{here} is too old ({wanted})")
