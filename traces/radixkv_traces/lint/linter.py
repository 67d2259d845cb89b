"""Compare each prompt of a log with the earlier ones that it may continue, and count what its breaks cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from radixkv.prompt_breaks import RULES, Break, Part, break_between, first_difference, undone
from radixkv_traces.chats import ChatRequest
from radixkv_traces.lint.prompts import Parts, Prompts
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
    missed_tokens: int  # by a cache without limit that holds the prompts as they were sent
    seconds: float  # from the first request to the last one
    findings: tuple[Finding, ...]


def lint(requests: Iterable[ChatRequest], encode: Encode = estimate, block_size: int = 1) -> LintReport:
    """Return the findings of a log, in which hits end at multiples of `block_size` tokens. O(bytes of new texts)."""
    linter = Linter(encode, block_size)
    for request in requests:
        linter.add(request)
    return linter.report()


class Linter:
    """The findings of the requests so far."""

    def __init__(self, encode: Encode = estimate, block_size: int = 1) -> None:
        self._prompts, self._block_size = Prompts(encode), block_size
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
        self, namespace: str | None, before: Parts, now: Parts, same: bool
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

    def _missing(self, namespace: str | None, parts: Parts) -> int:
        hits = self._prompts.hits(namespace, parts)
        return self._prompts.tokens(parts) - hits + hits % self._block_size

    def _shared_after(self, before: Parts, now: Parts) -> int:
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
