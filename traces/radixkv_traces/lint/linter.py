"""Compare each prompt of a log with earlier ones, and count the tokens that its breaks cost in an unlimited cache."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

from radixkv.cache.tokens import WIDTH, common_prefix
from radixkv.prompt_breaks import RULES, Break, Part, break_between, first_difference, parts_of, undone
from radixkv_traces.chats import ChatRequest
from radixkv_traces.text_blocks import Encode, estimate, rendered, spoken

_SHOWN = 80  # characters of a text around the first difference
_Parts = tuple[Part, ...]
_Key = tuple[str, object, object]  # a key of a prompt: kind, namespace or hash of a path, and value


@dataclass(slots=True)
class Finding:
    """A rule that requests break at one kind of part. `place`, `before` and `after` are of the first of them."""

    rule: str
    place: str  # "system, character 812"
    requests: int
    tokens: int  # computed again because of it
    share: float  # of all prompt tokens
    tokens_a_day: float | None  # None: the log spans less than an hour, or has no times
    remedy: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """The findings of a log, the most expensive one first. Their tokens are at most the tokens that missed."""

    requests: int
    prompt_tokens: int
    missed_tokens: int  # by a cache without limit that holds the prompts as they were sent
    seconds: float  # from the first request to the last one
    findings: tuple[Finding, ...]

    @property
    def cost(self) -> int:
        """The tokens of all findings."""
        return sum(each.tokens for each in self.findings)


def lint(requests: Iterable[ChatRequest], encode: Encode = estimate, block_size: int = 1) -> LintReport:
    """Return the findings of a log, in which hits end at multiples of `block_size` tokens. O(bytes of new texts)."""
    linter = Linter(encode, block_size)
    for request in requests:
        linter.add(request)
    return linter.report()


class Linter:
    """The findings of the requests so far."""

    def __init__(self, encode: Encode = estimate, block_size: int = 1) -> None:
        self._prompts, self._block_size = _Prompts(encode), block_size
        self._findings: dict[tuple[str, str], Finding] = {}
        self._requests = self._tokens = self._missed = 0
        self._begin, self._end = float("inf"), float("-inf")  # milliseconds

    def add(self, request: ChatRequest) -> None:
        """Compare a request with the earlier ones of its namespace, and add it to them."""
        prompts, where = self._prompts, (request.namespace, request.session)
        parts = prompts.parts(request)
        own = prompts.last_of(*where)
        if not own or first_difference(own, parts) is not None:
            alike = prompts.alike(*where, parts)
            found = [[*self._breaks(request.namespace, each, parts, each is own)] for each in alike]
            for cost, place, old, new in max(found, key=lambda breaks: sum(each[0] for each in breaks), default=[]):
                self._count(cost, place, old, new)
        self._requests, self._tokens = self._requests + 1, self._tokens + prompts.tokens(parts)
        self._missed += self._missing(request.namespace, parts)
        self._begin, self._end = min(self._begin, request.timestamp), max(self._end, request.timestamp)
        prompts.add(*where, parts)

    def report(self) -> LintReport:
        """Return the findings so far."""
        seconds = max(0.0, self._end - self._begin) / 1000
        for each in self._findings.values():
            each.share = each.tokens / self._tokens
            each.tokens_a_day = each.tokens * 86_400 / seconds if seconds >= 3600 else None
        findings = sorted(self._findings.values(), key=lambda each: -each.tokens)
        return LintReport(self._requests, self._tokens, self._missed, seconds, tuple(findings))

    def _breaks(
        self, namespace: str | None, before: _Parts, now: _Parts, same: bool
    ) -> Iterator[tuple[int, Break, Part, Part]]:
        """Undo one break after the other; returns the cost of each."""
        at, missed = -1, self._missing(namespace, now)
        while (found := break_between(before, now, same)) and found.at > at:
            at, better = found.at, tuple(undone(before, now, found, same))
            fewer = missed - self._missing(namespace, better)
            cost = min(fewer, fewer + self._prompts.tokens(better) - self._prompts.tokens(now))
            if found.rule == "private-first":  # in its place after the shared text, it would miss as it does now
                cost = min(cost, self._shared_after(before[at:], now[at:]))
            if cost > 0:
                missed -= fewer
                yield cost, found, before[at], now[at]
            now = better

    def _missing(self, namespace: str | None, parts: _Parts) -> int:
        hits = self._prompts.hits(namespace, parts)
        return self._prompts.tokens(parts) - hits + hits % self._block_size

    def _shared_after(self, before: _Parts, now: _Parts) -> int:
        """Return the tokens after the first difference that both prompts have in a row."""
        rest = takewhile(lambda both: both[0].digest == both[1].digest, zip(before[1:], now[1:], strict=False))
        shared = self._prompts.tokens([part for part, _ in rest])
        if 0 != before[0].tail == now[0].tail:
            shared += self._prompts.shared(*(self._prompts.text(part)[::-1] for part in (before[0], now[0])))
        return shared

    def _count(self, cost: int, found: Break, old: Part, new: Part) -> None:
        key = found.rule, found.part.partition("[")[0]
        finding = self._findings[key] = self._findings.get(key) or self._finding(found, old, new)
        finding.tokens, finding.requests = finding.tokens + cost, finding.requests + 1

    def _finding(self, found: Break, *parts: Part) -> Finding:
        """Return a finding without requests; its texts lack the line of a role, and the last line break."""
        texts = [self._prompts.text(part)[:-1].removeprefix(f"<|{part.role}|>\n") for part in parts]
        at = sum(takewhile(bool, map(eq, *texts)))
        place = f"{found.part}, character {at}" if RULES[found.rule].in_text else found.part
        begin = max(0, at - _SHOWN // 2)
        before, after = (text[begin : begin + _SHOWN] for text in texts)
        return Finding(found.rule, place, 0, 0, 0.0, None, RULES[found.rule].remedy, before, after)


class _Prompts:
    """The prompts so far. A text that many of them have is held, rendered and encoded once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._known: dict[int, Part] = {}
        self._shown: dict[int, tuple[str, int]] = {}  # by the digest of a part: its text and number of tokens
        self._children: dict[int, list[str]] = {}  # by the hash of a path of parts: the sorted texts that follow it
        self._last: dict[_Key, _Parts] = {}  # the last prompt with a key

    def parts(self, request: ChatRequest) -> _Parts:
        """Return the parts of a prompt, with digests of the texts as they appear in it. O(bytes)."""
        prompt = request.messages, request.tools
        for part, said in zip(parts_of(*prompt, self._known), (*request.tools, *request.messages), strict=True):
            if part.digest not in self._shown:
                text = shown(said)
                self._known[part.digest] = Part(part.kind, hash(text), *part[2:])
                self._shown[hash(text)] = text, len(self._encode(text))
        return tuple(parts_of(*prompt, self._known))

    def tokens(self, parts: Sequence[Part]) -> int:
        return sum(self._shown[part.digest][1] for part in parts)

    def text(self, part: Part) -> str:
        return self._shown[part.digest][0]

    def shared(self, one: str, other: str) -> int:
        """Return the number of tokens with which both texts begin. O(bytes)."""
        return common_prefix(self._encode(one).tobytes(), 0, self._encode(other).tobytes()) // WIDTH

    def hits(self, namespace: str | None, parts: _Parts) -> int:
        """Return the tokens of the longest beginning that an earlier prompt has. O(parts) + O(log children) texts."""
        paths = self._paths(namespace, parts)
        known, siblings = len(paths) - 1, self._children.get(paths[-1], [])
        hits = self.tokens(parts[:known])
        for text in map(self.text, parts[known : known + 1]):
            at = bisect_left(siblings, text)
            hits += max((self.shared(text, each) for each in siblings[max(0, at - 1) : at + 1]), default=0)
        return hits

    def last_of(self, namespace: str | None, session: str) -> _Parts:
        return self._last.get(("session", namespace, session), ())

    def alike(self, namespace: str | None, session: str, parts: _Parts) -> list[_Parts]:
        """Return prompts of the same conversation, and others that differ in one part of their beginnings."""
        paths = self._paths(namespace, parts)
        ends = [("end", namespace, part.form) for part in reversed(parts)]
        keys = [
            ("session", namespace, session), _tools(namespace, parts),
            *[each for each in ends if each in self._last][:1], *_keys(paths[-1], parts[len(paths) - 1 :]),
        ]  # fmt: skip
        return [*{id(self._last[key]): self._last[key] for key in keys if key in self._last}.values()]

    def add(self, namespace: str | None, session: str, parts: _Parts) -> None:
        paths = self._paths(namespace, parts)
        for part in parts[len(paths) - 1 :]:
            siblings, text = self._children.setdefault(paths[-1], []), self.text(part)
            siblings.insert(bisect_left(siblings, text), text)
            paths.append(hash((paths[-1], part.digest)))
            self._children[paths[-1]] = []
        asked = len([*takewhile(lambda part: part.role != "assistant", parts)])
        keys = [key for at in range(asked) for key in _keys(paths[at], parts[at:])]
        keys += [("session", namespace, session), ("end", namespace, parts[-1].form), _tools(namespace, parts)]
        self._last.update(dict.fromkeys(keys, parts))

    def _paths(self, namespace: str | None, parts: _Parts) -> list[int]:
        """Return the hashes of the known beginnings of a prompt, from the empty one to the longest."""
        paths = [hash(namespace)]
        for part in parts:
            path = hash((paths[-1], part.digest))
            if path not in self._children:
                break
            paths.append(path)
        return paths


def _tools(namespace: str | None, parts: _Parts) -> _Key:
    return "tools", namespace, sum(part.digest for part in parts if part.kind == "tool")


def _keys(path: int, parts: _Parts) -> list[_Key]:
    """Return the keys by which prompts with a similar next part are found, after the hash of a path."""
    keys: list[_Key] = [("form", path, part.form) for part in parts[:1]]
    keys += [("tail", path, part.tail) for part in parts[:1] if part.tail]
    return [*keys, *(("next", path, part.digest) for part in parts[1:2])]


def shown(said: dict[str, Any]) -> str:
    """Return a tool with its keys as sent, or a message with its thinking as sent, as they appear in the prompt."""
    if "role" not in said:
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")) + "\n"
    if thought := said.get("reasoning_content"):
        said = {**said, "content": f"<think>\n{thought}\n</think>\n{spoken({'content': said.get('content')})}"}
    return rendered(said)
