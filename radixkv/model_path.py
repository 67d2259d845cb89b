"""Find the local files that the name of a model or tokenizer means, without torch or transformers.

So a command can refuse a mistyped path before it imports them, which takes seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.errors import InvalidInput
from radixkv.gguf import header as gguf

BUNDLED = {"tiny": Path(__file__).parent / "assets" / "tiny"}
CONFIG = "config.json"
_PATH_STARTS = ("/", ".", "~")  # no hub name starts like this
_SUFFIX, _MAGIC = ".gguf", b"GGUF"
_HOLDS = {"model": "config.json and the weights", "tokenizer": "the tokenizer's files"}
_LISTED = 5  # file names in an error


def name_of(source: str | os.PathLike[str]) -> str:
    """Return `source` as a name; a relative path gets a leading "./", so that it is no hub name.

    >>> name_of("org/model"), name_of(Path("org/model")), name_of(Path("/models/one"))
    ('org/model', './org/model', '/models/one')
    """
    if isinstance(source, str):
        return source
    path = os.fspath(source)
    return path if path.startswith(_PATH_STARTS) else f"./{path}"


def shown_name(name: str) -> str:
    """Return the name that clients and the monitor see: of a GGUF file its stem, without the number of a shard.

    >>> shown_name("~/models/SmolLM2-Q4_1.gguf"), shown_name("Qwen3-00001-of-00002.gguf"), shown_name("org/model")
    ('SmolLM2-Q4_1', 'Qwen3', 'org/model')
    """
    return re.sub(r"-\d{5}-of-\d{5}$", "", Path(name).stem) if _ends_as_gguf(name) else name


def find(name: str, part: str = "model") -> Path | None:
    """Return the folder or GGUF file that `name` means; None for a hub name.

    A folder without a config.json that holds one GGUF model means that file. Raises InvalidInput for a path that does
    not exist, a file of another kind, and a folder with several GGUF models.
    """
    if not name.strip():
        raise InvalidInput(f"the {part}'s name is empty; give a folder, a hub name, or 'tiny' for the bundled model")
    if name in BUNDLED:
        return BUNDLED[name]
    path = local(name)
    with readable():
        if path.is_dir():
            return path if (path / CONFIG).is_file() or part != "model" else gguf.find(path) or path
        if path.exists():
            if not is_gguf(path):
                raise InvalidInput(f"{name} is a file; give the folder that holds {_HOLDS[part]}, or a GGUF file")
            return path
        if path.is_symlink():
            raise InvalidInput(f"{name} is a link to nothing, as in a cache that was cleaned: fetch or copy it again")
    if _ends_as_gguf(name):
        raise InvalidInput(f"there is no file {name}{_others(path.parent)}")
    if name.startswith(_PATH_STARTS) or name.count("/") > 1 or "\\" in name:
        raise InvalidInput(f"there is no {part} folder {name}")
    return None


def models_named(name: str) -> list[str]:
    """Return the paths of the GGUF models of a folder that has several, else the name itself. Raises InvalidInput."""
    path = local(name)
    with readable():
        if name in BUNDLED or not path.is_dir() or (path / CONFIG).is_file():
            return [name]
        found = gguf.models_in(path)
    return list(map(str, found)) if len(found) > 1 else [name]


def local(name: str) -> Path:
    """Return the path of a local name, with the home folder for a leading "~".

    Raises InvalidInput if that is the home of an unknown user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidInput(f"{name}: there is no user {Path(name).parts[0][1:]!r}: give the whole path") from error


def is_gguf(path: Path) -> bool:
    """Return whether an existing path is a GGUF file, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if _ends_as_gguf(path.name):
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@contextmanager
def readable() -> Iterator[None]:
    """Turn errors of the file system, such as missing permissions or a name that is too long, into InvalidInput."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from error


def _ends_as_gguf(name: str) -> bool:
    return name.lower().endswith(_SUFFIX)


def _others(folder: Path) -> str:
    """Return the hint that lists the GGUF files in a folder; empty if it has none."""
    with readable():
        names = sorted(each.name for each in folder.glob("*") if _ends_as_gguf(each.name))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"; its folder has {', '.join(names[:_LISTED])}{more}" if names else ""
