"""Find the first part of a prompt that differs from an earlier prompt of its conversation.

Only hashes of parts are kept, no text, and nothing of one namespace has an effect in another one. A request is compared
with earlier ones that share at least as much of its beginning as any: the rules of `prompt_breaks` then decide whether
it goes on with one of them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from radixkv.chat.messages import Message
from radixkv.prompt_breaks import Break, Part, break_between, parts_of

_PART_BYTES = 640  # of a part: itself, its hashes, and its entries in lists and dicts
_REPLIES = 8  # of one prompt that are kept


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first changed part of a prompt, if there is one. `place` names the prompt in `BreakIndex.answered`."""

    place: int = 0
    found: Break | None = None


@dataclass(eq=False, slots=True)
class _Conversation:
    """The longest prompt of a conversation so far. `chain` has a hash of each of its beginnings.

    `keys` are the keys under which it may be found. `replies` are the replies to a prompt, by the hash of that prompt.
    """

    namespace: Hashable
    form: int  # of all parts, see `_forms`
    session: str | None = None
    parts: list[Part] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    replies: dict[int, list[Part]] = field(default_factory=dict)


class BreakIndex:
    """Compare each prompt with the conversations that were used last. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        """Start without conversations. `capacity` is about the memory in bytes; 0 compares nothing."""
        self._most = capacity // _PART_BYTES
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._recent: OrderedDict[_Conversation, None] = OrderedDict()
        self._size = 0  # parts of all conversations
        self._latest: dict[int, _Conversation] = {}  # by hashes of a beginning, its form, a part, and a session
        self._parts: defaultdict[Hashable, dict[int, Part]] = defaultdict(dict)  # of a namespace, by digest

    def compared(
        self, namespace: Hashable, messages: Sequence[Message], tools: Sequence[Any] | None, session: str | None
    ) -> Comparison:
        """Find the first part that an earlier prompt of the conversation had otherwise, and add the prompt.

        Nothing is found in a new conversation, or in one that only goes on. `session` is the client's name for it.
        """
        if not self._most:
            return Comparison()
        with self._lock:
            now = parts_of(messages, tools or (), self._parts[namespace])
            chain = list(accumulate((part.digest for part in now), _chained, initial=hash(namespace)))[1:]
            shared = len(now)
            while shared and chain[shared - 1] not in self._latest:
                shared -= 1
            nearest = self._latest[chain[shared - 1]] if shared else _new(namespace)
            found = next(self._breaks(session, now, nearest, shared), None)
            self._add(session, now, chain, nearest, shared)
            return Comparison(chain[-1], found)

    def answered(self, place: int, reply: Message) -> None:
        """Add a reply to a compared prompt: a client that sends it back unchanged goes on."""
        (part,) = parts_of([reply])
        with self._lock:
            conversation = self._latest.get(place)
            if conversation is not None:
                replies = conversation.replies.setdefault(place, [])
                replies.append(part)
                del replies[:-_REPLIES]

    def count(self, found: Break) -> None:
        """Count a break."""
        with self._lock:
            self._counts[found.part.partition("[")[0].removesuffix("s"), found.rule] += 1

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """The counted breaks, by the kind of the part and the rule."""
        with self._lock:
            return self._counts.copy()

    def check(self) -> None:
        """Raise AssertionError if the size or an index is wrong. O(parts)."""
        with self._lock:
            assert self._size == sum(len(each.parts) for each in self._recent) <= self._most, "miscounted, or too many"
            assert set(self._latest.values()) <= set(self._recent), "a forgotten conversation can be found"
            known = {(each.namespace, part.digest) for each in self._recent for part in each.parts}
            assert {(space, one) for space, parts in self._parts.items() for one in parts} <= known, "forgotten parts"

    # ---- inside

    def _breaks(
        self, session: str | None, now: list[Part], nearest: _Conversation, shared: int
    ) -> Iterator[Break]:
        """Yield the breaks with prompts that share the first `shared` parts of `now`, as many as any prompt does."""
        replies = nearest.replies.get(nearest.chain[shared - 1], []) if shared else []
        if shared == len(now) or now[shared].digest in [reply.digest for reply in replies]:
            return
        if replies and now[shared].role == "assistant":
            reply = replace(replies[-1], name=now[shared].name)
            yield from _different([*now[:shared], reply, *now[shared + 1 : shared + 2]], now, shared, same=True)
        if shared == len(nearest.parts) > 0:
            return
        sent = {part.digest for part in now}
        for each, least in self._candidates(session, now, nearest, shared):
            end = next((at for at in range(len(each.parts), 0, -1) if each.parts[at - 1].digest in sent), 0)
            same = session is not None and each.session == session
            yield from _different(each.parts[: max(end, shared + 1)], now, least, same=same)

    def _candidates(
        self, session: str | None, now: list[Part], nearest: _Conversation, shared: int
    ) -> Iterator[tuple[_Conversation, int]]:
        """Yield conversations, each with the least number of parts that it must share with `now`.

        A conversation with a later message may differ in a part that another conversation shares.
        """
        space = nearest.namespace
        later = [hash((space, part.digest)) for part in reversed(now[shared:])]
        yield from ((each, 0) for each in dict.fromkeys(map(self._latest.get, later)) if each is not None)
        others = [hash((space, session)), *reversed(_forms(_new(space).form, now)[shared:])]
        yield from ((self._latest[key], shared) for key in others if key in self._latest)
        yield nearest, shared

    def _add(
        self, session: str | None, now: list[Part], chain: list[int], nearest: _Conversation, shared: int
    ) -> None:
        """Extend the nearest conversation, or add another one; the beginning of a known prompt adds nothing."""
        if shared < min(len(now), len(nearest.parts)):
            nearest = _new(nearest.namespace)
        start, space = len(nearest.parts), nearest.namespace
        new, nearest.session = now[start:], session
        forms = _forms(nearest.form, new)
        keys = [*chain[start:], *forms, *(hash((space, part.digest)) for part in new)]
        keys += [] if session is None else [hash((space, session))]
        nearest.form = forms[-1] if forms else nearest.form
        nearest.parts += new
        nearest.chain += chain[start:]
        nearest.keys += keys
        self._latest.update(dict.fromkeys(keys, nearest))
        self._parts[space].update({part.digest: part for part in new})
        self._size += len(new)
        self._recent[nearest] = None
        self._recent.move_to_end(nearest)
        while self._size > self._most:
            self._forget(self._recent.popitem(last=False)[0])

    def _forget(self, oldest: _Conversation) -> None:
        self._size -= len(oldest.parts)
        for key in oldest.keys:
            if self._latest.get(key) is oldest:
                del self._latest[key]
        known = self._parts[oldest.namespace]
        for part in oldest.parts:
            if hash((oldest.namespace, part.digest)) not in self._latest:
                known.pop(part.digest, None)
        if not known:
            del self._parts[oldest.namespace]


def _new(namespace: Hashable) -> _Conversation:
    return _Conversation(namespace, hash((namespace, "form")))


def _different(before: Sequence[Part], now: Sequence[Part], shared: int, *, same: bool) -> Iterator[Break]:
    """Yield the break between two prompts after at least `shared` parts; a new last message is a new question."""
    found = break_between(before, now, same)
    if found is not None and shared <= found.at and (found.at < len(now) - 1 or now[-1].kind != "message"):
        yield found


def _chained(before: int, digest: int) -> int:
    return hash((before, digest))


def _forms(before: int, parts: Sequence[Part]) -> list[int]:
    """Return a hash of each beginning without its dates and ids, in which the order of tools does not count."""
    forms = []
    for part in parts:
        before = before + part.form if part.kind == "tool" else hash((before, part.form))
        forms.append(before)
    return forms
