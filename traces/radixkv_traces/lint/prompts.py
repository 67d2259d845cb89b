"""The prompts of a log so far: as a prefix cache without limit holds them, and by signs that a later one may share."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.prompt_breaks import Part, parts_of
from radixkv_traces.chats import ChatRequest
from radixkv_traces.text_blocks import Encode, rendered, spoken

Parts = tuple[Part, ...]
Sign = tuple[str, object, object]
"""A name, a namespace or the hash of a path in it, and what a prompt has there."""


class Prompts:
    """The prompts so far. A text that many of them have is held, rendered and encoded once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[int, Part] = {}
        self._shown: dict[int, tuple[str, int]] = {}  # by the digest of a part: its text and number of tokens
        self._children: dict[int, list[str]] = {}  # by the hash of a path of parts: the sorted texts that follow it
        self._last: dict[Sign, Parts] = {}  # the last prompt with a sign

    def parts(self, request: ChatRequest) -> Parts:
        """Return the parts of a prompt, with digests of the texts as they appear in it. O(bytes)."""
        prompt = request.messages, request.tools
        for part, said in zip(parts_of(*prompt, self._known), (*request.tools, *request.messages), strict=True):
            if part.digest not in self._shown:
                text = shown(said)
                self._known[part.digest] = replace(part, digest=hash(text))
                self._shown[hash(text)] = text, len(self._encode(text))
        return tuple(parts_of(*prompt, self._known))

    def tokens(self, parts: Sequence[Part]) -> int:
        """Return the number of tokens. O(parts)."""
        return sum(self._shown[part.digest][1] for part in parts)

    def text(self, part: Part) -> str:
        """Return the text as it appears in the prompt."""
        return self._shown[part.digest][0]

    def shared(self, one: str, other: str) -> int:
        """Return the number of tokens with which both texts begin. O(bytes)."""
        return common_prefix(self._encode(one).tobytes(), 0, self._encode(other).tobytes()) // WIDTH

    def hits(self, namespace: str | None, parts: Parts) -> int:
        """Return the tokens of the longest beginning that an earlier prompt has. O(parts) + O(log children) texts."""
        paths = self._paths(namespace, parts)
        known, siblings = len(paths) - 1, self._children.get(paths[-1], [])
        hits = self.tokens(parts[:known])
        for text in map(self.text, parts[known : known + 1]):
            at = bisect_left(siblings, text)
            hits += max((self.shared(text, each) for each in siblings[max(0, at - 1) : at + 1]), default=0)
        return hits

    def last_of(self, namespace: str | None, session: str) -> Parts:
        """Return the last prompt of a session; an empty one if there is none."""
        return self._last.get(("session", namespace, session), ())

    def alike(self, namespace: str | None, session: str, parts: Parts) -> list[Parts]:
        """Return prompts of the same conversation, and others that differ in one part of their beginnings."""
        paths = self._paths(namespace, parts)
        ends = [("end", namespace, part.form) for part in reversed(parts)]
        signs = [
            ("session", namespace, session), _tools(namespace, parts),
            *[each for each in ends if each in self._last][:1], *_signs(paths[-1], parts[len(paths) - 1 :]),
        ]  # fmt: skip
        return [*{id(self._last[sign]): self._last[sign] for sign in signs if sign in self._last}.values()]

    def add(self, namespace: str | None, session: str, parts: Parts) -> None:
        """Add a prompt. O(parts)."""
        paths = self._paths(namespace, parts)
        for part in parts[len(paths) - 1 :]:
            siblings, text = self._children.setdefault(paths[-1], []), self.text(part)
            siblings.insert(bisect_left(siblings, text), text)
            paths.append(hash((paths[-1], part.digest)))
            self._children[paths[-1]] = []
        asked = len([*takewhile(lambda part: part.role != "assistant", parts)])
        signs = [sign for at in range(asked) for sign in _signs(paths[at], parts[at:])]
        signs += [("session", namespace, session), ("end", namespace, parts[-1].form), _tools(namespace, parts)]
        self._last.update(dict.fromkeys(signs, parts))

    def _paths(self, namespace: str | None, parts: Parts) -> list[int]:
        """Return the hashes of the known beginnings of a prompt, from the empty one to the longest."""
        paths = [hash(namespace)]
        for part in parts:
            path = hash((paths[-1], part.digest))
            if path not in self._children:
                break
            paths.append(path)
        return paths


def _tools(namespace: str | None, parts: Parts) -> Sign:
    return "tools", namespace, sum(part.digest for part in parts if part.kind == "tool")


def _signs(path: int, parts: Parts) -> list[Sign]:
    """Return what a prompt may share with one that has another part after the same path."""
    signs: list[Sign] = [("form", path, part.form) for part in parts[:1]]
    signs += [("tail", path, part.tail) for part in parts[:1] if part.tail]
    return [*signs, *(("next", path, part.digest) for part in parts[1:2])]


def shown(said: dict[str, Any]) -> str:
    """Return a tool with its keys as sent, or a message with its thinking as sent, as they appear in the prompt."""
    if "role" not in said:
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")) + "\n"
    if thought := said.get("reasoning_content"):
        said = {**said, "content": f"<think>\n{thought}\n</think>\n{spoken({'content': said.get('content')})}"}
    return rendered(said)
