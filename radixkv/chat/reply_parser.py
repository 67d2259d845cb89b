"""Parse the complete replies of a session into text, thinking and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count

from radixkv.chat.calls.reader import split_calls
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.messages import Reply, ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import split_thinking
from radixkv.engine import Completion
from radixkv.sampling.params import SamplingParams


class ReplyParser:
    """Parses the complete replies of one session."""

    def __init__(self, template: ChatTemplate) -> None:
        """Parse tool calls only if the session has tools and the call format of the model is known."""
        self._template = template
        self._form = template.call_format if template.tools else None
        self._tools = tools_by_name(template.tools)

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
        return split_calls(said, self._form, self._tools, seed)

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
