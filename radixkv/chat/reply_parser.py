"""Parse the replies of a model into text, thinking and tool calls, whole or while they are streamed.

Text that begins like a call but is not one is returned unchanged as text. The result does not depend on the size of the
pieces: a reader returns a piece only when no later text can change its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from radixkv.chat.messages import Reply, ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import partial_tag, split_thinking
from radixkv.chat.tool_call_formats import (
    CallFormat,
    JsonEnd,
    NotACall,
    end_of,
    entries,
    name_and_arguments,
    parsed,
    tool_names,
)
from radixkv.engine import Completion
from radixkv.sampling.params import SamplingParams

Asked: TypeAlias = tuple[str, dict[str, Any], object]
"""Name, arguments, and the id that the model wrote, if any."""

_LONGEST_HEAD = 300  # characters between the tag and the arguments
_HEAD = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?\s*")
_SPACE = re.compile(r"\s*")
_HEAD_SO_FAR = re.compile(r"[^\s{}]+\s*")


class Block:
    """A call, or a list of calls, in a text that grows; `tagged` says whether the tag of the format precedes it."""

    def __init__(self, form: CallFormat, at: int, *, tagged: bool) -> None:
        """Begin after the tag, or at the JSON if there is no tag."""
        self._form, self._at = form, at
        self.tagged = tagged
        self._name: str | None = None
        self._own: str | None = None
        self._json: JsonEnd | None = None
        self._json_end: int | None = None
        self._closing = 0

    def read(self, text: str, *, final: bool) -> int | None:
        """Return the index after the block, None while its end is missing; raises NotACall. O(new text).

        `text` extends the text of the previous call. With `final` no more text follows, and the closing tag may be
        missing.
        """
        if self._json_end is None:
            self._json_end = self._find_json(text)
        end = None if self._json_end is None else self._close(text, self._json_end, final)
        if end is None and final:
            raise NotACall
        return end

    def asked(self, text: str) -> list[Asked]:
        """Return the calls of a complete block; raises NotACall."""
        value = parsed(text[self._at : self._json_end])
        if self._name is None:
            return [(*name_and_arguments(entry, strict=not self.tagged), entry.get("id")) for entry in entries(value)]
        assert isinstance(value, dict), "it began with a brace"
        return [(self._name, value, self._own)]

    # ---- inside

    def _find_json(self, text: str) -> int | None:
        if self._json is None:
            at = self._after_head(text)
            if at is None:
                return None
            self._at, self._json = at, JsonEnd(at)
        return self._json.find(text)

    def _after_head(self, text: str) -> int | None:
        """Return the start of the JSON, None while it is missing; a name may precede it."""
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


Part: TypeAlias = str | ToolCall

_OWN_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BEFORE = re.compile(r"\s{0,99}")  # bounded, because it is matched again with each piece
_BETWEEN = re.compile(r"\s{0,99};?\s{0,99}")  # separators of calls without tags


class CallReader:
    """Reads the text of one reply piece by piece, and returns text and calls in their order.

    White space next to a call at the beginning or end of the reply is dropped. The id of a call is made from `seed` and
    its number, unless the model wrote an id that the format allows.
    """

    def __init__(self, form: CallFormat, names: Collection[str], seed: str) -> None:
        """Read calls in `form`; `names` are the names of the tools."""
        self._form, self._names, self._seed = form, names, seed
        self._held, self._from = "", 0  # the text before `_from` was returned
        self._block: Block | None = None
        self._bare = form.bare  # a call may begin here without a tag
        self._fresh = self._said = False
        self._spaces = ""  # returned only if words follow
        self._ids: set[str] = set()
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Part]:
        """Read more text; return the parts that are certain now. O(text), plus the text of a call at its end."""
        if self._block is None:  # a block holds indices into the held text
            self._held, self._from = self._held[self._from :], 0
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Part]:
        """End the reply; return the parts that were held back."""
        parts = list(self._read(final=True))
        return parts if self.calls or not self._spaces else [*parts, self._spaces]

    # ---- inside

    def _read(self, *, final: bool) -> Iterator[Part]:
        while self._block is not None or (yield from self._find(final)):
            assert self._block is not None
            try:
                end = self._block.read(self._held, final=final)
                if end is None:
                    return
                calls = self._made(self._block)
            except NotACall:
                yield from self._refuse(self._block)
            else:
                yield from calls
                self._go_on(end, calls)

    def _find(self, final: bool) -> Generator[Part, None, bool]:
        """Yield the text before the next possible start of a call; return whether there is one."""
        if self._bare:
            at = self._after_space()
            if at == len(self._held) and not final:
                return False
            if self._held.startswith("{", at):
                self._block = Block(self._form, at, tagged=False)
                return True
        self._bare = False
        tag = self._form.start
        at = self._held.find(tag, self._from)
        if at < 0:
            yield from self._say(len(self._held) - (0 if final else partial_tag(self._held, (tag,), self._from)))
            return False
        yield from self._say(at)
        self._block = Block(self._form, at + len(tag), tagged=True)
        return True

    def _after_space(self) -> int:
        """Return the index at which a call without a tag would begin."""
        match = (_BETWEEN if self.calls else _BEFORE).match(self._held, self._from)
        return self._from if match is None else match.end()

    def _say(self, end: int) -> Iterator[str]:
        """Yield the held text up to `end`; white space at its end is held until words follow."""
        text, self._from = self._held[self._from : end], max(self._from, end)
        words = text.rstrip()
        if words:
            yield self._spaces + (words.lstrip() if self._fresh else words)
            self._fresh, self._said = False, True
            self._spaces = text[len(words) :]
        elif not self._fresh:
            self._spaces += text

    def _refuse(self, block: Block) -> Iterator[str]:
        """Treat the tag of `block` as text; a call may begin after it."""
        self._block, self._bare = None, False
        yield from self._say(self._from + len(self._form.start) if block.tagged else self._from)

    def _go_on(self, end: int, calls: list[ToolCall]) -> None:
        self.calls += calls
        self._from, self._block = end, None
        self._bare = self._form.bare
        if not self._said:
            self._fresh, self._spaces = True, ""

    def _made(self, block: Block) -> list[ToolCall]:
        asked = block.asked(self._held)
        if not block.tagged and any(name not in self._names for name, _, _ in asked):
            raise NotACall  # an answer that is JSON
        return [
            ToolCall(self._id(own, number), name, arguments)
            for number, (name, arguments, own) in enumerate(asked, len(self.calls))
        ]

    def _id(self, own: object, number: int) -> str:
        made = self._form.call_id(self._seed, number)
        if self._form.short_ids and isinstance(own, str) and _OWN_ID.fullmatch(own) and own not in self._ids:
            made = own
        self._ids.add(made)
        return made


def split_calls(text: str, form: CallFormat, names: Collection[str], seed: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text outside calls, and the calls, of a complete reply. O(characters).

    >>> from radixkv.chat.tool_call_formats import HERMES
    >>> split_calls('Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>', HERMES, {"now"}, "0")
    ('Let me see.', (ToolCall(id='call_0_0', name='now', arguments={}),))
    """
    reader = CallReader(form, names, seed)
    parts = reader.push(text) + reader.finish()
    return "".join(part for part in parts if isinstance(part, str)), tuple(reader.calls)


class ReplyParser:
    """Parses the complete replies of one session."""

    def __init__(self, template: ChatTemplate) -> None:
        """Parse tool calls only if the session has tools and the call format of the model is known."""
        self._template = template
        self._form = template.call_format if template.tools else None
        self._names = tool_names(template.tools)

    def reply(
        self, completion: Completion, prompt: Sequence[int], params: SamplingParams, turn: int, used: Collection[str]
    ) -> Reply:
        """Parse the reply of turn `turn` to `prompt`; its calls get ids that are not in `used`. O(tokens)."""
        whole = self._said_text(completion, params)
        opened = self._template.opens_thinking(prompt)
        thinking, said = split_thinking(whole, opened=opened, tags=self._template.form.thinking_tags)
        text, calls = self._split_calls(said, turn, used)
        tags = self._form.tags if self._form else ()
        if said == whole and not calls and not any(tag in said for tag in tags):
            text = completion.text  # without control tokens and stop strings
        return Reply(
            text,
            calls,
            completion.usage,
            completion.finish_reason,
            completion.token_ids,
            thinking=thinking,
            logprobs=completion.logprobs,
        )

    def _split_calls(self, said: str, turn: int, used: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside tool calls, and the calls."""
        if self._form is None:
            return said, ()
        seed = next(seed for seed in map(str, count(turn)) if self._form.call_id(seed, 0) not in used)
        return split_calls(said, self._form, self._names, seed)

    def _said_text(self, completion: Completion, params: SamplingParams) -> str:
        """Return the text with control tokens, up to the stop string if one ended it."""
        ids = completion.token_ids
        text = self._template.said_text(ids)
        if completion.finish_reason != "stop" or ids[-1] in self._template.stop_ids | {*params.stop_token_ids}:
            return text
        # A stop string counts only after `min_tokens` tokens.
        start = len(self._template.said_text(ids[: max(params.min_tokens - 1, 0)]))
        found = [at for stop in params.stop if (at := text.find(stop, start)) >= 0]
        return text[: min(found, default=len(text))]
