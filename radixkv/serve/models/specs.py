"""Read which models a server has: from the command line, from folders of GGUF files, and from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput
from radixkv.gguf import header as gguf
from radixkv.model_path import BUNDLED, find, local, models_named, readable, shown_name
from radixkv.removed import refuse_removed
from radixkv.sizing.kv_size import parse_bytes

_OWN = ("name", "path", "aliases", "tokenizer")
_NOT_IN_FILES = ("logits_processors",)
_SETTINGS = tuple(each.name for each in fields(EngineConfig) if each.name not in _NOT_IN_FILES)
LATEST = ":latest"
"""What Ollama's clients add to a name."""


@dataclass(frozen=True)
class ModelSpec:
    """One model of a server: its name and aliases for clients, its source, and the settings of its engine."""

    name: str
    source: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    tokenizer: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients may ask for it."""
        return (self.name, *self.aliases, *(f"{each}{LATEST}" for each in (self.name, *self.aliases)))

    def for_load(self, number: int) -> ModelSpec:
        """Return the model for its load `number`, counted from 1: each load records a trace of its own."""
        record = self.config.record
        if record is None or number == 1:
            return self
        path = Path(record)
        return replace(self, config=replace(self.config, record=path.with_stem(f"{path.stem}-{number}")))

    def estimate(self) -> int:
        """Return about the bytes of a load: the files of weights, and the pool if its size is given. Loads nothing."""
        path = find(self.source)
        files = [] if path is None else path.glob("*.safetensors") if path.is_dir() else gguf.shards(path)
        pool = self.config.kv_memory
        with readable():
            return sum(each.stat().st_size for each in files) + (0 if pool == "auto" else parse_bytes(pool))


def specs_of(
    sources: Iterable[str], file: str | None, config: EngineConfig, tokenizer: str | None, name: str | None = None
) -> list[ModelSpec]:
    """Return the models that the command line names, then those of a TOML file; raise InvalidInput.

    A folder without a config.json means each of its GGUF models. `config` has the settings of all; those of the file
    replace them. `name` is the name of the only model.
    """
    specs = [ModelSpec(shown_name(name), name, config) for source in sources for name in models_named(source)]
    if file is not None:
        specs += _in_file(Path(file), config)
    if len(specs) > 1:
        specs = _apart(specs, tokenizer)
    elif tokenizer is not None:
        specs = [replace(each, tokenizer=tokenizer) for each in specs]
    if name is not None:
        if len(specs) > 1 or file is not None:
            raise InvalidInput("model_name names one model: write name = ... into the file of --models")
        specs = [replace(each, name=name) for each in specs]
    if not specs:
        raise InvalidInput("name a model, or a file of models: radixkv serve MODEL..., or --models FILE.toml")
    for each in specs:
        find(each.source)  # a path that is wrong is refused before anything is loaded
        if each.tokenizer is not None:
            find(each.tokenizer, "tokenizer")
    _check_names(specs)
    return specs


def _apart(specs: Sequence[ModelSpec], tokenizer: str | None) -> list[ModelSpec]:
    """Refuse the options that belong to one model, and give each model a folder of its own on disk."""
    if tokenizer is not None:
        raise InvalidInput("--tokenizer is of one model: write tokenizer = ... into the file of --models")
    records = [each.config.record for each in specs if each.config.record is not None]
    if len(set(map(str, records))) < len(records):
        raise InvalidInput("record names one file for several models: give each its own in the file of --models")
    folder = [each.config.disk_cache and Path(each.config.disk_cache) / quote(each.name, safe="") for each in specs]
    return [replace(each, config=replace(each.config, disk_cache=folder[at])) for at, each in enumerate(specs)]


def _in_file(file: Path, config: EngineConfig) -> Iterator[ModelSpec]:
    try:
        given = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{file} is not TOML: {error}") from error
    tables = given.pop("model", None)
    if given or not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise InvalidInput(f"{file} must have a table [[model]] for each model, and nothing else")
    for number, table in enumerate(tables, 1):
        try:
            yield _in_table(table, file.parent, config)
        except InvalidInput as error:
            raise InvalidInput(f"{file}, model {number}: {error}") from error


def _in_table(table: dict[str, Any], folder: Path, config: EngineConfig) -> ModelSpec:
    """Return the model of one table; a path may be relative to the folder of the file."""
    if unknown := [name for name in table if name not in (*_OWN, *_SETTINGS)]:
        refuse_removed(unknown)
        raise InvalidInput(f"{unknown[0]!r} is no field; there are {', '.join((*_OWN, *_SETTINGS))}")
    path, aliases, tokenizer = table.get("path"), table.get("aliases", []), table.get("tokenizer")
    texts = {"path": path, "name": table.get("name", ""), "tokenizer": tokenizer or ""}
    for field, value in texts.items():
        if not isinstance(value, str):
            raise InvalidInput(f"{field} must be a text" if field in table else f"{field} is missing")
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise InvalidInput("aliases must be an array of texts")
    source = _beside(str(path), folder)
    settings = {name: table[name] for name in _SETTINGS if name in table}
    name, config = str(table.get("name") or shown_name(source)), replace(config, **settings)
    return ModelSpec(name, source, config, tuple(aliases), tokenizer and _beside(tokenizer, folder))


def _beside(path: str, folder: Path) -> str:
    beside = folder / local(path)
    return str(beside) if path not in BUNDLED and beside.exists() else path


def _check_names(specs: Sequence[ModelSpec]) -> None:
    owners: dict[str, str] = {}
    for each in specs:
        for name in each.names:
            if not name.removesuffix(LATEST) or not name.isprintable():
                raise InvalidInput(f"{name!r} cannot be the name of a model: give printable characters")
            if owners.setdefault(name, each.source) is not each.source or each.names.count(name) > 1:
                sources = f"{owners[name]} and {each.source}; name them apart by --models FILE.toml"
                raise InvalidInput(f"two models have the name {name!r}: {sources}")
