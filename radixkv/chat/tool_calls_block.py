"""One place in a reply where a tool call, or a list of them, seems to stand: where it ends, and what it asks for.

Knows: a format's head, JSON and end. Knows no id and no text around it.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from radixkv.chat.tool_calls_format import CallFormat
from radixkv.chat.tool_calls_json import JsonEnd, NotACall, end_of, entries, name_and_arguments, parsed

Asked: TypeAlias = tuple[str, dict[str, Any], object]
"""Name, arguments, and the id that the model gave it, if any."""

_LONGEST_HEAD = 300  # characters between the tag and the arguments
_HEAD = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?\s*")
_SPACE = re.compile(r"\s*")
_HEAD_SO_FAR = re.compile(r"[^\s{}]+\s*")


class Block:
    """Reads a text that grows; `tagged` says whether the format's tag stands before it."""

    def __init__(self, form: CallFormat, at: int, *, tagged: bool) -> None:
        """Begin behind the tag, or at the JSON if there is none."""
        self._form, self._at = form, at
        self.tagged = tagged
        self._name: str | None = None
        self._own: str | None = None
        self._json: JsonEnd | None = None
        self._json_end: int | None = None
        self._closing = 0

    def read(self, text: str, *, final: bool) -> int | None:
        """Index behind the block, None while its end is not there; raises NotACall. O(what is new).

        `text` is the one of the call before, and more. With `final` nothing follows, and what closes a call may lack.
        """
        if self._json_end is None:
            self._json_end = self._find_json(text)
        end = None if self._json_end is None else self._close(text, self._json_end, final)
        if end is None and final:
            raise NotACall
        return end

    def asked(self, text: str) -> list[Asked]:
        """What a block that was read to its end asks for; raises NotACall."""
        value = parsed(text[self._at : self._json_end])
        if self._name is None:
            return [(*name_and_arguments(entry, strict=not self.tagged), entry.get("id")) for entry in entries(value)]
        assert isinstance(value, dict), "it began with a brace"
        return [(self._name, value, self._own)]

    # ---- inside

    def _find_json(self, text: str) -> int | None:
        if self._json is None:
            at = self._behind_head(text)
            if at is None:
                return None
            self._at, self._json = at, JsonEnd(at)
        return self._json.find(text)

    def _behind_head(self, text: str) -> int | None:
        """Where the JSON begins; a name may stand before it."""
        self._at = end_of(_SPACE, text, self._at)
        if self._at == len(text):
            return None
        if text[self._at] in "{[":
            return self._at
        brace = text.find("{", self._at)
        head = text[self._at : brace if brace >= 0 else len(text)]
        if not self._form.named or len(head) > _LONGEST_HEAD or not _HEAD_SO_FAR.fullmatch(head):
            raise NotACall
        if brace < 0:
            return None
        match = _HEAD.fullmatch(head)
        if match is None:
            raise NotACall
        self._name, self._own = match.groups()
        return brace

    def _close(self, text: str, at: int, final: bool) -> int | None:
        end = self._form.end if self.tagged else ""
        if not end:
            return at
        self._closing = end_of(_SPACE, text, max(at, self._closing))
        rest = text[self._closing : self._closing + len(end)]
        if rest == end:
            return self._closing + len(end)
        if not end.startswith(rest):
            raise NotACall
        return len(text) if final else None
