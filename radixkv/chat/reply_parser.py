"""One place in a reply where a tool call, or a list of them, seems to stand: where it ends, and what it asks for.

Knows: a format's head, JSON and end. Knows no id and no text around it.

A reply's words, taken apart while they come: what is said, and which tools are called.

Knows: calls as one format writes them. Knows no token, no thinking and no session.

What is no call after all is text, to the letter. Whether it is one does not depend on how the text comes in pieces:
nothing is handed out before all that may follow would leave it as it is.

What a reply is taken for: thinking, what is said, tool calls.

Knows: one session's template, and how its model writes calls. Knows no turn, no history and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from radixkv.chat.messages import Reply, ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import split_thinking
from radixkv.chat.tool_call_formats import (
    CallFormat,
    JsonEnd,
    NotACall,
    end_of,
    entries,
    format_of,
    name_and_arguments,
    parsed,
    tool_names,
)
from radixkv.engine import Completion
from radixkv.sampling.params import SamplingParams

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


Part: TypeAlias = str | ToolCall

_OWN_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BEFORE = re.compile(r"\s{0,99}")  # white space without end would be looked at again and again
_BETWEEN = re.compile(r"\s{0,99};?\s{0,99}")  # what separates calls that have no tag


class CallReader:
    """Takes the text of one reply bit by bit, and hands out text and calls in their order.

    White space before the first words and behind the last is dropped where a call stands there. A call has its id
    from the reply's `seed` and its number, unless the model wrote one that the format allows.
    """

    def __init__(self, form: CallFormat, names: Collection[str], seed: str) -> None:
        """Read `form`; `names` are the tools that there are."""
        self._form, self._names, self._seed = form, names, seed
        self._held, self._from = "", 0  # what stands before `from` is handed out
        self._block: Block | None = None
        self._bare = form.bare  # a call may begin here without a tag
        self._fresh = self._said = False
        self._spaces = ""  # said only if words follow
        self._ids: set[str] = set()
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> list[Part]:
        """Take more text; returns what is certain now. O(text), and a call's text once more at its end."""
        if self._block is None:  # which counts from the beginning of what is held
            self._held, self._from = self._held[self._from :], 0
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Part]:
        """The reply is complete: what was held is what it looks like."""
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
        """Hand out what stands before the next place where a call may begin; whether there is one."""
        if self._bare:
            at = self._behind_space()
            if at == len(self._held) and not final:
                return False
            if self._held.startswith("{", at):
                self._block = Block(self._form, at, tagged=False)
                return True
        self._bare = False
        tag = self._form.start
        at = self._held.find(tag, self._from)
        if at < 0:
            yield from self._say(len(self._held) - (0 if final else _undecided(self._held, self._from, tag)))
            return False
        yield from self._say(at)
        self._block = Block(self._form, at + len(tag), tagged=True)
        return True

    def _behind_space(self) -> int:
        """Where a call without a tag would begin."""
        match = (_BETWEEN if self.calls else _BEFORE).match(self._held, self._from)
        return self._from if match is None else match.end()

    def _say(self, end: int) -> Iterator[str]:
        """Hand out what is held up to `end`; white space waits for words."""
        text, self._from = self._held[self._from : end], max(self._from, end)
        words = text.rstrip()
        if words:
            yield self._spaces + (words.lstrip() if self._fresh else words)
            self._fresh, self._said = False, True
            self._spaces = text[len(words) :]
        elif not self._fresh:
            self._spaces += text

    def _refuse(self, block: Block) -> Iterator[str]:
        """No call: its tag is text, and behind that one may begin."""
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
            raise NotACall  # an answer in JSON
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
    """The text outside calls, and the calls, of a reply that is complete. O(characters).

    >>> from radixkv.chat.tool_call_formats import HERMES
    >>> split_calls('Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>', HERMES, {"now"}, "0")
    ('Let me see.', (ToolCall(id='call_0_0', name='now', arguments={}),))
    """
    reader = CallReader(form, names, seed)
    parts = reader.push(text) + reader.finish()
    return "".join(part for part in parts if isinstance(part, str)), tuple(reader.calls)


def _undecided(text: str, start: int, tag: str) -> int:
    """Characters at the end, not before `start`, that may belong to `tag`.

    >>> _undecided("So be it. <tool", 0, "<tool_call>")
    5
    """
    longest = min(len(text) - start, len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


class ReplyParser:
    """How the replies of one session are read."""

    def __init__(self, template: ChatTemplate) -> None:
        """Calls are looked for only if the session has tools, and if it is known how its model writes them."""
        self._template = template
        self._form = format_of(template.rendering.tokenizer) if template.tools else None
        self._names = tool_names(template.tools)

    def reply(
        self, completion: Completion, prompt: Sequence[int], params: SamplingParams, turn: int, used: Collection[str]
    ) -> Reply:
        """The reply of turn `turn` to `prompt`; its calls have none of the `used` ids. O(tokens)."""
        whole = self._said(completion, params)
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
        """The text outside tool calls, and the calls."""
        if self._form is None:
            return said, ()
        seed = next(seed for seed in map(str, count(turn)) if self._form.call_id(seed, 0) not in used)
        return split_calls(said, self._form, self._names, seed)

    def _said(self, completion: Completion, params: SamplingParams) -> str:
        """The text with control tokens, up to the stop string if one ended it."""
        ids = completion.token_ids
        text = self._template.said_text(ids)
        if completion.finish_reason != "stop" or ids[-1] in self._template.stop_ids | {*params.stop_token_ids}:
            return text
        # Up to the last token but one of the minimum, a stop string is text as any other.
        start = len(self._template.said_text(ids[: max(params.min_tokens - 1, 0)]))
        found = [at for stop in params.stop if (at := text.find(stop, start)) >= 0]
        return text[: min(found, default=len(text))]
