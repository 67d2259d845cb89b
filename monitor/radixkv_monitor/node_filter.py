"""The filter of the Tree: a line of terms that a node must all match."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.telemetry.records import NodeRecord

STATES = ("active", "cached", "pinned", "done", "host")
EXAMPLES = "team-a  session:12  ids:15,42  min:500  reused:20  active | cached | pinned | done | host"


class InvalidFilter(ValueError):
    """A filter that cannot be parsed; the message says why, and which terms are allowed."""


def states_of(node: NodeRecord) -> frozenset[str]:
    """Return the node's states: active, cached or host; pinned if a pin ends here; done if its user said so.

    "host" is a node in host memory; the two others are nodes of the pool.
    """
    states = {"host" if node.residence == "host" else "active" if node.locks else "cached"}
    if node.pins:
        states.add("pinned")
    if node.demoted:
        states.add("done")
    return frozenset(states)


@dataclass(frozen=True, slots=True)
class NodeFilter:
    """All of these must match; empty fields match every node."""

    words: tuple[str, ...] = ()  # in the namespace or the text
    sessions: frozenset[int] = field(default_factory=frozenset)
    ids: tuple[int, ...] = ()  # a run within the first token ids
    least: int = 0  # tokens
    least_reused: int = 0  # requests that found the node in the cache
    states: frozenset[str] = field(default_factory=frozenset)  # any of them

    def matches(self, node: NodeRecord, namespace: str | None, session: int | None) -> bool:
        """Return whether a node matches, by its namespace and the session that held it last. A root matches only by its
        name.
        """
        if not node.tokens and (self.ids or self.least or self.least_reused or self.states or self.sessions):
            return False
        if self.sessions and session not in self.sessions:
            return False
        if node.tokens < self.least or (node.reused or 0) < self.least_reused:
            return False
        if self.states and self.states.isdisjoint(states_of(node)):
            return False
        if self.ids and not _has_run(node.head, self.ids):
            return False
        searched = f"{namespace or 'default'}\n{node.text or ''}".lower()
        return all(word in searched for word in self.words)


def parse(line: str) -> NodeFilter | None:
    """Parse a line; None if it is empty. InvalidFilter names the term that is wrong."""
    terms = line.lower().split()
    if not terms:
        return None
    words: list[str] = []
    ids: tuple[int, ...] = ()
    sessions, least, least_reused, states = set[int](), 0, 0, set[str]()
    for term in terms:
        name, colon, value = term.partition(":")
        if not colon:
            states |= {term} & set(STATES)
            words += [] if term in STATES else [term]
        elif name in ("session", "s"):
            sessions.add(_number(term, value))
        elif name in ("ids", "id"):
            ids = tuple(_number(term, part) for part in value.split(","))
        elif name in ("min", "tokens"):
            least = _number(term, value)
        elif name == "reused":
            least_reused = _number(term, value)
        elif name in ("ns", "namespace"):
            words.append(value)
        else:
            raise InvalidFilter(
                f"unknown filter {term!r}; use words, session:N, ids:N,N, min:N, reused:N, {', '.join(STATES)}"
            )
    return NodeFilter(tuple(words), frozenset(sessions), ids, least, least_reused, frozenset(states))


def _number(term: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidFilter(f"{term!r}: {value!r} is not a whole number") from None


def _has_run(head: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return any(head[at : at + len(ids)] == ids for at in range(len(head) - len(ids) + 1))
