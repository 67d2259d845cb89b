"""Check installed packages, and the tokenizer, stop tokens and chat template of a model, for `radixkv doctor`.

Package versions are compared with the ranges in the metadata of radixkv without importing the packages. No token is
sampled.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from radixkv import __version__
from radixkv.errors import ChatError

if TYPE_CHECKING:
    from radixkv.chat.history_mode import Histories
    from radixkv.models.loaded import LoadedModel


Status = Literal["ok", "note", "problem"]
_MARKS = {"ok": "+", "note": "~", "problem": "!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its status, its subject, and an explanation."""

    status: Status
    about: str
    seen: str

    def line(self, width: int) -> str:
        """Format one printable line, with `about` padded to `width`.

        >>> ok("python", "3.12.1").line(10)
        '+ ok       python      3.12.1'
        """
        seen = "".join(letter if letter.isprintable() else " " for letter in self.seen)
        return f"{_MARKS[self.status]} {self.status:<7}  {self.about:<{width}}  {seen}"


ok = partial(Finding, "ok")
note = partial(Finding, "note")  # of a part that works, but not as well as it could
problem = partial(Finding, "problem")  # of a part that does not work


PYTHON = SpecifierSet(">=3.11")
_NAMED = ("torch", "triton", "transformers", "gguf")  # listed even without a problem


def versions(extra: str = "") -> Iterator[Finding]:
    """Compare installed with supported versions: the largest packages, and each one that does not fit.

    The packages of an `extra` of radixkv are included.
    """
    yield ok("radixkv", __version__)
    python = f"{platform.python_version()} ({sys.platform}, {platform.machine()})"
    suits = PYTHON.contains(platform.python_version(), prereleases=True)
    yield ok("python", python) if suits else problem("python", f"{python}: {PYTHON} is needed")
    try:
        stated = requires("radixkv") or []
    except PackageNotFoundError:
        yield note("packages", "radixkv runs from a folder, not installed: nothing says which versions it supports")
        stated = [each for each in _NAMED if each != "gguf" or extra == "gguf"]
    for requirement in map(Requirement, stated):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found = _judged(requirement)
            if requirement.name in _NAMED or found.status != "ok":
                yield found


def _judged(requirement: Requirement) -> Finding:
    """Check one package: a version above the tested range is a note, a missing or older one a problem."""
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
        return note(name, f"{here} is newer than the tested versions ({wanted})")
    return problem(name, f"{here} is too old ({wanted})")


_SHOWN = 6  # stop tokens that are written out


def language(loaded: LoadedModel) -> Iterator[Finding]:
    """Yield the findings about text: tokenizer, stop tokens, sampling, chat template."""
    yield _tokenizer(loaded)
    yield _stops(loaded)
    yield from _sampling(loaded)
    if loaded.tokenizer is not None:
        yield from _chat(loaded)


def _tokenizer(loaded: LoadedModel) -> Finding:
    if loaded.tokenizer is None:
        return note("tokenizer", "none came with the model: prompts are token ids, and there are no conversations")
    tokens, rows = len(loaded.tokenizer), loaded.vocab_size
    spare = f"; {rows - tokens:,} token ids are none of its tokens" if rows > tokens else ""
    return ok("tokenizer", f"{type(loaded.tokenizer).__name__}, {tokens:,} tokens{spare}")


def _stops(loaded: LoadedModel) -> Finding:
    """List the stop tokens of the model."""
    ids = sorted(loaded.stop_token_ids)
    if not ids:
        return note("stop tokens", "none: a reply ends at max_tokens, at a stop string, or at stop_token_ids=[...]")
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ok("stop tokens", ", ".join(_token(loaded.tokenizer, each) for each in ids[:_SHOWN]) + more)


def _token(tokenizer: Any | None, token: int) -> str:
    text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    return str(token) if text is None else f"{token} {text!r}"


def _sampling(loaded: LoadedModel) -> Iterator[Finding]:
    """List the sampling parameters that the checkpoint suggests."""
    from radixkv.sampling.params import SamplingParams, suggested

    usual = asdict(SamplingParams())
    own = {name: value for name, value in asdict(suggested(loaded.model)).items() if value != usual[name]}
    if own:
        written = ", ".join(f"{name}={value}" for name, value in own.items())
        yield ok("sampling", f"a request without params has the checkpoint's SamplingParams({written})")


def _chat(loaded: LoadedModel) -> Iterator[Finding]:
    """Check whether the model can hold conversations, and how they use cached prefixes."""
    from radixkv.chat.history_mode import histories

    if not getattr(loaded.tokenizer, "chat_template", None):
        yield note("chat template", "none: generate() and submit() work, chat() does not")
        return
    try:
        found = histories(loaded.tokenizer, loaded.stop_token_ids)
    except ChatError as error:
        yield problem("chat template", str(error))
        return
    yield _growing(found)
    if found.appends and not found.appends_with_tools:
        lost = found.tried.loss(tools=True)
        yield note(
            "chat template", f"with tools, chat() renders histories again: appending would lose something: {lost}"
        )
    yield from _untaken(found)
    if found.tool_format is None:
        yield note("tool calls", "the chat template writes them in no known format, so they stay text")
    else:
        yield ok("tool calls", f"read in the format {found.tool_format}")


def _growing(found: Histories) -> Finding:
    """Explain how a conversation grows, and the reason."""
    anew = "chat() renders histories again (history='template')"
    if found.strips_thinking:
        drops = f"it drops the thinking of earlier turns, so {anew}"
        return note("chat template", f"{drops}: a turn's prefix is cached up to the last reply that thought")
    if not found.appends:
        return note("chat template", f"{anew}: appending would lose something: {found.tried.loss(tools=False)}")
    if found.inexact is not None:
        nearly = "an appended history differs from the rendered one, but loses no text"
        return note("chat template", f"{nearly}: {found.inexact}")
    return ok("chat template", "appended histories read exactly as the template renders them")


def _untaken(found: Histories) -> Iterator[Finding]:
    """List messages that the template drops or refuses."""
    if not found.shows_system:
        yield note("chat template", "system prompts do not reach the model: it has no place for them")
    if not found.shows_tools:
        yield note("chat template", "it does not write tools: prompts list them, and calls are text")
    known = ([] if found.shows_system else ["system"]) + ([] if found.shows_tools else ["tools", "parallel calls"])
    refused = {said: dialogue for dialogue, said in reversed(found.tried.refused) if dialogue not in known}
    for said, dialogue in reversed(refused.items()):
        yield note("chat template", f"it takes no {dialogue}: {said}")
