"""Build a tokenizer of transformers from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores, and the types of the tokens under the key names of llama.cpp. It
does not hold the normalizer, the split and the decoder of the model's `tokenizer.json`; these follow from
`tokenizer.ggml.model`, `tokenizer.ggml.pre` and the architecture. The ids of every text are those of the model's own
`tokenizer.json`. Metadata that this module cannot reproduce exactly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from radixkv.errors import InvalidInput, RadixKVError, UnsupportedModel
from radixkv.gguf.header import GGUFHeader
from radixkv.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type
_NO_TOKEN = (-1, 0xFFFFFFFF)  # ids that stand for "none"
_SPACE = "\u2581"  # sentencepiece writes a space as this sign
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # of transformers: of llama.cpp
_REMEDY = "pass tokenizer= with the folder or hub name of the original model"

_NORMALIZATIONS = (
    "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents",
)  # fmt: skip

# Control tokens that end a reply. llama.cpp looks for the same names, because files often state one stop token of many.
_STOP_NAMES = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip


def tokenizer_of(header: GGUFHeader) -> PreTrainedTokenizerFast | None:
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
        raise vocabulary.broken(f"its tokenizer cannot be built ({error})") from error
    return PreTrainedTokenizerFast(tokenizer_object=_Shared(backend), **vocabulary.settings)


def stop_token_ids(header: GGUFHeader) -> list[int]:
    """Return the ids that end a reply, in ascending order; none for a file without a vocabulary.

    These are the end-of-text, end-of-turn and end-of-message tokens of the metadata, and control tokens of well-known
    names. Raises as `tokenizer_of`.
    """
    vocabulary = Vocabulary.of(header)
    return [] if vocabulary is None else vocabulary.stops


@dataclass(frozen=True)
class Vocabulary:
    """The checked `tokenizer.*` metadata of a file.

    `tokens[id]` is the text of a token as the file has it, `types[id]` its `tokenizer.ggml.token_type`.
    """

    path: Any
    metadata: Mapping[str, Any]
    kind: str
    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, header: GGUFHeader) -> Vocabulary | None:
        """Return the vocabulary of a file; None if it has none. Raises InvalidInput and UnsupportedModel."""
        kind = header.metadata.get("tokenizer.ggml.model", "none")
        if kind in ("none", "no_vocab"):
            return None
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"{header.path}: its tokenizer is of the kind {kind!r}, and radixkv reads "
                f"{', '.join(map(repr, _KINDS))}: {_REMEDY}"
            )
        tokens = _list_of(header, "tokens", str)
        if not tokens:
            raise InvalidInput(f"{header.path}: its tokenizer has no tokens; the file is broken: get it again")
        types = _list_of(header, "token_type", int, optional=True) or [1] * len(tokens)
        found = cls(header.path, header.metadata, kind, tokens, types)
        found.check()
        return found

    def check(self) -> None:
        """Raise InvalidInput unless each token has a type and a text of its own, and each named id is a token."""
        if len(self.types) != len(self.tokens):
            raise self.broken(f"it has {len(self.tokens):,} tokens and {len(self.types):,} token types")
        if len(set(self.tokens)) < len(self.tokens):
            first: dict[str, int] = {}
            at, token = next((i, t) for i, t in enumerate(self.tokens) if first.setdefault(t, i) != i)
            raise self.broken(f"its tokens {first[token]} and {at} are the same, {token!r}")
        for name in (*_NAMED.values(), "eot", "eom"):
            self.named(name)
        if other := [key for key in _NORMALIZATIONS if self.metadata.get(key)]:
            raise UnsupportedModel(
                f"{self.path}: its tokenizer changes text in a way unknown here ({other[0]}): {_REMEDY}"
            )

    def broken(self, reason: str) -> InvalidInput:
        """Return the error for metadata that contradicts itself."""
        return InvalidInput(f"{self.path}: {reason}; the tokenizer of this file is broken: get it again, or {_REMEDY}")

    def named(self, name: str) -> int | None:
        """Return the id of a `tokenizer.ggml.NAME_token_id`, None if the file has none; raises InvalidInput."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None or value in _NO_TOKEN:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise self.broken(f"{key} is {value!r}, and its {len(self.tokens):,} tokens have the ids from 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes or no of `tokenizer.ggml`."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.broken(f"tokenizer.ggml.{name} is {value!r}, neither true nor false")
        return value

    @property
    def architecture(self) -> str:
        """The architecture of the model."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def split(self) -> PreTokenizer:
        """The split before byte-level merges. Raises UnsupportedModel for a name that is not in the table."""
        name = self.metadata.get("tokenizer.ggml.pre")
        if name not in PRE_TOKENIZERS:
            reason = f"radixkv has no rule {name!r} for" if name else "the file does not state"
            raise UnsupportedModel(
                f"{self.path}: {reason} how its tokenizer splits text (tokenizer.ggml.pre), so the ids of a text would "
                f"be a guess: {_REMEDY}"
            )
        return PRE_TOKENIZERS[name]

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the named tokens: bos, eos, unk and pad, as far as the file has them.

        For a file without these keys, sentencepiece's own ids hold: 0, 1 and 2 are unk, bos and eos.
        """
        found = {name: self.named(key) for name, key in _NAMED.items()}
        if self.kind == "llama":
            for name, at, type_ in (("unk", 0, _UNKNOWN), ("bos", 1, _CONTROL), ("eos", 2, _CONTROL)):
                absent = f"tokenizer.ggml.{_NAMED[name]}_token_id" not in self.metadata
                if absent and at < len(self.types) and self.types[at] == type_:
                    found[name] = at
        return {name: id_ for name, id_ in found.items() if id_ is not None}

    @cached_property
    def control(self) -> dict[str, int]:
        """Ids of the control tokens."""
        return {self.tokens[i]: i for i, type_ in enumerate(self.types) if type_ == _CONTROL}

    @property
    def stops(self) -> list[int]:
        """Ids that end a reply, in ascending order."""
        ids = (self.special.get("eos"), self.named("eot"), self.named("eom"))
        named = {name: id_ for name, id_ in self.control.items() if name in _STOP_NAMES}
        if any(pair <= named.keys() for pair in ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})):
            named.pop("<|end|>", None)  # it ends a message of such models, and their reply goes on
        if "<|tool_response>" in named:
            named.pop("</s>", None)
        return sorted({*(id_ for id_ in ids if id_ is not None), *named.values()})

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of transformers' tokenizer class."""
        add_bos = self.flag("add_bos_token", self.split.add_bos if self.kind == "gpt2" else self.kind == "llama")
        add_eos = self.flag("add_eos_token", False)
        for name, added in (("bos", add_bos), ("eos", add_eos)):
            if added and name not in self.special and f"tokenizer.ggml.add_{name}_token" in self.metadata:
                raise self.broken(f"tokenizer.ggml.add_{name}_token is true, and it names no such token")
        context = self.metadata.get(f"{self.architecture}.context_length")
        return {
            **{f"{name}_token": self.tokens[id_] for name, id_ in self.special.items()},
            "add_bos_token": add_bos and "bos" in self.special and self.kind != "gemma4",
            "add_eos_token": add_eos,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.templates,
            **({"model_max_length": context} if isinstance(context, int) else {}),
        }

    @property
    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or all of them by name if there are several; None without any."""
        default = self.metadata.get("tokenizer.chat_template")
        names = self.metadata.get("tokenizer.chat_templates") or []
        named = {str(name): self.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        if default:
            named["default"] = default
        if missing := [name for name, text in named.items() if not isinstance(text, str)]:
            raise self.broken(f"its chat template {missing[0]!r} is no text")
        return named.get("default") if named.keys() <= {"default"} else named  # type: ignore[return-value]


class _Shared:
    """Hands a tokenizer to transformers without the copy that its constructor makes, which takes as long as a build."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._backend


def _list_of(header: GGUFHeader, name: str, kind: type, *, optional: bool = False) -> list[Any]:
    """Return a list of the metadata; raises InvalidInput if it is missing or has entries of another kind."""
    found = header.metadata.get(f"tokenizer.ggml.{name}")
    if found is None and optional:
        return []
    if not isinstance(found, Sequence) or not all(isinstance(each, kind) for each in found):
        state = "is missing" if found is None else f"is no list of {kind.__name__}"
        raise InvalidInput(f"{header.path}: tokenizer.ggml.{name} {state}; the file is broken: get it again")
    return list(found)


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
        if type_ == _CONTROL:
            control.append(AddedToken(token, normalized=False, special=True, rstrip=strips))
        elif type_ == _USER_DEFINED:
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
    if unknown is None and vocabulary.types.count(_BYTE) < 256:
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
        _as_signs(token) if type_ == _USER_DEFINED and not token.strip(" ") and _as_signs(token) not in known else token
        for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of the file, each as two tokens."""
    found = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise vocabulary.broken("tokenizer.ggml.merges is no list of merges")
    return [(merge[:at], merge[at + 1 :]) for merge in found if (at := merge.find(" ", 1))]


def _merges_of_scores(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all merges that lead to tokens, those of the highest scores first, as in a `tokenizer.json`.

    User-defined tokens come before all others: sentencepiece scores them 0, and the files replace that score.
    """
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, Sequence) or len(scores) != len(ids):
        raise vocabulary.broken("tokenizer.ggml.scores is no list with a score for each token")
    pairs: list[tuple[str, str]] = []
    keys: list[tuple[float, int, int]] = []
    for (token, id_), type_ in zip(ids.items(), vocabulary.types, strict=True):
        if type_ in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        score = 0.0 if type_ == _USER_DEFINED else scores[id_]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((left, right))
                keys.append((score, cut, len(right)))
    order = np.lexsort(-np.array(keys, dtype=np.float64).reshape(-1, 3).T[::-1])
    return [pairs[at] for at in order]
