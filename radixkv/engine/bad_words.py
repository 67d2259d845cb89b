"""Spell bad words in tokens, for the mask of `radixkv.sampling.logits_processors`.

A tokenizer writes a word in other tokens at the start of a text than after a space or a line break. Each of these
spellings is excluded. Others remain possible, for example single letters that make up the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from radixkv.errors import InvalidInput

Spelling: TypeAlias = tuple[int, ...]


def spellings_of(tokenizer: Any | None, vocab_size: int, words: Sequence[str]) -> tuple[Spelling, ...]:
    """Return the token ids of each spelling of each word, the shortest first; () for no words.

    A spelling that ends with another one is left out, because its last token is excluded already. Raises InvalidInput
    for a word that has no tokens, and for a model without a tokenizer. Encodes three short texts per word.
    """
    if words and tokenizer is None:
        raise InvalidInput("bad_words need a tokenizer, and this model has none: use logit_bias with token ids")
    line_break = _encoded(tokenizer, "\n") if words else ()
    found = {spelling for word in words for spelling in _spellings(tokenizer, vocab_size, word, line_break)}
    kept: dict[Spelling, None] = {}
    for spelling in sorted(found, key=lambda each: (len(each), each)):
        if not any(spelling[start:] in kept for start in range(1, len(spelling))):
            kept[spelling] = None
    return tuple(kept)


def _spellings(tokenizer: Any, vocab_size: int, word: str, line_break: Spelling) -> set[Spelling]:
    """Return the spellings of one word that the model can sample; at least one."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"bad_words: {word!r:.100} is no valid Unicode: {error}") from error
    found = {_encoded(tokenizer, word), _encoded(tokenizer, " " + word)}
    # A tokenizer that marks the start of a text or of a word sets no mark after a line break.
    broken = _encoded(tokenizer, "\n" + word)
    if broken[: len(line_break)] == line_break:
        found.add(broken[len(line_break) :])
    found = {spelling for spelling in found if spelling and max(spelling) < vocab_size}
    if not found:
        raise InvalidInput(f"bad_words: this model's tokenizer has no tokens for {word!r:.100}")
    return found


def _encoded(tokenizer: Any, text: str) -> Spelling:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
