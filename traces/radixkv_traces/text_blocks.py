"""Convert conversations to chains of block ids, by a tokenizer or by an estimate.

A message becomes `<|role|>`, a newline, its text, its tool calls as JSON, and a newline; chat templates differ from
that by a few tokens a message. A prompt only grows at its end, as a real engine's history does, so its blocks extend
the blocks of the preceding turn.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import resources
from importlib.resources.abc import Traversable
from operator import is_
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest, Message
from radixkv_traces.records import TraceRequest

Encode = Callable[[str], "array[int]"]
"""A function from text to token ids, 0 <= id < 2**32."""

BYTES_PER_TOKEN = 4  # of the estimate: about the mean of tokenizers with 32k to 200k entries on English and code


def estimate(text: str) -> array[int]:
    """Return a token for every four bytes of UTF-8, without any tokenizer.

    >>> len(estimate("A cat sat on the mat."))
    6
    """
    raw = text.encode("utf-8", "surrogatepass")
    return array("I", raw + bytes(-len(raw) % BYTES_PER_TOKEN))


def tokenizer(name: str) -> Encode:
    """Load the tokenizer of a folder or a tokenizer.json; "tiny" is the bundled model's. Raises InvalidInput if there
    is none.
    """
    path: Path | Traversable = resources.files("radixkv") / "assets" / "tiny" if name == "tiny" else Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"tokenizer {name!r}: there is no {path}; allowed are a folder, a tokenizer.json, or 'tiny'")
    from tokenizers import Tokenizer

    try:
        encode = Tokenizer.from_str(path.read_text(encoding="utf-8")).encode
    except Exception as error:  # the library raises no more specific error
        raise InvalidInput(f"tokenizer {name!r}: {error}") from error
    return lambda text: array("I", encode(text, add_special_tokens=False).ids)


def text_blocks(
    requests: Iterable[ChatRequest], block_tokens: int, encode: Encode = estimate
) -> Iterator[TraceRequest]:
    """Return each request's prompt as block ids; the last block may be part-filled.

    An id is a 63-bit hash of its tokens and of the preceding id. Where a turn continues the preceding one, only new
    text is encoded and hashed. Earlier messages are compared by identity, O(messages), and their ids are copied,
    O(blocks).
    """
    history = _History(block_tokens, encode)
    for request in requests:
        history.become((*request.tools, *request.messages))
        length = request.output_length
        if length is None:
            length = len(encode(spoken(request.reply))) if request.reply is not None else 0
        yield TraceRequest(
            request.timestamp,
            len(history.tokens),
            length,
            history.blocks(),
            request.session,
            request.turn,
            request.stop,
            request.namespace,
            block_tokens,
        )


def spoken(message: Message) -> str:
    """Return the text of a message, followed by its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    calls = message.get("tool_calls")
    return (content or "") + (_canonical(calls) if calls else "")


def rendered(message: Message) -> str:
    """Return a message, or a tool's description, as it appears in the prompt."""
    if "role" not in message:
        return _canonical(message) + "\n"
    return f"<|{message['role']}|>\n{spoken(message)}\n"


def _part(part: dict[str, Any]) -> str:
    text = part.get("text")
    return text if isinstance(text, str) else _canonical(part)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(slots=True)
class _History:
    """The prompt of the present request, extended from the preceding one where it continues it."""

    block_tokens: int
    encode: Encode
    messages: tuple[Message, ...] = ()
    tokens: array[int] = field(default_factory=lambda: array("I"))
    full: array[int] = field(default_factory=lambda: array("q"))  # ids of the full blocks

    def become(self, messages: tuple[Message, ...]) -> None:
        known = len(self.messages)
        if known > len(messages) or not all(map(is_, self.messages, messages)):
            known, self.tokens, self.full = 0, array("I"), array("q")
        for message in messages[known:]:
            self.tokens += self.encode(rendered(message))
        self.messages = messages
        while (len(self.full) + 1) * self.block_tokens <= len(self.tokens):
            self.full.append(self._id(len(self.full)))

    def blocks(self) -> array[int]:
        rest = len(self.tokens) % self.block_tokens
        return self.full + array("q", [self._id(len(self.full))] if rest else [])

    def _id(self, index: int) -> int:
        """Return the id of block `index`; all blocks before it have theirs."""
        begin = index * self.block_tokens
        before = self.full[index - 1 :][:1].tobytes() if index else b""
        text = self.tokens[begin : begin + self.block_tokens].tobytes()
        return int.from_bytes(blake2b(before + text, digest_size=8).digest(), "big") >> 1
