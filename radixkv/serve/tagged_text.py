"""The text of one stream, and in it the tags that are control tokens, which texts leave out.

Knows: chunks, and what such tokens say. Knows no call, no thinking and no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from radixkv.engine import Chunk


class TaggedText:
    """Each tag stands where it was sampled, though text before it may come later: the engine holds back what may
    begin a stop string. A tag behind the first letter of a stop string is as little shown as the rest.
    """

    def __init__(self, tags: Mapping[int, str]) -> None:
        """Begin a stream; `tags` are texts by the ids that are left out."""
        self._tags = tags
        self._released = 0
        self._waiting: deque[tuple[int, str]] = deque()  # where a tag stands in the text, and what it is

    def push(self, chunk: Chunk) -> str:
        """The text that a chunk releases, with its tags. O(its characters)."""
        start, end = self._released, self._released + len(chunk.text)
        self._waiting += [(end + chunk.held, tag) for token in chunk.token_ids if (tag := self._tags.get(token))]
        parts, at = [], start
        while self._waiting and self._waiting[0][0] <= end:
            place, tag = self._waiting.popleft()
            parts += [chunk.text[at - start : place - start], tag]
            at = place
        self._released = end
        return "".join([*parts, chunk.text[at - start :]])
