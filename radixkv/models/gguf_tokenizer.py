"""Build a tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores, and the types of the tokens under the key names of llama.cpp. It
does not hold the normalizer, the split and the decoder of the model's `tokenizer.json`; these follow from
`tokenizer.ggml.model`, `tokenizer.ggml.pre` and the architecture. A text has the ids that the model's own
`tokenizer.json` gives it, with the exceptions in docs/loading.md. Kinds and splits without a row are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from radixkv.errors import RadixKVError
from radixkv.gguf.header import GGUFHeader
from radixkv.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from radixkv.models.file_tokenizer import SPECIAL, FileTokenizer, add_special

_SHOWN = 100  # letters of an error of another library
_NO_LENGTH = int(1e30)  # as transformers writes it
_SPACE = "\u2581"  # sentencepiece writes a space as this sign


def tokenizer_of(header: GGUFHeader) -> FileTokenizer | None:
    """Return the tokenizer of a GGUF file with its chat template; None if the file has no vocabulary.

    Raises InvalidInput for metadata that contradicts itself, UnsupportedModel for a kind of tokenizer, or a split, that
    radixkv cannot reproduce. O(vocabulary): 0.1 s for 49,152 tokens with merges, 2.5 s for 262,144 with scores.
    """
    vocabulary = Vocabulary.of(header)
    if vocabulary is None:
        return None
    try:
        backend = _backend(vocabulary)
    except RadixKVError:
        raise
    except Exception as error:  # the errors of tokenizers are plain Exceptions
        raise vocabulary.broken(f"its tokenizer cannot be built ({str(error)[:_SHOWN]})") from error
    add_bos, add_eos = vocabulary.added
    named = {f"{name}_token": vocabulary.tokens[id_] for name, id_ in vocabulary.special.items()}
    special = {name: named[name] for name in SPECIAL if name in named}
    add_special(backend, special, add_bos=add_bos, add_eos=add_eos)
    length = header.value(f"{vocabulary.architecture}.context_length", int, _NO_LENGTH)

    def of_transformers(tokenizer_object: Any) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer_object,
            add_bos_token=add_bos,
            add_eos_token=add_eos,
            chat_template=vocabulary.templates,
            clean_up_tokenization_spaces=False,
            model_max_length=length,
            **special,
        )

    made = FileTokenizer(backend, special, vocabulary.templates, of_transformers)
    made.fim_token_ids = vocabulary.fim
    return made


def stop_token_ids(header: GGUFHeader) -> list[int]:
    """Return the ids that end a reply, in ascending order; none for a file without a vocabulary.

    These are the end-of-text, end-of-turn and end-of-message tokens of the metadata, and control tokens of well-known
    names. Raises as `tokenizer_of`.
    """
    vocabulary = Vocabulary.of(header)
    return [] if vocabulary is None else vocabulary.stops


# ---- the kinds of tokenizers


def _backend(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer with its added tokens, without a post processor.

    The added tokens of Phi-3 take the white space after them, which the files do not state.
    """
    backend = _KINDS[vocabulary.kind](vocabulary)
    phi3 = vocabulary.architecture == "phi3" and vocabulary.kind == "llama"
    control, added = [], []
    for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True):
        strips = phi3 and token not in ("<s>", "<unk>", "<|endoftext|>")
        if type_ == CONTROL:
            control.append(AddedToken(token, normalized=False, special=True, rstrip=strips))
        elif type_ == USER_DEFINED:
            text = token if backend.token_to_id(token) is not None else _as_signs(token)
            added.append(AddedToken(text, normalized=False, special=False, rstrip=strips))
    backend.add_special_tokens(control)
    backend.add_tokens(added)
    return backend


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE: merges of bytes, each written as a letter, inside the pieces of a split."""
    split = vocabulary.split
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    model = BPE(vocab=ids, merges=_merges(vocabulary), ignore_merges=split.ignore_merges)
    backend = Tokenizer(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """BPE of sentencepiece: characters merged by the scores of the results, spaces as a sign, unknown ones as bytes."""
    tokens = _respelled(vocabulary)
    ids = {token: id_ for id_, token in enumerate(tokens)}
    prefix = vocabulary.flag("add_space_prefix", not vocabulary.architecture.startswith("gemma"))
    return _with_signs(vocabulary, ids, _merges_of_scores(vocabulary, ids), prefix=prefix)


def _gemma4(vocabulary: Vocabulary) -> Tokenizer:
    """As sentencepiece without a prefix, with the merges of the file."""
    ids = {token: id_ for id_, token in enumerate(_respelled(vocabulary))}
    return _with_signs(vocabulary, ids, _merges(vocabulary), prefix=False)


def _with_signs(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[tuple[str, str]], *, prefix: bool
) -> Tokenizer:
    """Return BPE over a whole text whose spaces are signs, with byte tokens for characters outside the vocabulary.

    With `prefix` each text begins with a sign, and so does the text after an added token. The models of Mistral with
    control tokens such as [INST] are an exception: there a sign comes before a whole text only, if it has no space.
    """
    unknown = vocabulary.special.get("unk")
    if unknown is None and vocabulary.types.count(BYTE) < 256:
        raise vocabulary.broken("it has no unknown token, and too few byte tokens to spell every character")
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    signs = normalizers.Replace(" ", _SPACE)
    if prefix and "[INST]" in vocabulary.control:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), signs]) if prefix else signs
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


_KINDS: dict[str, Callable[[Vocabulary], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}


def _as_signs(token: str) -> str:
    return _SPACE * len(token)


def _respelled(vocabulary: Vocabulary) -> list[str]:
    """Return the tokens, with signs in user-defined runs of spaces, in which the file has spaces."""
    known = set(vocabulary.tokens)
    return [
        _as_signs(token) if type_ == USER_DEFINED and not token.strip(" ") and _as_signs(token) not in known else token
        for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of the file, each as two tokens: the same objects, as new ones would fragment memory."""
    own = {token: token for token in vocabulary.tokens}
    pairs = (
        (merge[:at], merge[at + 1 :]) for merge in vocabulary.list_of("merges", str) for at in [merge.find(" ", 1)]
    )
    return [(own.get(one, one), own.get(other, other)) for one, other in pairs]


def _merges_of_scores(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all merges that lead to tokens, the highest scores first, as in a `tokenizer.json`.

    User-defined tokens come before all others: sentencepiece scores them 0, and the files replace that score.
    """
    scores = vocabulary.list_of("scores", float, int)
    if len(scores) != len(ids):
        raise vocabulary.broken(f"it has {len(ids):,} tokens and {len(scores):,} scores")
    pairs: list[tuple[str, str]] = []
    keys: list[tuple[float, int, int]] = []
    for (token, id_), type_ in zip(ids.items(), vocabulary.types, strict=True):
        if type_ in (UNKNOWN, CONTROL, BYTE):
            continue
        score = 0.0 if type_ == USER_DEFINED else scores[id_]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((left, right))
                keys.append((score, cut, len(right)))
    order = np.lexsort(-np.array(keys, dtype=np.float64).reshape(-1, 3).T[::-1])
    return [pairs[at] for at in order]
