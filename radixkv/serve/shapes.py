"""What the engine returns, in the shapes of OpenAI's responses.

Knows: usage and log probabilities. Knows no request and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from radixkv.engine import Completion
from radixkv.models.sampler import TokenLogprobs
from radixkv.serve.fields import JsonObject


def streams(completions: Iterable[Completion]) -> list[Completion]:
    """All replies of some requests, those of each prompt together."""
    return [each for completion in completions for each in (completion, *completion.alternatives)]


def usage(completions: Sequence[Completion]) -> JsonObject:
    """The tokens of some requests; a prompt counts once, however many replies it has, and so do its cached tokens."""
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    cached = sum(completion.usage.cached_tokens for completion in completions)
    output = sum(completion.usage.output_tokens for completion in streams(completions))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class TokenTexts:
    """What single tokens say."""

    def __init__(self, tokenizer: Any | None) -> None:
        """Of a model that may have no tokenizer; then a token's text is its id."""
        self._tokenizer = tokenizer

    def __getitem__(self, token: int) -> str:
        """The token's text; part of a character is U+FFFD."""
        return f"<{token}>" if self._tokenizer is None else str(self._tokenizer.decode([token]))

    def chat(self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]) -> list[JsonObject]:
        """Entries of `logprobs.content` in a chat completion, one a token."""
        return [
            {
                **self._entry(token, each.chosen),
                "top_logprobs": [self._entry(other, value) for other, value in each.top],
            }
            for token, each in zip(ids, logprobs, strict=True)
            if each is not None
        ]

    def _entry(self, token: int, logprob: float) -> JsonObject:
        text = self[token]
        # Bytes of a part of a character are not known: the tokenizer says U+FFFD for them.
        parts = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": parts}

    def plain(self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None], offset: int) -> JsonObject:
        """`logprobs` of a text completion whose first token stands at `offset` in its text."""
        pairs = [(self[token], each) for token, each in zip(ids, logprobs, strict=True) if each is not None]
        offsets = []
        for text, _ in pairs:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [text for text, _ in pairs],
            "token_logprobs": [finite(each.chosen) for _, each in pairs],
            "top_logprobs": [{self[token]: finite(value) for token, value in each.top} for _, each in pairs],
            "text_offset": offsets,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)
