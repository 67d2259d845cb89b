"""Write tokens and their log probabilities in the shapes of OpenAI's endpoints, and of vLLM's for a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from radixkv.engine.request import TokenIds
from radixkv.sampling.params import TokenLogprobs
from radixkv.serve.fields import JsonObject


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Any | None) -> None:
        """Without a tokenizer, a token's text is its id."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # decoding takes microseconds, and a response may repeat a token

    def __getitem__(self, token: int) -> str:
        """Return the token's text; part of a character is U+FFFD. O(1), except the first time."""
        text = self._known.get(token)
        if text is None:
            text = f"<{token}>" if self._tokenizer is None else str(self._tokenizer.decode([token]))
            self._known[token] = text
        return text

    def chat_logprobs(self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]) -> list[JsonObject]:
        """Return the entries of `logprobs.content` in a chat completion, one per token."""
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
        # The tokenizer decodes part of a character to U+FFFD, so its bytes are not available.
        parts = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": parts}

    def completion_logprobs(
        self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None], offsets: Sequence[int], top: int
    ) -> JsonObject:
        """Return the `logprobs` of a text completion, whose tokens are at these `offsets` of its text.

        The alternatives are the `top` most likely tokens and the token itself. The first token of a prompt has no log
        probability.
        """
        texts = [self[token] for token in ids]
        pairs = list(zip(texts, logprobs, strict=True))
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else finite(each.chosen) for _, each in pairs],
            "top_logprobs": [None if each is None else self._top(text, each, top) for text, each in pairs],
            "text_offset": list(offsets),
        }

    def _top(self, chosen: str, logprobs: TokenLogprobs, top: int) -> Mapping[str, float]:
        """Return log probabilities by text; of several tokens with one text, the most likely one counts."""
        found: dict[str, float] = {}
        for token, value in logprobs.top[:top]:
            found.setdefault(self[token], finite(value))  # the most likely token is the first
        found.setdefault(chosen, finite(logprobs.chosen))
        return found

    def prompt_logprobs(
        self, ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None], top: int
    ) -> list[JsonObject | None]:
        """Return the `prompt_logprobs` of a response, in vLLM's shape: an object of token ids for each token.

        It has the token itself and the `top` most likely ones, and is null for the first token.
        """
        entries: list[JsonObject | None] = []
        for token, each in zip(map(int, ids), logprobs, strict=True):
            if each is None:
                entries.append(None)
                continue
            found = {token: (each.chosen, each.rank)}
            found |= {other: (value, rank) for rank, (other, value) in enumerate(each.top[:top], 1) if other != token}
            entries.append(
                {
                    str(other): {"logprob": finite(value), "rank": rank, "decoded_token": self[other]}
                    for other, (value, rank) in found.items()
                }
            )
        return entries

    def reply_offsets(self, ids: Sequence[int], start: int) -> list[int]:
        """Return the place of each token of a reply that begins at `start` of a text."""
        return list(accumulate(map(len, map(self.__getitem__, ids)), initial=start))[: len(ids)]

    def prompt_offsets(self, prompt: str | None, ids: TokenIds, length: int) -> list[int]:
        """Return the place of each token in the echo of a prompt, which has `length` characters.

        `prompt` is its text, which is encoded again; None for a prompt of token ids, whose tokens' texts are counted.
        A token that stands for no character, such as one that begins every prompt, is where the next one is. Not
        thread-safe, as the tokenizer is not.
        """
        if prompt is not None and getattr(self._tokenizer, "is_fast", False):
            assert self._tokenizer is not None
            encoded = self._tokenizer(prompt, return_offsets_mapping=True)
            if encoded["input_ids"] == ids.tolist():
                return _starts(encoded["offset_mapping"])
        return [min(place, length) for place in self.reply_offsets(ids.tolist(), 0)]


def _starts(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return where each token begins. The span of a token may lack white space before it.

    >>> _starts([(0, 0), (0, 5), (6, 11), (11, 12), (11, 12), (0, 0)])
    [0, 0, 5, 11, 11, 12]
    """
    starts, reached = [], 0
    for start, end in spans:
        starts.append(reached if start == end else min(start, reached))
        reached = max(reached, end)
    return starts


def finite(logprob: float) -> float:
    """Return at least -9999, which OpenAI writes for an impossible token, since JSON has no infinity."""
    return max(logprob, -9999.0)
