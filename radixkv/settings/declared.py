"""Declare the settings of a dataclass, check their values, and list them in its docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any, TypeVar

from radixkv.settings.kinds import Kind

Class = TypeVar("Class")


def setting(default: Any, kind: Kind, help: str = "", *, option: str = "", repr: bool = True, **more: Any) -> Any:
    """Return a dataclass field with its default, or the type of its empty default, its kind and its meaning.

    `option` is its name on the command line, if that is another one; `more` goes to the field's metadata.
    """
    metadata = {"kind": kind, "help": help, "option": option, **more}
    if isinstance(default, type):
        return field(default_factory=default, hash=False, repr=repr, metadata=metadata)
    return field(default=default, repr=repr, metadata=metadata)


@cache
def kinds(cls: type[Any]) -> Mapping[str, Kind]:
    """Return the kind of each setting of a dataclass, by name."""
    return {each.name: each.metadata["kind"] for each in fields(cls) if "kind" in each.metadata}


def check(settings: Any) -> None:
    """Check each setting of a dataclass by itself, and store it in the form of its kind; raises InvalidInput."""
    for name, kind in kinds(type(settings)).items():  # type: ignore[arg-type]  # mypy: no hash
        value = getattr(settings, name)
        checked = kind.checked(name, value)
        if checked is not value:
            object.__setattr__(settings, name, checked)


def given_in(arguments: object, of: type[Any]) -> dict[str, Any]:
    """Return the attributes of `arguments` that are settings of a dataclass."""
    return {each.name: getattr(arguments, each.name) for each in fields(of) if hasattr(arguments, each.name)}


def described(cls: type[Class]) -> type[Class]:
    """Decorate a dataclass: its docstring lists the settings, each with its meaning and its default."""
    lines = []
    for each in fields(cls):  # type: ignore[arg-type]
        default = "" if each.default is MISSING else f" ({each.default!r})"
        lines.append(f"    {each.name:20}{each.metadata['help']}{default}\n")
    cls.__doc__ = f"{cls.__doc__}\n{''.join(lines)}"
    return cls
