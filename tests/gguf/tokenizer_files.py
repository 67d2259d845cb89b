"""Small tokenizers as models publish them, and their metadata as llama.cpp's converter writes it into a GGUF file.

The published tokenizers are built here from the parts that their `tokenizer.json` names, with vocabularies trained on a
few texts, so that the ids of a text can be compared with those of the tokenizer that radixkv builds from the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from radixkv.gguf.header import GGUFHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>")
SIGN = "\u2581"

WORDS = """The year 2024 had 366 days, and 1,234,567.89 is a number; so are 10, 100, 1000 and 10000 here.
I'm sure they've told you that it's 3 o'clock, we'll see: SHE'S here and HE'LL go. HTTPServer fooBar __init__ == 12345
    def main(argc: int) -> None:\n        return x[1:2] != y  # a comment...\n\n\n\treturn 007\r\n
Ein Straßenfest für Übermütige, déjà vu, naïve cafés; Привет мир, 12 месяцев. これはペンです。日本語と中文 123
"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
SEED_CODER = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}{1}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")


def _split(*expressions: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [*_split(LLAMA3), BYTES],
    "qwen2": [*_split(QWEN2), BYTES],
    "qwen35": [*_split(QWEN35), BYTES],
    "tekken": [*_split(TEKKEN), BYTES],
    "gpt-4o": [*_split(GPT4O), BYTES],
    "deepseek-v3": [*_split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3), BYTES],
    "deepseek-coder": [
        *_split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        pre_tokenizers.Digits(individual_digits=True),
        BYTES,
    ],
    "seed-coder": [*_split(SEED_CODER), BYTES],
}
"""The pre-tokenizer of the `tokenizer.json` of one model for each distinct row of the table."""

COMPOSED = ("qwen2", "qwen35")
"""The models that normalise text to NFC."""


def published_bytes(name: str) -> Tokenizer:
    """A byte-level tokenizer with the split of a model; it ends with control tokens and two added ones."""
    made = Tokenizer(BPE(ignore_merges=name in ("llama-bpe", "tekken", "gpt-4o")))
    if name in COMPOSED:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[name])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    _add(made)
    return made


def published_pieces(prefix: str = "always", controls: tuple[str, ...] = ()) -> Tokenizer:
    """A sentencepiece tokenizer with byte tokens; `prefix` says where a text begins with a sign for a space.

    "always": at the start and after added tokens, as Llama 2; "first": at the start, as Mistral's instruct models;
    "never": as Gemma, whose runs of spaces are user-defined tokens.
    """
    signs = normalizers.Replace(" ", SIGN)
    scratch = Tokenizer(BPE())
    scratch.normalizer = signs
    scratch.pre_tokenizer = pre_tokenizers.Split(SIGN, "merged_with_next")
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    runs = [SIGN * length for length in range(2, 9)] if prefix == "never" else []
    scratch.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(scratch.to_str())["model"]
    learned = [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in runs]
    vocab = {token: at for at, token in enumerate([*fixed, *runs, *learned])}
    scores = {token: 0.0 if token in runs else -float(at) for token, at in vocab.items()}
    merges = [
        (scores[token], len(token[:cut]), (token[:cut], token[cut:]))
        for token in [*runs, *learned]
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda each: each[:2], reverse=True)
    pairs = [pair for _, _, pair in merges]
    made = Tokenizer(BPE(vocab=vocab, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(SIGN, "first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SIGN), signs]) if prefix == "always" else signs
    steps = [decoders.Replace(SIGN, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps if prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in fixed[:3]])
    made.add_tokens([AddedToken(text, normalized=False) for text in runs])
    _add(made, controls)
    return made


def _add(made: Tokenizer, controls: tuple[str, ...] = ()) -> None:
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (*CONTROLS, *controls)])
    made.add_tokens([AddedToken(text, normalized=False) for text in ADDED])


def metadata_of(made: Tokenizer, **keys: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a tokenizer; `keys` are those of `tokenizer.ggml`."""
    saved = json.loads(made.to_str())
    added = {each["id"]: each for each in saved["added_tokens"]}
    tokens, types, scores = [], [], []
    for id_ in range(made.get_vocab_size()):
        text = made.id_to_token(id_)
        kind = BYTE if text.startswith("<0x") else NORMAL
        if id_ in added:
            kind = UNKNOWN if text == "<unk>" else CONTROL if added[id_]["special"] else USER_DEFINED
            text = text.replace(SIGN, " ") if kind == USER_DEFINED else text
        tokens.append(text)
        types.append(kind)
        scores.append(-1000.0 if id_ in added else 0.0 if kind == BYTE else -float(id_))
    found = {"tokens": tokens, "token_type": types, **keys}
    if saved["model"]["byte_fallback"]:
        found = {"model": "llama", "pre": "default", "scores": scores, **found}
    else:
        merges = [" ".join(each) if isinstance(each, list) else each for each in saved["model"]["merges"]]
        found = {"model": "gpt2", "merges": merges, **found}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def header_of(metadata: Mapping[str, Any], architecture: str = "llama") -> GGUFHeader:
    """A header with this metadata that came from no file."""
    rest = {"general.architecture": architecture, f"{architecture}.context_length": 2048}
    return GGUFHeader(Path("model.gguf"), {**rest, **metadata}, {})
