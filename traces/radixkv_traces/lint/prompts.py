"""The earlier prompts of a namespace: as a prefix cache without limit holds them, and as a later one may change them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.prompt_breaks import Part, parts_of
from radixkv_traces.chats import ChatRequest
from radixkv_traces.text_blocks import Encode, rendered, spoken

Parts = tuple[Part, ...]


class Texts:
    """The texts of all parts so far; a text that many prompts have is held, rendered and encoded once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[int, Part] = {}
        self._shown: dict[int, tuple[str, int]] = {}  # a text and its number of tokens

    def parts(self, request: ChatRequest) -> Parts:
        """Return the parts of a prompt. O(parts) + O(bytes of new texts)."""
        parts = parts_of(request.messages, request.tools, self._known)
        for part, said in zip(parts, (*request.tools, *request.messages), strict=True):
            if self._known.setdefault(part.digest, part) is part and part.digest not in self._shown:
                text = shown(said)
                self._shown[part.digest] = text, len(self._encode(text))
        return tuple(parts)

    def tokens(self, parts: Sequence[Part]) -> int:
        """Return the number of tokens. O(parts)."""
        return sum(self._shown[part.digest][1] for part in parts)

    def text(self, part: Part) -> str:
        """Return the text as it appears in the prompt."""
        return self._shown[part.digest][0]

    def shared(self, one: str, other: str) -> int:
        """Return the number of tokens with which both texts begin. O(bytes)."""
        return common_prefix(self._encode(one).tobytes(), 0, self._encode(other).tobytes()) // WIDTH


def shown(said: dict[str, Any]) -> str:
    """Return a tool with its keys as sent, or a message with its thinking as sent, as they appear in the prompt."""
    if "role" not in said:
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")) + "\n"
    thought = said.get("reasoning_content")
    return rendered(
        {**said, "content": f"<think>\n{thought}\n</think>\n{spoken({**said, 'tool_calls': None})}"}
        if thought
        else said
    )


class EarlierPrompts:
    """The prompts of a namespace so far, as a tree of their parts and by signs that a changed one may share."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._children: dict[int, list[str]] = {0: []}  # by the hash of a path: the sorted texts that follow it
        self._last: dict[tuple[object, ...], Parts] = {}  # by a sign: the last prompt with it

    def hits(self, parts: Sequence[Part]) -> int:
        """Return the tokens of the longest beginning that an earlier prompt has. O(parts) + O(log children) texts."""
        paths = self._paths(parts)
        known = len(paths) - 1
        siblings, texts = self._children[paths[-1]], [self._texts.text(part) for part in parts[known : known + 1]]
        near = [
            (text, each)
            for text in texts
            for at in [bisect_left(siblings, text)]
            for each in siblings[max(0, at - 1) : at + 1]
        ]
        return self._texts.tokens(parts[:known]) + max((self._texts.shared(*both) for both in near), default=0)

    def last_of(self, session: str) -> Parts:
        """Return the last prompt of a session; an empty one if there is none."""
        return self._last.get(("session", session), ())

    def alike(self, session: str, parts: Parts) -> list[Parts]:
        """Return prompts of the same conversation, and others that differ in one part of their beginnings."""
        paths = self._paths(parts)
        ends = [("end", part.form) for part in reversed(parts) if ("end", part.form) in self._last]
        signs = [("session", session), _tools(parts), *ends[:1], *_signs(paths[-1], parts, len(paths) - 1)]
        return [*{id(self._last[sign]): self._last[sign] for sign in signs if sign in self._last}.values()]

    def add(self, session: str, parts: Parts) -> None:
        """Add a prompt. O(parts)."""
        paths = self._paths(parts)
        for part in parts[len(paths) - 1 :]:
            siblings, text = self._children[paths[-1]], self._texts.text(part)
            siblings.insert(bisect_left(siblings, text), text)
            paths.append(hash((paths[-1], part.digest)))
            self._children[paths[-1]] = []
        asked = len([*takewhile(lambda part: part.role != "assistant", parts)])
        signs = [sign for at in range(asked) for sign in _signs(paths[at], parts, at)]
        self._last |= dict.fromkeys([("session", session), ("end", parts[-1].form), _tools(parts), *signs], parts)

    def _paths(self, parts: Sequence[Part]) -> list[int]:
        """Return the hashes of the known beginnings of a prompt, from the empty one to the longest."""
        paths = [0]
        for part in parts:
            path = hash((paths[-1], part.digest))
            if path not in self._children:
                break
            paths.append(path)
        return paths


def _tools(parts: Parts) -> tuple[object, ...]:
    return "tools", sum(part.digest for part in parts if part.kind == "tool")


def _signs(path: int, parts: Parts, at: int) -> Iterator[tuple[object, ...]]:
    """Return what a prompt may share with one that has the same path and then another part."""
    for part in parts[at : at + 1]:
        yield "form", path, part.form
        yield from [("tail", path, part.tail)] if part.tail else []
    yield from (("next", path, part.digest) for part in parts[at + 1 : at + 2])
