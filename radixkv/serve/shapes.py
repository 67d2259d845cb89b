"""What the engine returns, in the shapes of OpenAI's responses.

Knows: usage and log probabilities. Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from radixkv.engine import Completion
from radixkv.sampling.params import TokenLogprobs
from radixkv.serve.fields import JsonObject

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


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
        self._known: dict[int, str] = {}  # decoding takes microseconds, and an answer may name a token in every place

    def __getitem__(self, token: int) -> str:
        """The token's text; part of a character is U+FFFD. O(1), but for the first time."""
        text = self._known.get(token)
        if text is None:
            text = f"<{token}>" if self._tokenizer is None else str(self._tokenizer.decode([token]))
            self._known[token] = text
        return text

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


async def answer(head: JsonObject, choices: Callable[[], Iterable[JsonObject]], spent: JsonObject) -> bytes:
    """The JSON of a whole response.

    With log probabilities it takes a while, so it is made beside the event loop, and a choice at a time: encoding one
    keeps all other threads waiting.
    """

    def encoded() -> bytes:
        parts = [_encode(choice) for choice in choices()]
        front = _encode({**head, "usage": spent}).removesuffix("}")
        return f'{front},"choices":[{",".join(parts)}]}}'.encode()

    return await asyncio.to_thread(encoded)


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)
