"""Read and check the vocabulary of a GGUF file: tokens, their types, named tokens, stop tokens and chat templates.

The ids of a text depend on every entry, so metadata that contradicts itself is refused, not repaired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader, typed
from radixkv.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as `tokenizer.ggml.token_type` has them."""

KINDS = ("gpt2", "llama", "gemma4")
"""Values of `tokenizer.ggml.model`: byte-level BPE, sentencepiece BPE by scores, and the latter with merges."""

_KEY = "tokenizer.ggml."
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # of transformers: of llama.cpp
_FIM = {"pre": "prefix", "suf": "suffix", "mid": "middle", "rep": None, "sep": None, "pad": None}  # role: older name
_NO_TOKEN = (-1, 0xFFFFFFFF)  # ids that stand for "none"
_LONGEST = 1024  # characters of a token; the longest of known vocabularies have 256
_NORMALIZATIONS = (
    "remove_extra_whitespaces", "precompiled_charsmap", "normalizer.lowercase", "normalizer.strip_accents",
)  # fmt: skip
_REMEDY = "pass tokenizer= with the folder or hub name of the original model"

# Control tokens that end a reply. llama.cpp looks for the same names, because files often state one stop token of many.
_STOP_NAMES = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "</s>", "<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """The checked `tokenizer.*` metadata of a file.

    `kind` is one of KINDS. `tokens[id]` is the text of a token as the file has it, and `types[id]` its type.
    """

    path: Path
    metadata: Mapping[str, Any]
    kind: str
    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, header: GGUFHeader) -> Vocabulary | None:
        """Return the vocabulary of a file; None if it has none.

        Raises InvalidInput for metadata that contradicts itself, UnsupportedModel for an unknown kind of tokenizer, or
        one that changes text before it splits it.
        """
        kind = header.value(f"{_KEY}model", str, "none")
        if kind in ("none", "no_vocab"):
            return None
        if kind not in KINDS:
            raise UnsupportedModel(
                f"{header.path}: its tokenizer is of the kind {kind!r}, and radixkv reads {', '.join(KINDS)}: {_REMEDY}"
            )
        found = cls(header.path, header.metadata, kind, [], [])
        # Some vocabularies have several tokens without a text; llama.cpp gives them the same texts.
        found.tokens.extend(text or f"[EMPTY_{id_}]" for id_, text in enumerate(found.list_of("tokens", str)))
        found.types.extend(found.list_of("token_type", int) if f"{_KEY}token_type" in header.metadata else ())
        found.types.extend([NORMAL] * len(found.tokens) if not found.types else ())
        found._check()
        return found

    def _check(self) -> None:
        """Raise InvalidInput unless each token has a type and a text of its own, and each named id is one."""
        if not self.tokens:
            raise self.broken("it has no tokens")
        if len(self.types) != len(self.tokens):
            raise self.broken(f"it has {len(self.tokens):,} tokens and {len(self.types):,} token types")
        if len(set(self.tokens)) < len(self.tokens):
            first: dict[str, int] = {}
            at, token = next((i, t) for i, t in enumerate(self.tokens) if first.setdefault(t, i) != i)
            raise self.broken(f"its tokens {first[token]} and {at} are the same, {token[:40]!r}")
        if (longest := max(self.tokens, key=len)) and len(longest) > _LONGEST:
            raise self.broken(f"it has a token of {len(longest):,} characters, {longest[:40]!r}...")
        try:
            "".join(self.tokens).encode()
        except UnicodeEncodeError as error:
            raise self.broken("it has a token that is no valid UTF-8") from error
        for name in (*_NAMED.values(), "eot", "eom"):
            self.named(name)
        if other := [name for name in _NORMALIZATIONS if self.metadata.get(_KEY + name)]:
            raise UnsupportedModel(
                f"{self.path}: its tokenizer changes text in a way that radixkv does not ({_KEY}{other[0]}): {_REMEDY}"
            )

    # ---- values of the metadata

    def broken(self, reason: str) -> InvalidInput:
        """Return the error for metadata that contradicts itself."""
        return InvalidInput(f"{self.path}: {reason}; the tokenizer of this file is broken: get it again, or {_REMEDY}")

    def list_of(self, name: str, *kinds: type) -> list[Any]:
        """Return the list `tokenizer.ggml.NAME`; raises InvalidInput if it is missing or has values of other types."""
        found = typed(self.path, self.metadata, _KEY + name, list)
        if found is None:
            raise self.broken(f"{_KEY}{name} is missing")
        if not all(isinstance(each, kinds) for each in found):
            raise self.broken(f"{_KEY}{name} has values that are no {kinds[0].__name__}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """Return the yes or no of `tokenizer.ggml.NAME`; raises InvalidInput for another value."""
        found = typed(self.path, self.metadata, _KEY + name, bool)
        return default if found is None else found

    def named(self, name: str) -> int | None:
        """Return the id `tokenizer.ggml.NAME_token_id`, None if the file has none; raises InvalidInput."""
        key = f"{_KEY}{name}_token_id"
        found = typed(self.path, self.metadata, key, int)
        if found is None or found in _NO_TOKEN:
            return None
        if not 0 <= found < len(self.tokens):
            raise self.broken(f"{key} is {found}, and the ids of its tokens end at {len(self.tokens) - 1}")
        return found

    # ---- parts of a tokenizer

    @property
    def architecture(self) -> str:
        """The architecture of the model."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def split(self) -> PreTokenizer:
        """The split before byte-level merges. Raises UnsupportedModel for a name that is not in the table."""
        name = typed(self.path, self.metadata, f"{_KEY}pre", str)
        if name not in PRE_TOKENIZERS:
            reason = f"radixkv has no rule {name!r} for" if name else "the file does not state"
            raise UnsupportedModel(
                f"{self.path}: {reason} how its tokenizer splits text ({_KEY}pre), so the ids of a text would be a "
                f"guess: {_REMEDY}"
            )
        return PRE_TOKENIZERS[name]

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the tokens that transformers names: bos, eos, unk and pad, as far as the file has them.

        For a file without these keys, sentencepiece's own ids hold: 0, 1 and 2 are unk, bos and eos.
        """
        found = {name: self.named(key) for name, key in _NAMED.items()}
        if self.kind == "llama":
            for name, at, type_ in (("unk", 0, UNKNOWN), ("bos", 1, CONTROL), ("eos", 2, CONTROL)):
                absent = f"{_KEY}{_NAMED[name]}_token_id" not in self.metadata
                if absent and self.types[at : at + 1] == [type_]:
                    found[name] = at
        return {name: id_ for name, id_ in found.items() if id_ is not None}

    @property
    def added(self) -> tuple[bool, bool]:
        """Whether a text gets the beginning-of-text token, and the end-of-text token. Raises InvalidInput."""
        default = self.split.add_bos if self.kind == "gpt2" else self.kind == "llama"
        flags = self.flag("add_bos_token", default), self.flag("add_eos_token", False)
        for name, flag in zip(("bos", "eos"), flags, strict=True):
            if flag and name not in self.special and f"{_KEY}add_{name}_token" in self.metadata:
                raise self.broken(f"{_KEY}add_{name}_token is true, and the file names no such token")
        # The flag of Gemma 4 is true, but its own tokenizer adds no token, because its chat template writes it.
        return flags[0] and "bos" in self.special and self.kind != "gemma4", flags[1]

    @cached_property
    def control(self) -> dict[str, int]:
        """Ids of the control tokens by their text."""
        return {self.tokens[id_]: id_ for id_, type_ in enumerate(self.types) if type_ == CONTROL}

    @property
    def fim(self) -> dict[str, int]:
        """Ids of the control and added tokens that fill in the middle, by their role in `tokenizer.ggml.fim_*`."""
        names = [(role, name) for role, older in _FIM.items() for name in (older, f"fim_{role}") if name]
        found = {role: id_ for role, name in names if (id_ := self.named(name)) is not None}
        return {role: id_ for role, id_ in found.items() if self.types[id_] in (CONTROL, USER_DEFINED)}

    @property
    def stops(self) -> list[int]:
        """Ids that end a reply, in ascending order.

        These are the end-of-text, end-of-turn and end-of-message tokens, and control tokens of well-known names.
        """
        ids = (self.special.get("eos"), self.named("eot"), self.named("eom"))
        named = {name: id_ for name, id_ in self.control.items() if name in _STOP_NAMES}
        if any(pair <= named.keys() for pair in ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})):
            named.pop("<|end|>", None)  # it ends a message of such models, and their reply goes on
        if "<|tool_response>" in named:
            named.pop("</s>", None)
        return sorted({*(id_ for id_ in ids if id_ is not None), *named.values()})

    @property
    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or all of them by name if there are several; None without any. Raises InvalidInput."""
        key = "tokenizer.chat_template"
        names = typed(self.path, self.metadata, f"{key}s", list) or []
        found = {str(name): typed(self.path, self.metadata, f"{key}.{name}", str) for name in names}
        if default := typed(self.path, self.metadata, key, str):
            found["default"] = default
        if missing := [name for name, text in found.items() if text is None]:
            raise self.broken(f"it lists the chat template {missing[0]!r} and does not hold it")
        several = {name: text for name, text in found.items() if text is not None}
        return several.get("default") if several.keys() <= {"default"} else several
