"""What a reply is taken for: thinking, what is said, tool calls.

Knows: one session's template, and how its model writes calls. Knows no turn, no history and no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count

from radixkv.chat.messages import Reply, ToolCall, split_thinking
from radixkv.chat.template import ChatTemplate
from radixkv.chat.tool_calls import split_calls
from radixkv.chat.tool_calls_format import format_of, tool_names
from radixkv.engine import Completion
from radixkv.sampling.params import SamplingParams


class Reading:
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
