"""Prompts whose reply fills in the middle (FIM) between a prefix and a suffix; their text never has control tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from radixkv.engine.chat_prompts import ControlTokens
from radixkv.engine.request import TokenIds
from radixkv.errors import InvalidInput
from radixkv.sampling.params import SamplingParams

_TEXTS = {
    "pre": "<|fim_prefix|> <fim_prefix> <fim-prefix> <\uff5cfim\u2581begin\uff5c> \u2581<PRE> <|code_prefix|> [PREFIX]",
    "suf": "<|fim_suffix|> <fim_suffix> <fim-suffix> <\uff5cfim\u2581hole\uff5c> \u2581<SUF> <|code_suffix|> [SUFFIX]",
    "mid": "<|fim_middle|> <fim_middle> <fim-middle> <\uff5cfim\u2581end\uff5c> \u2581<MID> <|code_middle|>",
    "rep": "<|fim_repo|> <|repo_name|> <repo_name> <fim-repo> <reponame>",
    "sep": "<|file_sep|> <file_sep> <|file_separator|>",
    "pad": "<|fim_pad|> <fim_pad> <fim-pad>",
    "end": "\u2581<EOT>",
}  # Codestral has no middle token: it was trained on suffix, prefix, reply


class FillInMiddle:
    """The FIM tokens of one tokenizer; `available` says whether it has them."""

    def __init__(self, tokenizer: Any, order: str) -> None:
        """`order` is "psm" (prefix, suffix, middle) or "spm". Without a middle token, the suffix is always first."""
        added = {each.content: id_ for id_, each in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        known = {role: [added[text] for text in texts.split() if text in added] for role, texts in _TEXTS.items()}
        of_file = getattr(tokenizer, "fim_token_ids", {})
        self._tokens: dict[str, int] = {role: ids[0] for role, ids in known.items() if ids} | of_file
        self.available = {"pre", "suf"} <= self._tokens.keys() and ("mid" in self._tokens or "[PREFIX]" in added)
        self._suffix_first = order == "spm" or "mid" not in self._tokens
        texts = [text for text, id_ in added.items() if id_ in self._tokens.values()]
        self._tokenizer, self._controls = tokenizer, ControlTokens(tokenizer, texts)

    def ids(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> TokenIds:
        """Return the prompt, int32[n], whose reply belongs between two texts. O(characters).

        `files` are names and texts of other files, which come first. Raises InvalidInput without FIM tokens.
        """
        if not self.available:
            raise InvalidInput("this model cannot fill in the middle: its vocabulary has no tokens for that")
        whole, plain = self._tokenizer.encode("a"), self._tokenizer.encode("a", add_special_tokens=False)
        begin = [*whole[: whole.index(plain[0])], *self._files(files)]
        before, after = self._marked("pre", prefix), self._marked("suf", suffix)
        both = [*after, *before] if self._suffix_first else [*before, *after]
        return np.array([*begin, *both, *self._marked("mid")], np.int32)

    def with_stops(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that also end a reply at each FIM token, as llama.cpp does, unless they ignore ends."""
        ends = () if params.ignore_eos else self._tokens.values()
        return params.but(stop_token_ids=(*params.stop_token_ids, *ends))

    def _files(self, files: Sequence[tuple[str, str]]) -> Iterator[int]:
        """Yield files in llama.cpp's form: Qwen's for a repository, or snippets without a token between them."""
        if "sep" not in self._tokens:
            yield from self._text("".join(f"\n\n--- snippet ---\n\n{text}" for _, text in files))
        elif files:
            yield from self._marked("rep", "myproject\n")
            for name, text in (*files, ("filename", "")):
                yield from self._marked("sep", f"{name}\n{text}")

    def _marked(self, role: str, text: str = "") -> list[int]:
        """Return a text after the token of its role; nothing if the vocabulary has no such token."""
        return [self._tokens[role], *self._text(text)] if role in self._tokens else []

    def _text(self, text: str) -> list[int]:
        return self._controls.encode(self._controls.quoted(text))
