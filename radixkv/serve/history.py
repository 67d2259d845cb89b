"""Remember the token ids of replies, and find them by the messages that a client sends back.

A client of a stateless server sends the whole conversation each time. If its first messages equal the messages of an
earlier prompt and its reply, their ids are reused, and their text is not encoded again. Messages are compared in full,
never by a hash, and only within one namespace, one list of tools and one set of template arguments.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import Arguments, arguments_key
from radixkv.serve.break_index import BreakIndex

_BREAKS = 8  # the share of the memory that hashes of prompts take, in addition, as 1 / _BREAKS
# Bytes of a node without its texts and ids: the object, its children's dict, two entries in dicts.
_NODE_BYTES = 700


class Node:
    """A message of a conversation; its parent is the message before it. With `ids` it is a reply of the engine.

    The ids of prompt and reply are the first `shared` ids of `base`, then `ids`. The last `reply_length` of them
    are the reply's.
    """

    __slots__ = ("base", "children", "date", "ids", "key", "parent", "reply_length", "session", "shared", "thinking")

    def __init__(self, parent: Node | None, key: Any) -> None:
        """Create a message without ids."""
        self.parent, self.key = parent, key
        self.children: dict[str, Node] = {}
        self.ids: array[int] | None = None
        self.base: Node | None = None
        self.shared = self.reply_length = 0
        self.thinking: str | None = None
        self.date: str | None = None
        self.session: int | None = None

    @property
    def size(self) -> int:
        """Approximate number of bytes."""
        ids = 0 if self.ids is None else self.ids.itemsize * len(self.ids)
        thinking = 0 if self.thinking is None else sys.getsizeof(self.thinking)
        return _NODE_BYTES + _size(self.key) + ids + thinking

    def whole(self) -> array[int]:
        """Return the ids of prompt and reply. O(tokens)."""
        assert self.ids is not None
        if self.base is None:
            return self.ids[:]
        return _front(self.base, self.shared) + self.ids


def nearest(node: Node | None) -> Node | None:
    """Return the last reply at or before a message."""
    while node is not None and node.ids is None:
        node = node.parent
    return node


def _front(node: Node, length: int) -> array[int]:
    """Return the first `length` ids of a reply's prompt and the reply. O(length)."""
    pieces: list[array[int]] = []
    at: Node | None = node
    while at is not None:
        assert at.ids is not None
        start = at.shared if at.base is not None else 0
        if length > start:
            pieces.append(at.ids[: length - start])
            length = start
        at = at.base
    return sum(reversed(pieces), array("i"))


def ids_of_reply(node: Node) -> array[int]:
    """Return the ids of the reply alone."""
    assert node.ids is not None
    return node.ids[len(node.ids) - node.reply_length :]


def shared_length(first: array[int], second: array[int]) -> int:
    """Return the length of the common prefix; one comparison if one sequence begins with the other."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(at for at in range(length) if first[at] != second[at])


def subtree(node: Node) -> Iterator[Node]:
    """Yield the node and its descendants."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def check_ids(node: Node) -> None:
    """Raise AssertionError if a node's ids do not fit its place in the tree."""
    if node.ids is None:
        assert node.base is None and not node.shared and not node.reply_length, "a message without a reply has ids"
        return
    assert 0 <= node.reply_length <= len(node.ids), "a reply's ids are not all its own"
    if node.base is not None:
        above = node.parent
        while above is not None and above is not node.base:
            above = above.parent
        assert above is node.base and node.shared <= len(node.base.whole()), "a reply builds on what is not before it"


def _size(key: Any) -> int:
    return sum(map(_size, key)) if isinstance(key, tuple) else sys.getsizeof(key)


Tools: TypeAlias = Sequence[Any] | None

_THINKING = "reasoning_content"


@dataclass(frozen=True, slots=True)
class Known:
    """The longest remembered beginning of a conversation.

    Its `messages` messages end with a reply; `ids` are the prompt's and that reply's, a stop token included.
    `reply_ids` has the ids of each remembered reply, by its position. `date` is the date in the rendered prompt,
    `session` the number of the conversation. All are empty or None if nothing is remembered.
    """

    messages: int
    ids: array[int]
    reply_ids: Mapping[int, array[int]]
    date: str | None
    session: int | None


@dataclass(slots=True)
class HistoryStats:
    """Counters, which only grow, and gauges: `replies` take `bytes` of at most `capacity`."""

    capacity: int
    lookups: int = 0  # conversations with an assistant message that were looked up
    found: int = 0  # lookups that found at least one reply
    remembered: int = 0
    forgotten: int = 0  # replies that were evicted to make room
    replies: int = 0
    bytes: int = 0
    breaks: Mapping[tuple[str, str], int] = field(default_factory=dict)  # changed prompts, by kind of part and rule


class HistoryIndex:
    """Map (namespace, tools, template arguments, messages) to the ids that the engine emitted for them. Thread-safe.

    Messages form a tree: a common beginning of conversations is stored once, and a reply's ids only from where they
    differ from the previous reply's. Beyond `capacity` bytes the least recently used conversations are evicted, their
    last messages first. `breaks` compares prompts with earlier ones.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty. `capacity` is in bytes; 0 remembers nothing."""
        self._roots: dict[Hashable, Node] = {}
        self._recent: OrderedDict[Node, int] = OrderedDict()  # node -> bytes; a parent comes after its children
        self._stats = HistoryStats(capacity)
        self.breaks = BreakIndex(capacity // _BREAKS)
        self._lock = threading.Lock()

    def ids_for(
        self, namespace: Hashable, messages: Sequence[Message], tools: Tools = None, arguments: Arguments | None = None
    ) -> Known:
        """Return the longest beginning of a conversation that ends with a remembered reply.

        Makes it the most recently used. O(bytes of the messages + tokens).
        """
        keys = [_key(message) for message in messages]
        with self._lock:
            path = self._path(self._roots.get(_root_key(namespace, tools, arguments)), keys, messages)
            replies = [at for at, node in enumerate(path) if node.ids is not None]
            self._stats.lookups += any(message.get("role") == "assistant" for message in messages)
            self._stats.found += bool(replies)
            if not replies:
                return Known(0, array("i"), {}, None, None)
            last = path[replies[-1]]
            self._touch(last)
            reply_ids = {at: ids_of_reply(path[at]) for at in replies}
            return Known(replies[-1] + 1, last.whole(), reply_ids, last.date, last.session)

    def remember(
        self,
        namespace: Hashable,
        messages: Sequence[Message],
        reply: Message,
        prompt_ids: Sequence[int],
        emitted_ids: Sequence[int],
        *,
        tools: Tools = None,
        arguments: Arguments | None = None,
        date: str | None = None,
        session: int | None = None,
    ) -> None:
        """Store that `messages`, encoded as `prompt_ids`, were answered by `reply`, sampled as `emitted_ids`.

        `reply` is the message as the client received it, and will send it back. O(bytes of the messages + tokens).
        """
        whole = [*messages, reply]
        keys = [_key(message) for message in whole]
        ids = array("i", prompt_ids) + array("i", emitted_ids)
        with self._lock:
            node = self._insert(_root_key(namespace, tools, arguments), keys)
            if node.ids is None or not node.children:  # later replies may build on its present ids
                self._stats.replies += node.ids is None
                self._stats.remembered += 1
                node.base = nearest(node.parent)
                common = 0 if node.base is None else shared_length(node.base.whole(), ids)
                node.shared = min(common, len(prompt_ids))
                node.ids, node.reply_length = ids[node.shared :], len(emitted_ids)
                node.thinking, node.date = _thinking(reply), date
                self._update_size(node)
            node.session = session  # the latest of the conversations that share this reply is likely to continue
            self._touch(node)
            self._trim()

    @property
    def stats(self) -> HistoryStats:
        """The present counters and gauges."""
        with self._lock:
            return replace(self._stats, breaks=dict(self.breaks.counts))

    def check(self) -> None:
        """Raise AssertionError if the tree, the order or the counters disagree. O(everything remembered)."""
        with self._lock:
            seen: set[Node] = set()
            for where, root in self._roots.items():
                assert root.parent is None and root.key == where, "a root is filed under another key"
                seen.update(subtree(root))
            assert seen == set(self._recent), "a node is in the tree or in the order, not in both"
            order = {node: at for at, node in enumerate(self._recent)}
            for node in seen:
                assert self._recent[node] == node.size, "a node was weighed wrongly"
                assert node.children or node.ids is not None, "a leaf says nothing"
                for key, child in node.children.items():
                    assert child.key == key and child.parent is node, "a child is filed under another key"
                    assert order[child] < order[node], "a message is more recent than one behind it"
                check_ids(node)
            stats = self._stats
            assert stats.bytes == sum(self._recent.values()) <= stats.capacity, "too many bytes, or miscounted"
            assert stats.replies == sum(node.ids is not None for node in seen), "replies were miscounted"

    # ---- inside

    @staticmethod
    def _path(node: Node | None, keys: Sequence[str], messages: Sequence[Message]) -> list[Node]:
        """Return the nodes of the longest beginning that is in the tree."""
        path: list[Node] = []
        for key, message in zip(keys, messages, strict=True):
            node = None if node is None else node.children.get(key)
            if node is None or not _same_thinking(node, message):
                break
            path.append(node)
        return path

    def _insert(self, where: Hashable, keys: Sequence[str]) -> Node:
        """Return the node of the last message; create missing nodes."""
        node = self._roots.get(where)
        if node is None:
            node = self._roots[where] = Node(None, where)
            self._update_size(node)
        for key in keys:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key)
                self._update_size(child)
            node = child
        return node

    def _update_size(self, node: Node) -> None:
        size = node.size
        self._stats.bytes += size - self._recent.get(node, 0)
        self._recent[node] = size

    def _touch(self, node: Node | None) -> None:
        """Make a node the most recent, and its ancestors more recent still, so that the oldest node is a leaf."""
        while node is not None:
            self._recent.move_to_end(node)
            node = node.parent

    def _trim(self) -> None:
        while self._stats.bytes > self._stats.capacity:
            self._evict(next(iter(self._recent)))

    def _evict(self, node: Node | None) -> None:
        """Remove a leaf, and its ancestors that are then leaves without a reply."""
        while node is not None and not node.children:
            self._stats.bytes -= self._recent.pop(node)
            self._stats.replies -= node.ids is not None
            self._stats.forgotten += node.ids is not None
            parent = node.parent
            if parent is None:
                del self._roots[node.key]
                return
            del parent.children[node.key]
            if parent.ids is not None:
                return
            node = parent


# ---- messages


def _key(message: Message) -> str:
    """Return a text that is equal for equal messages only. Empty fields do not count."""
    plain = {name: value for name, value in message.items() if value or name == "content"}
    plain.pop(_THINKING, None)
    plain["content"] = plain.get("content") or ""
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _plain_call(call: Any) -> Any:
    """Return a tool call as a template renders it: an object in the order of its names, or a text.

    Messages arrive here with JSON texts converted to objects, so that white space in a text does not count.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    return [call.get("id"), function.get("name"), json.dumps(function.get("arguments"), ensure_ascii=False)]


def _thinking(message: Message) -> str | None:
    return message.get(_THINKING) or None


def _same_thinking(node: Node, message: Message) -> bool:
    """Whether the client sends the reply's thinking back unchanged, or not at all."""
    thinking = _thinking(message)
    return thinking is None or thinking == node.thinking


def _root_key(namespace: Hashable, tools: Tools, arguments: Arguments | None) -> Hashable:
    return namespace, json.dumps(tools, ensure_ascii=False) if tools else "", arguments_key(arguments or {})
