"""Why a request missed, why a run was evicted, and what became of it: plain sentences. Knows records only."""

from __future__ import annotations

from radixkv.telemetry.records import EvictionRecord, RequestRecord
from radixkv_monitor.formatting import duration, share, some

GLYPHS = {
    "waiting": "…",
    "prefill": "▶",
    "decode": "●",
    "paused": "‖",
    "preempted": "↺",
    "finished": "✓",
    "cancelled": "∅",
    "failed": "✗",
}
"""A second cue beside the colour of a phase."""

STYLES = {
    "waiting": "warn",
    "prefill": "info",
    "decode": "good",
    "paused": "warn",
    "preempted": "warn",
    "finished": "plain",
    "cancelled": "dim",
    "failed": "bad",
}
"""The style of a phase, as tables name styles."""


def miss(request: RequestRecord) -> str:
    """How much of a prompt was cached, and why not more."""
    if request.admitted is None:
        return "It has not been admitted yet: nothing was looked up."
    cached, asked = request.cached_tokens, request.prompt_tokens
    head = f"{cached:,} of {some(asked, 'prompt token')} ({share(cached, asked)}) were cached."
    return f"{head} {_rest(request)}".rstrip()


def _rest(request: RequestRecord) -> str:
    at = "" if request.miss_at is None else f"{request.miss_at:,}"
    match request.miss_reason:
        case "diverged":
            return f"At token {at} the prompt departs from everything that is cached."
        case "never_seen":
            return f"What follows token {at} was never computed here (or went so long ago that it is forgotten)."
        case "evicted":
            ago = duration(request.miss_evicted_ago)
            return (
                f"From token {at} on, {some(request.miss_evicted_tokens, 'token')} more would have matched, but went "
                f"{ago} before, {request.miss_pressure or 'to make room'}."
            )
        case "limit" | "full":
            return "All of it was there; the last token is always computed, as its logits are what is asked for."
        case _:
            return ""


def miss_word(request: RequestRecord) -> str:
    """The reason of a miss in a word or two."""
    if request.admitted is None or request.miss_reason is None:
        return ""
    word = request.miss_reason.replace("_", " ")
    return word if request.miss_at is None or word == "full" else f"{word} @{request.miss_at:,}"


def eviction(record: EvictionRecord) -> str:
    """What was evicted, why, and whether that was wise."""
    what = f"Tokens {record.start:,} to {record.start + record.tokens:,} of node {record.node}"
    hits = f"hit {some(record.hits, 'time')} until then" if record.hits else "never hit"
    head = f"{what} went, {record.pressure or 'to make room'}: {some(record.blocks, 'block')}, unused for "
    return f"{head}{duration(record.idle_s)}, {hits}. {_regret(record)}"


def _regret(record: EvictionRecord) -> str:
    if record.wanted_again is None:
        return "Nobody has asked for them since."
    return f"They were asked for again {duration(record.wanted_again - record.time)} later: that is a regret."
