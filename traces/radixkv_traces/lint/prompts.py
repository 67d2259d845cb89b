"""The texts of the parts of prompts, and the prompts of a namespace as a prefix cache without limit holds them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.prompt_breaks import Part, parts_of
from radixkv_traces.chats import ChatRequest
from radixkv_traces.text_blocks import Encode, rendered, spoken


class Texts:
    """The parts of all prompts so far, and the text of each; a text that many prompts have is held once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[int, Part] = {}
        self._texts: dict[int, str] = {}
        self._lengths: dict[int, int] = {}

    def parts(self, request: ChatRequest) -> tuple[Part, ...]:
        """Return the parts of a prompt. Only texts that no earlier prompt had are rendered and encoded."""
        parts = parts_of(request.messages, request.tools, self._known)
        for part, said in zip(parts, (*request.tools, *request.messages), strict=True):
            if part.digest not in self._known:
                text = self._texts[part.digest] = shown(said)
                self._known[part.digest], self._lengths[part.digest] = part, len(self._encode(text))
        return tuple(parts)

    def length(self, parts: Sequence[Part]) -> int:
        """Return the number of tokens."""
        return sum(self._lengths[part.digest] for part in parts)

    def of(self, part: Part) -> str:
        """Return the text as it appears in the prompt."""
        return self._texts[part.digest]

    def said(self, part: Part) -> str:
        """Return the text without the line of its role and the last line break."""
        return self.of(part)[:-1].partition("\n")[2] if part.role else self.of(part)

    def shared(self, one: str, other: str) -> int:
        """Return the number of tokens with which both texts begin."""
        return common_prefix(self._encode(one).tobytes(), 0, self._encode(other).tobytes()) // WIDTH


def shown(said: Mapping[str, Any]) -> str:
    """Return a tool with its keys as sent, or a message with its thinking as sent, as they appear in the prompt."""
    if "role" not in said:
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")) + "\n"
    thought = said.get("reasoning_content")
    if not thought:
        return rendered(dict(said))
    return rendered({**said, "content": f"<think>\n{thought}\n</think>\n{spoken({'content': said.get('content')})}"})


class CachedPrompts:
    """A tree of the parts of all prompts so far. Counts the tokens that a prefix cache without limit would hit."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._children: dict[int, list[str]] = {0: []}  # by the hash of a path: the sorted texts that follow it

    def hits(self, parts: Sequence[Part]) -> int:
        """Return the tokens of the longest beginning that an earlier prompt has. O(parts) + O(log children) texts."""
        paths = self.paths(parts)
        known = len(paths) - 1
        hits = self._texts.length(parts[:known])
        if known < len(parts):
            text, siblings = self._texts.of(parts[known]), self._children[paths[-1]]
            at = bisect_left(siblings, text)
            hits += max((self._texts.shared(text, each) for each in siblings[max(0, at - 1) : at + 1]), default=0)
        return hits

    def paths(self, parts: Sequence[Part]) -> list[int]:
        """Return the hashes of the known beginnings of a prompt, from the empty one to the longest."""
        paths = [0]
        for part in parts:
            path = hash((paths[-1], part.digest))
            if path not in self._children:
                break
            paths.append(path)
        return paths

    def add(self, parts: Sequence[Part]) -> None:
        """Add a prompt."""
        paths = self.paths(parts)
        path = paths[-1]
        for part in parts[len(paths) - 1 :]:
            siblings, text = self._children[path], self._texts.of(part)
            siblings.insert(bisect_left(siblings, text), text)
            path = hash((path, part.digest))
            self._children[path] = []
