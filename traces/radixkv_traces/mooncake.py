"""Recorded requests in the Mooncake line format: one JSON object a line, prompts as chains of block ids.

A block id stands for its tokens *and all tokens before them*, so equal ids mean equal prefixes. The number of tokens in
a block is a property of the file; `block_size` states it where present.

    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
    {"timestamp": 9, "input_length": 1700, "output_length": 10, "hash_ranges": [[0, 2], [7, 1]], "session": "a"}

The format is Mooncake's (Qin et al., FAST 2025). `hash_ranges` ([first, count], ...) is a shorter form of the ids.
`session` (or AIPerf's `session_id`), `turn` and `stop` are extra fields of agent traces; `namespace` (or `tenant`) and
`block_size` are extra fields of radixkv's own recordings. Bailian's traces (github.com/alibaba-edu/
qwen-bailian-usagetraces-anon) differ: times in seconds, blocks of 16 tokens, and a chain of `parent_chat_id` for a
session.

Traces with lengths and arrivals only, as CSV, are BurstGPT, and Azure's LLM inference traces. They have no prompts, so
nothing is known about shared prefixes. Their requests have no blocks: `fragmentation` and `run` use them, and
`simulate` refuses them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from radixkv_traces.records import Delays, Epoch, Line, Named, TraceError, TraceRequest, is_count, short_repr

MAX_BLOCKS = 1 << 24  # of one prompt: a range with more is a typing error
_BAILIAN_TOKENS = 16  # of a block in Bailian's traces


def parse(text: str, file: str = "<line>", line: int = 1) -> TraceRequest:
    """Parse one line. O(blocks).

    >>> parse('{"timestamp": 0, "input_length": 90, "output_length": 5, "hash_ranges": [[3, 2], [9, 1]]}').blocks
    array('q', [3, 4, 9])
    """
    return request(decoded(text, file, line))


def decoded(text: str, file: str, line: int) -> Line:
    """Decode a line to a JSON object, without reading its fields."""
    try:
        fields = json.loads(text.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        problem = f"{error.msg}, at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise TraceError(file, line, None, f"not JSON: {problem}") from error
    if not isinstance(fields, dict):
        raise TraceError(file, line, None, f"a JSON {type(fields).__name__}, not an object")
    return Line(file, line, fields)


def requests(objects: Iterator[Named]) -> Iterator[TraceRequest]:
    """Return the requests of the lines of a file.

    AIPerf's `delay` is counted from the preceding request of the session, because the time of its answer is not in the
    file.
    """
    delays = Delays()
    for _, line in objects:
        session = line.name("session", "session_id")
        yield request(line, delays.time(line, session) if session is not None else None)


def bailian(objects: Iterator[Named]) -> Iterator[TraceRequest]:
    """Return the requests of a Bailian trace; the session is the chat at the root of the chain of parents."""
    roots: dict[str, str] = {}
    for _, line in objects:
        chat, parent = line.name("chat_id"), line.name("parent_chat_id")
        if chat is None:
            raise line.wrong("chat_id", "missing")
        root = chat if parent is None or parent == "-1" else roots.get(parent, parent)
        roots[chat] = root
        found = request(line, line.time() * 1000)
        yield replace(found, session=root, block_tokens=found.block_tokens or _BAILIAN_TOKENS)


def request(line: Line, time: float | None = None) -> TraceRequest:
    """Return the request that a line's fields describe; `time` (ms) replaces its `timestamp`."""
    block_tokens = line.count("block_size") if line.fields.get("block_size") is not None else None
    if block_tokens == 0:
        raise line.wrong("block_size", "0 is not an int >= 1")
    if time is None and "timestamp" not in line.fields and line.fields.get("delay") is not None:
        raise line.wrong("timestamp", "missing: a delay is counted from the answer before, which has no time")
    return TraceRequest(
        timestamp=line.time() if time is None else time,
        input_length=line.count("input_length"),
        output_length=line.count("output_length"),
        blocks=_ids(line) if "hash_ids" in line.fields else _ranges(line),
        session=line.name("session", "session_id"),
        turn=line.count("turn") if line.fields.get("turn") is not None else None,
        stop=line.text("stop"),
        namespace=line.namespace(),
        block_tokens=block_tokens,
    )


def to_line(request: TraceRequest) -> str:
    """Return the line, without a newline, that `parse` reads back; fields that are None are left out.

    >>> to_line(TraceRequest(0.0, 90, 5, array("q", [3, 4]), session="a"))
    '{"timestamp": 0, "input_length": 90, "output_length": 5, "hash_ids": [3, 4], "session": "a"}'
    """
    fields: dict[str, Any] = {
        "timestamp": int(request.timestamp) if request.timestamp.is_integer() else request.timestamp,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": list(request.blocks),
        "session": request.session,
        "turn": request.turn,
        "stop": request.stop,
        "namespace": request.namespace,
        "block_size": request.block_tokens,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def _ids(line: Line) -> array[int]:
    if "hash_ranges" in line.fields:
        raise line.wrong("hash_ranges", "given in addition to hash_ids")
    values = line.fields["hash_ids"]
    if not isinstance(values, list):
        raise line.wrong("hash_ids", f"{short_repr(values)} is not a list")
    for value in values:
        if not is_count(value):
            raise line.wrong("hash_ids", f"{short_repr(value)} is not an int, 0 <= id < 2**63")
    return array("q", values)


def _ranges(line: Line) -> array[int]:
    values = line.fields.get("hash_ranges")
    if values is None:
        raise line.wrong("hash_ids", "missing (and no hash_ranges either)")
    if not isinstance(values, list):
        raise line.wrong("hash_ranges", f"{short_repr(values)} is not a list")
    blocks = array("q")
    for pair in values:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_count, pair)):
            raise line.wrong("hash_ranges", f"{short_repr(pair)} is not [first >= 0, count >= 0]")
        first, count = pair
        if len(blocks) + count > MAX_BLOCKS or first + count > 1 << 63:
            raise line.wrong("hash_ranges", f"{pair!r} makes more than {MAX_BLOCKS} blocks or ids >= 2**63")
        blocks.extend(range(first, first + count))
    return blocks


# ---- traces with lengths only


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
