"""Compare each prompt of a log with the earlier ones that it may continue, and count what its breaks cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

from radixkv.prompt_breaks import RULES, Break, Change, Part, break_between, first_difference
from radixkv_traces.chats import ChatRequest
from radixkv_traces.lint.prompts import CachedPrompts, Texts
from radixkv_traces.text_blocks import Encode, estimate

_SHOWN = 80  # characters of a text around the first difference


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
    missed_tokens: int  # that an unlimited cache of the prompts as sent has to compute
    seconds: float  # from the first request to the last one
    findings: tuple[Finding, ...]

    @property
    def tokens(self) -> int:
        """The tokens of all findings."""
        return sum(each.tokens for each in self.findings)

    @property
    def share(self) -> float:
        """The share of prompt tokens that all findings cost."""
        return self.tokens / max(1, self.prompt_tokens)


def lint(requests: Iterable[ChatRequest], encode: Encode = estimate, block_size: int = 1) -> LintReport:
    """Return the findings of a log, in which hits end at a multiple of `block_size` tokens. O(bytes of new texts)."""
    linter = Linter(encode, block_size)
    for request in requests:
        linter.add(request)
    return linter.report()


class Linter:
    """The findings of the requests so far."""

    def __init__(self, encode: Encode = estimate, block_size: int = 1) -> None:
        self._texts, self._block_size = Texts(encode), block_size
        self._namespaces: dict[str | None, _Namespace] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._requests = self._tokens = self._missed = 0
        self._times: list[float] = []  # the first one and the last one

    def add(self, request: ChatRequest) -> None:
        """Compare a request with the earlier ones, and remember it."""
        parts = self._texts.parts(request)
        namespace = self._namespaces.setdefault(request.namespace, _Namespace(CachedPrompts(self._texts)))
        missed = self._missing(namespace, parts)
        if missed:
            self._compare(namespace, request.session, parts)
        namespace.add(request.session, parts)
        times = (*self._times, request.timestamp)
        self._requests, self._times = self._requests + 1, [min(times), max(times)]
        self._tokens += self._texts.length(parts)
        self._missed += missed

    def report(self) -> LintReport:
        """Return the findings so far."""
        seconds = (self._times[1] - self._times[0]) / 1000 if self._times else 0.0
        found = sorted(self._findings.values(), key=lambda each: -each.tokens)
        for each in found:
            each.share = each.tokens / max(1, self._tokens)
            each.tokens_a_day = each.tokens * 86_400 / seconds if seconds >= 3600 else None
        return LintReport(self._requests, self._tokens, self._missed, seconds, tuple(found))

    def _compare(self, namespace: _Namespace, session: str, parts: tuple[Part, ...]) -> None:
        """Count the breaks against the earlier prompt that would save most tokens."""
        own = namespace.sessions.get(session, ())
        if own and first_difference(own, parts) is None:
            return
        found = [list(self._breaks(namespace, each, parts, each is own)) for each in namespace.earlier(session, parts)]
        for cost, place, change in max(found, key=lambda each: sum(cost for cost, _, _ in each), default=[]):
            self._count(cost, place, change)

    def _breaks(
        self, namespace: _Namespace, before: Sequence[Part], now: Sequence[Part], same: bool
    ) -> Iterator[tuple[int, Break, Change]]:
        """Undo one break after the other; returns the cost of each."""
        at = -1
        while (found := break_between(before, now, same)) and found.at > at:
            at, change = found.at, Change(before, now, found.at, same)
            better = change.undone(found.rule)
            fewer = self._missing(namespace, now) - self._missing(namespace, better)
            cost = min(fewer, fewer + self._texts.length(better) - self._texts.length(now))
            if found.rule == "private-first":  # undone, the text of one session follows the shared one, and misses
                cost = min(cost, self._shared_after(change))
            if cost > 0:
                yield cost, found, change
            now = better

    def _missing(self, namespace: _Namespace, parts: Sequence[Part]) -> int:
        hits = namespace.cached.hits(parts)
        return self._texts.length(parts) - hits + hits % self._block_size

    def _shared_after(self, change: Change) -> int:
        """Return the tokens after the first difference that both prompts have, up to the next one."""
        pairs = zip(change.before[change.at + 1 :], change.now[change.at + 1 :], strict=False)
        shared = self._texts.length(
            [new for old, new in takewhile(lambda pair: pair[0].digest == pair[1].digest, pairs)]
        )
        if change.old.tail and change.old.tail == change.new.tail:
            old, new = self._texts.of(change.old)[::-1], self._texts.of(change.new)[::-1]
            shared += self._texts.shared(old, new)
        return shared

    def _count(self, cost: int, found: Break, change: Change) -> None:
        key = found.rule, found.part.partition("[")[0]
        if key not in self._findings:
            self._findings[key] = self._finding(found, change)
        self._findings[key].tokens += cost
        self._findings[key].requests += 1

    def _finding(self, found: Break, change: Change) -> Finding:
        rule, (old, new) = RULES[found.rule], (self._texts.said(part) for part in (change.old, change.new))
        at = sum(takewhile(bool, map(eq, old, new)))
        begin = max(0, at - _SHOWN // 2)
        place = f"{found.part}, character {at}" if rule.in_text else found.part
        before, after = (text[begin : begin + _SHOWN] for text in (old, new))
        return Finding(found.rule, place, 0, 0, 0.0, None, rule.remedy, before, after)


@dataclass(slots=True)
class _Namespace:
    """The prompts of a namespace, and those that a later one may continue."""

    cached: CachedPrompts
    sessions: dict[str, tuple[Part, ...]] = field(default_factory=dict)  # the last prompt of each session
    others: dict[tuple[str, int], tuple[Part, ...]] = field(default_factory=dict)  # by a sign: the last with it

    def earlier(self, session: str, parts: tuple[Part, ...]) -> list[tuple[Part, ...]]:
        """Return earlier prompts of the same conversation, and others that differ in one part at the beginning."""
        found = [self.sessions.get(session), self.others.get(_toolset(parts))]
        ends = (self.others.get(("end", part.form)) for part in reversed(parts) if part.kind == "message")
        found.append(next((each for each in ends if each), None))
        paths = self.cached.paths(parts)
        found += [self.others.get(sign) for sign in _signs(paths[-1], parts, len(paths) - 1)]
        return [*{id(each): each for each in found if each}.values()]

    def add(self, session: str, parts: tuple[Part, ...]) -> None:
        """Remember a prompt."""
        self.cached.add(parts)
        self.sessions[session] = parts
        self.others[_toolset(parts)] = self.others["end", parts[-1].form] = parts
        for at, path in enumerate(self.cached.paths(parts)[:-1]):
            if parts[at].role == "assistant":
                break
            for sign in _signs(path, parts, at):
                self.others[sign] = parts


def _toolset(parts: Sequence[Part]) -> tuple[str, int]:
    return "tools", sum(part.digest for part in parts if part.kind == "tool")


def _signs(path: int, parts: Sequence[Part], at: int) -> list[tuple[str, int]]:
    """Return signs that prompts have in common which differ in the part after a path: its form, its tail, the next."""
    if at >= len(parts):
        return []
    after = parts[at + 1].digest if at + 1 < len(parts) else 0
    return [
        (name, hash((path, sign)))
        for name, sign in (("form", parts[at].form), ("tail", parts[at].tail), ("next", after))
        if sign
    ]
