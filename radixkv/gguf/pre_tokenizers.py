"""The table of pre-tokenizers: how byte-level BPE splits a text before it merges bytes, by `tokenizer.ggml.pre`.

A GGUF file names the split of its tokenizer and does not contain it, so a wrong row would give wrong ids silently. The
rows follow the `tokenizer.json` of the models that the names stand for. llama.cpp has a table of the same names; it
leaves out Unicode normalization. A name without a row is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """The steps that come before the merges.

    splits          regular expressions, applied in turn: each match and each text between matches becomes a piece
    nfc             composes characters first (Unicode normalization form C)
    ignore_merges   a piece that is a token stays whole, even if no sequence of merges leads to it
    add_bos         a text begins with the beginning-of-text token unless the file says otherwise
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_DIGIT = r"\p{N}"
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_CONTRACTIONS})"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALIZED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_LINES}|{_SPACES}"
QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_LINES}|{_SPACES}"
_QWEN35 = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
)
_TEKKEN = rf"{_CAPITALIZED}|{_CAPITALS}|\p{{N}}|{_SIGNS}[\r\n/]*|{_LINES}|{_SPACES}"
_GPT4O = rf"{_CAPITALIZED}{_ANY_CASE}?|{_CAPITALS}{_ANY_CASE}?|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_LINES}|{_SPACES}"
_SEED_CODER = rf"{_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}"
)

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # Han, Hiragana and Katakana
_CJK_CODER = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_gpt2 = PreTokenizer((_GPT2,))
_single_digits = PreTokenizer((_DIGIT, _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizer((QWEN2,), nfc=True)
_gpt4o = PreTokenizer((_GPT4O,), ignore_merges=True)

PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "olmo": replace(_gpt2, nfc=True),  # this and mpt stand for the tokenizer of GPT-NeoX
    "mpt": replace(_gpt2, nfc=True),
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "lfm2": _llama3,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _gpt4o,
    "llama4": _gpt4o,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_CODER, _DIGIT)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
}
