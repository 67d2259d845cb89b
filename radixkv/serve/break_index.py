"""Find the first part of a prompt that differs from an earlier prompt of its conversation.

Only hashes of parts are kept, no text, and nothing of one namespace has an effect in another one. A request is compared
with the earlier prompts that share most of its beginning, a later message, or its session: the rules of `prompt_breaks`
decide whether it goes on with one of them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from marshal import dumps
from typing import Any

from radixkv.chat.messages import Message
from radixkv.prompt_breaks import Break, Part, break_between, parts_of

_PART_BYTES = 1000  # of a part with its hashes, entries in lists and dicts, and replies; and of a conversation
_REPLIES = 8  # of one prompt that are kept
_CANDIDATES = 4  # conversations with a later message to which a prompt is compared


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first changed part of a prompt, if there is one. `place` names the prompt in `BreakIndex.answered`."""

    place: int = 0
    found: Break | None = None


@dataclass(eq=False, slots=True)
class _Conversation:
    """The longest prompt of a conversation so far. `chain` has a hash of each of its beginnings.

    `form` is a hash of the prompt without dates and ids. `keys` are the keys under which the conversation may be found.
    `replies` are the replies to a prompt, by its hash in `chain`.
    """

    namespace: Hashable
    session: str | None = None
    form: int = 0
    parts: list[Part] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    replies: dict[int, list[Part]] = field(default_factory=dict)


class BreakIndex:
    """Compare each prompt with the conversations that were used last. Thread-safe.

    `counts` has the numbers of breaks by kind of part and rule; the caller adds to it.
    """

    def __init__(self, capacity: int) -> None:
        """Start without conversations. `capacity` is about the memory in bytes; 0 compares nothing."""
        self._most = capacity // _PART_BYTES
        self._lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._recent: OrderedDict[_Conversation, None] = OrderedDict()
        self._size = 0  # conversations and their parts
        self._latest: dict[int, _Conversation] = {}  # by hashes of a beginning, its form, a part, tools, and a session
        self._parts: defaultdict[Hashable, dict[int, Part]] = defaultdict(dict)  # of a namespace, by digest

    def compared(
        self, namespace: Hashable, messages: Sequence[Message], tools: Sequence[Any] | None, session: str | None
    ) -> Comparison:
        """Find the first part that differs from an earlier prompt of the conversation, and add the prompt.

        Nothing is found in a new conversation, or in one that only goes on. `session` is the client's name for it.
        """
        if not self._most or not (messages or tools):
            return Comparison()
        with self._lock:
            listed = hash((namespace, dumps([*(tools or ())])))
            now = self._parts_of(namespace, messages, tools or (), listed)
            chain = _chain(hash(namespace), now)
            shared = next((at for at in range(len(now), 0, -1) if chain[at - 1] in self._latest), 0)
            nearest = self._latest[chain[shared - 1]] if shared else _Conversation(namespace)
            found = max(self._breaks(session, now, nearest, shared), key=lambda each: each.at, default=None)
            self._add(session, now, chain, nearest, shared, listed)
            return Comparison(chain[-1], found)

    def answered(self, place: int, reply: Message) -> None:
        """Add a reply to a compared prompt: a client that sends it back unchanged goes on."""
        (part,) = parts_of([reply])
        with self._lock:
            if place in self._latest:
                replies = self._latest[place].replies
                replies[place] = [*replies.get(place, []), part][-_REPLIES:]

    def check(self) -> None:
        """Raise AssertionError if the size or an index is wrong. O(parts)."""
        with self._lock:
            size = len(self._recent) + sum(len(each.parts) for each in self._recent)
            assert self._size == size <= self._most, "miscounted, or too many"
            assert set(self._latest.values()) <= set(self._recent), "a forgotten conversation can be found"
            known = {(each.namespace, part.digest) for each in self._recent for part in each.parts}
            assert {(space, one) for space, parts in self._parts.items() for one in parts} <= known, "forgotten parts"

    # ---- inside

    def _parts_of(
        self, namespace: Hashable, messages: Sequence[Message], tools: Sequence[Any], listed: int
    ) -> list[Part]:
        """Return the parts of a prompt; `listed` is a hash of its tools, which need no hash each if it is known."""
        known, alike = self._parts[namespace], self._latest.get(listed)
        head = parts_of((), tools, known) if alike is None else alike.parts[: len(tools)]
        return head + parts_of(messages, (), known)

    def _breaks(self, session: str | None, now: list[Part], nearest: _Conversation, shared: int) -> Iterator[Break]:
        """Yield the breaks with earlier prompts; the first `shared` parts are all that any prompt shares.

        A new last message is a new question.
        """
        for before, least, same in self._befores(session, now, nearest, shared):
            found = break_between(before, now, same)
            if found is not None and least <= found.at and (found.at < len(now) - 1 or now[-1].kind != "message"):
                yield found

    def _befores(
        self, session: str | None, now: list[Part], nearest: _Conversation, shared: int
    ) -> Iterator[tuple[list[Part], int, bool]]:
        """Yield earlier prompts, the least number of parts that each must share, and whether it is of the session.

        A prompt with a later message may differ in a part that another conversation shares.
        """
        replies = nearest.replies.get(nearest.chain[shared - 1], []) if shared else []
        if shared == len(now) or now[shared].digest in [reply.digest for reply in replies]:
            return
        if len(replies) == _REPLIES and now[shared].role == "assistant":  # it may be a reply that is no longer kept
            return
        if replies and now[shared].role == "assistant":
            yield [*now[:shared], replies[-1], *now[shared + 1 : shared + 2]], shared, True
        if shared and shared == len(nearest.parts):
            return
        space, sent = nearest.namespace, {part.digest for part in now}
        later = [hash((space, part.digest)) for part in reversed(now[shared:])]
        others = [hash((space, session)), *reversed(_forms(hash(space), now)[shared:])]
        likely = dict.fromkeys(self._latest[key] for key in later if key in self._latest)
        least = dict.fromkeys(islice(likely, _CANDIDATES), 0)
        for each in (*(self._latest[key] for key in others if key in self._latest), nearest):
            least.setdefault(each, shared)
        for each, fewest in least.items():
            last = next((at for at in range(len(each.parts) - 1, shared, -1) if each.parts[at].digest in sent), shared)
            whole = last + 1 >= len(each.parts)  # of two requests of a session, one may be for a sub-agent
            yield each.parts[: last + 1], fewest, whole and session is not None and each.session == session

    def _add(
        self, session: str | None, now: list[Part], chain: list[int], nearest: _Conversation, shared: int, listed: int
    ) -> None:
        """Extend the nearest conversation, or add another one; the beginning of a known prompt adds nothing."""
        space = nearest.namespace
        if shared < min(len(now), len(nearest.parts)):
            replies = {at: nearest.replies[at] for at in chain[:shared] if at in nearest.replies}
            nearest = _Conversation(space, replies=replies)
        start = len(nearest.parts)
        if new := now[start:]:
            nearest.session = session
            forms = _forms(nearest.form or hash(space), new)
            keys = [listed, *chain[start:], *forms, *[hash((space, part.digest)) for part in new]]
            keys += [hash((space, session))] * (session is not None)
            nearest.form = forms[-1]
            nearest.parts += new
            nearest.chain += chain[start:]
            nearest.keys += keys
            self._latest.update(dict.fromkeys(keys, nearest))
            self._parts[space].update([(part.digest, part) for part in new])
            self._size += len(new) + (start == 0)
        self._recent[nearest] = None
        self._recent.move_to_end(nearest)
        while self._size > self._most:
            self._forget(self._recent.popitem(last=False)[0])

    def _forget(self, oldest: _Conversation) -> None:
        self._size -= 1 + len(oldest.parts)
        for key in oldest.keys:
            if self._latest.get(key) is oldest:
                del self._latest[key]
        known = self._parts[oldest.namespace]
        for part in oldest.parts:
            if hash((oldest.namespace, part.digest)) not in self._latest:
                known.pop(part.digest, None)
        if not known:
            del self._parts[oldest.namespace]


def _chain(before: int, parts: Sequence[Part]) -> list[int]:
    """Return a hash of each beginning."""
    return [before := hash((before, part.digest)) for part in parts]


def _forms(before: int, parts: Sequence[Part]) -> list[int]:
    """Return a hash of each beginning without its dates and ids, in which the order of tools does not count."""
    forms = []
    for part in parts:
        before = before + part.form + 1 if part.kind == "tool" else hash((before, part.form, "form"))
        forms.append(before)
    return forms
