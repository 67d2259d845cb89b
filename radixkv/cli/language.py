"""What a loaded model reads and writes: its tokenizer, what ends and shapes a reply, and conversations.

Knows how to say what was found. Does not know pools or devices, and samples nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from radixkv.cli.finding import Finding, note, ok, problem
from radixkv.errors import ChatError

if TYPE_CHECKING:
    from radixkv.cli.histories import Histories
    from radixkv.models.loaded import LoadedModel

_SHOWN = 6  # stop tokens that are written out


def language(loaded: LoadedModel) -> Iterator[Finding]:
    """Every finding, in the order in which a prompt meets them."""
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
    """What ends a reply, apart from what a request names."""
    ids = sorted(loaded.stop_token_ids)
    if not ids:
        return note("stop tokens", "none: a reply ends at max_tokens, at a stop string, or at stop_token_ids=[...]")
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ok("stop tokens", ", ".join(_token(loaded.tokenizer, each) for each in ids[:_SHOWN]) + more)


def _token(tokenizer: Any | None, token: int) -> str:
    text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
    return str(token) if text is None else f"{token} {text!r}"


def _sampling(loaded: LoadedModel) -> Iterator[Finding]:
    """What the checkpoint suggests for sampling."""
    from radixkv.sampling.params import SamplingParams, suggested

    usual = asdict(SamplingParams())
    own = {name: value for name, value in asdict(suggested(loaded.model)).items() if value != usual[name]}
    if own:
        written = ", ".join(f"{name}={value}" for name, value in own.items())
        yield ok("sampling", f"a request without params has the checkpoint's SamplingParams({written})")


def _chat(loaded: LoadedModel) -> Iterator[Finding]:
    """Whether it can hold conversations, and what they do to the cached prefix."""
    from radixkv.cli.histories import histories

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
            "chat template", f"with tools, chat() renders histories anew: appending would lose something: {lost}"
        )
    yield from _untaken(found)


def _growing(found: Histories) -> Finding:
    """How a conversation grows, and why not otherwise."""
    anew = "chat() renders histories anew (history='template')"
    if found.strips_thinking:
        drops = f"it drops the thinking of earlier turns, so {anew}"
        return note("chat template", f"{drops}: a turn's prefix is cached up to the last reply that thought")
    if not found.appends:
        return note("chat template", f"{anew}: appending would lose something: {found.tried.loss(tools=False)}")
    if found.inexact is not None:
        nearly = "an appended history is not quite what it renders, and lacks nothing"
        return note("chat template", f"{nearly}: {found.inexact}")
    return ok("chat template", "appended histories read exactly as the template renders them")


def _untaken(found: Histories) -> Iterator[Finding]:
    """What does not reach the model, and what the template refuses for other reasons."""
    shown = {"system prompts": found.shows_system, "tools": found.shows_tools}
    missing = [what for what, is_shown in shown.items() if not is_shown]
    if missing:
        yield note("chat template", f"{' and '.join(missing)} do not reach the model: it has no place for them")
    known = ([] if found.shows_system else ["system"]) + ([] if found.shows_tools else ["tools", "parallel calls"])
    refused = {said: dialogue for dialogue, said in reversed(found.tried.refused) if dialogue not in known}
    for said, dialogue in reversed(refused.items()):
        yield note("chat template", f"it takes no {dialogue}: {said}")
