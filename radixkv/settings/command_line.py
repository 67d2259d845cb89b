"""Make the options of commands from declared settings, and name options in errors about settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.settings.kinds import Flag


def add_settings(group: argparse._ActionsContainer, of: type[Any], *names: str) -> None:
    """Add an option for each of these settings of a dataclass, with its default and its help."""
    for setting in fields(of):
        if setting.name in names:
            _add(group, setting, _named_as_options(setting.metadata["help"], of))


def _add(group: argparse._ActionsContainer, setting: Field[Any], help: str) -> None:
    kind, default, option = setting.metadata["kind"], setting.default, option_of(setting)
    if isinstance(kind, Flag):
        if default:
            option, help = f"--no-{option[2:]}", f"do not {help}"
        group.add_argument(option, dest=setting.name, action=f"store_{not default}".lower(), help=help)
        return
    many = default == ()
    group.add_argument(
        option,
        dest=setting.name,
        action="append" if many else "store",
        default=[] if many else default,
        type=kind.parse,
        metavar=kind.metavar,
        help=help if many or default in (None, "auto") else f"{help} (default {default})",
    )


def option_of(setting: Field[Any]) -> str:
    """Return the option of a setting."""
    return f"--{(setting.metadata['option'] or setting.name).replace('_', '-')}"


def _named_as_options(text: str, of: type[Any]) -> str:
    """Return a help text in which names of settings are those of their options."""
    for name in (each.name for each in fields(of) if "_" in each.name):
        text = re.sub(rf"\b{name}\b", f"--{name.replace('_', '-')}", text)
    return text.replace("%", "%%")


@contextmanager
def naming_options(*classes: type[Any]) -> Iterator[None]:
    """In an InvalidInput that starts with the name of a setting, replace the name by the command-line option."""
    options = {each.name: option_of(each) for cls in classes for each in fields(cls)}
    try:
        yield
    except InvalidInput as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        if name not in options:
            raise
        raise InvalidInput(f"{options[name]}{str(error).removeprefix(name)}") from error
