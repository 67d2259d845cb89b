"""Traces with lengths and arrivals only, as CSV: BurstGPT, and Azure's LLM inference traces.

They have no prompts, so nothing is known about shared prefixes. Their requests have no blocks: `fragmentation` and
`run` use them, and `simulate` refuses them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from radixkv_traces.records import Epoch, Line, Named, TraceRequest, short_repr


def azure(objects: Iterator[Named]) -> Iterator[TraceRequest]:
    """Return the requests of Azure's traces: TIMESTAMP, ContextTokens, GeneratedTokens."""
    epoch = Epoch()
    for name, line in objects:
        time = epoch.since(line, "TIMESTAMP", line.required("TIMESTAMP"))
        yield _request(line, time, "ContextTokens", "GeneratedTokens", name)


def burstgpt(objects: Iterator[Named]) -> Iterator[TraceRequest]:
    """Return the requests of BurstGPT: Timestamp (seconds), Request tokens, Response tokens, and Session ID if present.

    A failed request has an answer of 0 tokens.
    """
    for name, line in objects:
        text = line.required("Timestamp")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1 << 63:
            raise line.wrong("Timestamp", f"{short_repr(text)} is not a number of seconds >= 0")
        session = str(line.fields.get("Session ID") or "").strip() or name
        yield _request(line, seconds * 1000, "Request tokens", "Response tokens", session)


def _request(line: Line, time: float, prompt: str, answer: str, session: str) -> TraceRequest:
    return TraceRequest(time, _count(line, prompt), _count(line, answer), array("q"), session)


def _count(line: Line, field: str) -> int:
    text = str(line.required(field)).strip()
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise line.wrong(field, f"{short_repr(text)} is not an int >= 0")
    return int(text)
