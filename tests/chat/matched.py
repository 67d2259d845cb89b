"""Draw random replies that a grammar allows, without a model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from radixkv import SamplingParams
from radixkv.grammar.compiler import GrammarCompiler

_CLOSES = set('"}]\n')


def drawn(tokenizer: Any, stop_ids: frozenset[int], params: SamplingParams, seed: int, most: int = 400) -> str | None:
    """Return the text of a random reply, control tokens included; None if it is not complete after `most` tokens.

    Control tokens, and tokens that close something, are preferred, so that most replies end soon.
    """
    compiler = _compiler(tokenizer, stop_ids)
    matcher = compiler.matcher(params)
    assert matcher is not None
    chance, tokens = random.Random(seed), list[int]()
    ends = {*stop_ids, *tokenizer.added_tokens_decoder}
    bits = np.empty((1, -(-matcher.vocab_size // 32)), np.int32)
    while not matcher.finished:
        assert not matcher.fill([matcher], bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        assert len(allowed), "no token is allowed"
        preferred = [token for token in allowed if token in ends or _CLOSES & {*tokenizer.decode([int(token)])}]
        token = int(chance.choice(preferred if preferred and chance.random() < 0.6 else allowed))
        if token in stop_ids:
            break
        tokens.append(token)
        matcher.consume([token])
        forced = matcher.forced()
        tokens += forced
        matcher.consume(forced)
        if len(tokens) > most:
            return None
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


_COMPILERS: dict[int, tuple[Any, GrammarCompiler]] = {}


def accepted(tokenizer: Any, stop_ids: frozenset[int], params: SamplingParams, text: str) -> bool:
    """Whether a grammar allows a text, and the end of the reply after it."""
    matcher = _compiler(tokenizer, stop_ids).matcher(params)
    assert matcher is not None
    bits = np.empty((1, -(-matcher.vocab_size // 32)), np.int32)
    for token in [*tokenizer.encode(text, add_special_tokens=False), min(stop_ids)]:
        if matcher.finished:
            return token in stop_ids
        assert not matcher.fill([matcher], bits)
        if not np.unpackbits(bits.view(np.uint8), bitorder="little")[token]:
            return False
        matcher.consume([token])
    return True


def _compiler(tokenizer: Any, stop_ids: frozenset[int]) -> GrammarCompiler:
    if id(tokenizer) not in _COMPILERS:
        _COMPILERS[id(tokenizer)] = tokenizer, GrammarCompiler(tokenizer, len(tokenizer), stop_ids)
    return _COMPILERS[id(tokenizer)][1]
