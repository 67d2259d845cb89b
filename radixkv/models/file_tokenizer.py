"""The tokenizer of a GGUF file or a local folder, without transformers, whose import takes seconds.

A `FileTokenizer` has the methods that radixkv calls, under the names of transformers, and gives equal ids and texts.
transformers reads the tokenizer of a folder with any setting that is not known here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from radixkv.gguf.pre_tokenizers import QWEN2

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")  # in its order

_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes of transformers that take tokenizer.json as it is
_AS_NAMED = ("llama", "smollm3", "qwen3", "gemma", "gemma2", "gemma3_text")  # types whose files may name such a class
_ALWAYS_PLAIN = ("mistral", "granite", "phi3")  # types for which transformers ignores the class that the files name
_KNOWN = {
    *SPECIAL, "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens", "is_local", "legacy",
    "local_files_only", "model_input_names", "model_max_length", "name_or_path", "padding_side", "sp_model_kwargs",
    "spaces_between_special_tokens", "split_special_tokens", "tokenizer_class", "truncation_side",
    "use_default_system_prompt",
}  # fmt: skip
_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")  # a class that splits texts by a pattern of its own
_QWEN_SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
_QWEN_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_LARGE = 100_000  # tokens; with more, transformers examines the split of mistral models

_log = logging.getLogger(__name__)


class FileTokenizer:
    """A tokenizer of the tokenizers library, its special tokens by name, and its chat templates.

    `extra` are special tokens without a name. The methods do the same as the methods of transformers. Once a user has
    read the tokenizer of transformers, it answers in place of this one: the user may change its chat template, say.
    """

    is_fast = True
    backend_tokenizer: Any = None  # of the class, as transformers' classes have it
    fim_token_ids: Mapping[str, int] = MappingProxyType({})  # of `Vocabulary.fim`, for a GGUF file

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str],
        templates: str | Mapping[str, str] | None,
        make: Callable[..., Any],
        extra: Sequence[str] = (),
    ) -> None:
        """`make` gets the argument `tokenizer_object` of transformers' classes, and returns their tokenizer."""
        self.backend_tokenizer = backend
        self._facts = {
            "special_tokens_map": special,
            "all_special_tokens": list(dict.fromkeys((*special.values(), *extra))),
            "eos_token_id": backend.token_to_id(special["eos_token"]) if "eos_token" in special else None,
            "chat_template": templates,
        }
        self._make, self._made, self._lock = make, None, Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of copy, say, for an object without attributes
            raise AttributeError(name)
        return self._facts[name] if self._made is None and name in self._facts else getattr(self._made, name)

    def __call__(self, text: str, *, return_offsets_mapping: bool) -> Any:
        """Return the ids of a text with special tokens, `input_ids`, and the span of each, `offset_mapping`."""
        if self._made is not None:
            return self._made(text, return_offsets_mapping=return_offsets_mapping)
        found = self.backend_tokenizer.encode(text)
        return {"input_ids": found.ids, "offset_mapping": found.offsets}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        if self._made is not None:  # whose last call may have left the library's tokenizer truncating
            return list(self._made.encode(text, add_special_tokens=add_special_tokens))
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Return the text of ids; no `options` change it."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids. O(vocabulary)."""
        return dict(self.backend_tokenizer.get_vocab())

    def get_chat_template(self, chat_template: None = None, tools: Sequence[Any] | None = None) -> str:
        """Return the template for a conversation with these tools; raises ValueError if there is none."""
        given = self.chat_template or {}
        if isinstance(given, str):
            return given
        name = "tool_use" if tools is not None and "tool_use" in given else "default"
        if name not in given:
            raise ValueError(f"none of its chat templates is the default one: {', '.join(sorted(given))}")
        return str(given[name])

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def of_transformers(self) -> Any:
        """Return the tokenizer of transformers. Thread-safe; takes seconds the first time."""
        with self._lock:
            if self._made is None:
                self._made = self._make(tokenizer_object=_Shared(self.backend_tokenizer))
            return self._made


class _Shared:
    """Hands a tokenizer to transformers without the copy that its constructor makes, which takes as long as a build."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._backend


def of_transformers(tokenizer: Any | None) -> Any | None:
    """Return the tokenizer of transformers for a tokenizer that the loader returned."""
    return tokenizer.of_transformers() if isinstance(tokenizer, FileTokenizer) else tokenizer


def add_special(backend: Tokenizer, special: Mapping[str, str], *, add_bos: bool, add_eos: bool) -> None:
    """Add the named tokens, and put those of begin and end around each text, as transformers' constructor does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(token, special=True) for token in special.values() if token not in known])
    begin = [special["bos_token"]] if add_bos and "bos_token" in special else []
    end = [special["eos_token"]] if add_eos and "eos_token" in special else []
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join([*(f"{token}:0" for token in begin), "$A:0", *(f"{token}:0" for token in end)]),
        special_tokens=[(token, backend.token_to_id(token)) for token in (*begin, *end)],
    )


# ---- folders


def read(folder: Path, make: Callable[..., Any]) -> FileTokenizer | None:
    """Return the tokenizer of a folder; None if only transformers reads it, or has an error to report."""
    try:
        return _read(folder, make)
    except Exception as reason:  # the errors of tokenizers are plain Exceptions
        _log.debug("transformers reads the tokenizer of %s: %s", folder, reason)
        return None


def _read(folder: Path, make: Callable[..., Any]) -> FileTokenizer:
    """Return the tokenizer of a folder. Raises any Exception for a setting, or a value, that is not known."""
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    named = settings["tokenizer_class"]
    qwen = (kind == "qwen2" and named in (*_PLAIN, *_QWEN)) or (kind == "qwen3" and named in _QWEN)
    _demand(qwen or kind in _ALWAYS_PLAIN or (kind in _AS_NAMED and named in _PLAIN), f"{kind} has the class {named}")
    _demand(settings.keys() <= _KNOWN, f"settings {settings.keys() - _KNOWN}")
    others = ["tekken.json", "additional_chat_templates"]
    if "added_tokens_decoder" not in settings:  # else transformers does not read them
        others += ["added_tokens.json", "special_tokens_map.json"]
    _demand(not any((folder / each).exists() for each in others), "other files")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _demand(backend.truncation is None and backend.padding is None, "truncation or padding")
    _demand(not settings.get("split_special_tokens"), "special tokens are split")
    is_bpe = type(backend.model).__name__ == "BPE"  # whose text transformers never cleans up
    _demand(is_bpe or not settings.get("clean_up_tokenization_spaces"), "text is cleaned up")
    _demand(kind != "mistral" or backend.get_vocab_size() <= _LARGE, "a large vocabulary of mistral")
    added = backend.get_added_tokens_decoder()
    for id_, token in settings.get("added_tokens_decoder", {}).items():
        _demand(AddedToken(**token).__getstate__() == added[int(id_)].__getstate__(), f"token {id_} differs")
    if qwen:
        settings = {**dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"), **settings}
        _demand_qwen(backend, settings)
    by_text = {token.content: token for token in added.values()}
    special = {name: _text(settings[name]) for name in SPECIAL if settings.get(name) is not None}
    _demand(all(by_text[token].special for token in special.values()), "a named token is not special")
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = [_text(token) for token in extra if isinstance(extra, list)]
    _demand(by_text.keys() >= set(extra), "tokens are added")
    if qwen and settings.keys() & {"add_bos_token", "add_eos_token"}:
        add_special(backend, special, add_bos=settings.get("add_bos_token"), add_eos=settings.get("add_eos_token"))
    file, templates = folder / "chat_template.jinja", settings.get("chat_template")
    if file.is_file():
        templates = file.read_text("utf-8")
    elif isinstance(templates, list):
        templates = {each["name"]: each["template"] for each in templates}
    return FileTokenizer(backend, special, templates, make, extra)


def _demand_qwen(backend: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers' class for Qwen would make another tokenizer of the vocabulary and merges."""
    model, added = backend.model, backend.get_added_tokens_decoder()
    split = json.loads(backend.pre_tokenizer.__getstate__()).get("pretokenizers", [{}])
    split[-1].pop("trim_offsets", None)  # has no effect before the merges
    parts = type(backend.normalizer).__name__, type(backend.decoder).__name__, type(model).__name__
    plain = not (model.ignore_merges or model.byte_fallback or model.dropout or model.unk_token)
    _demand(parts == ("NFC", "ByteLevel", "BPE") and split == [_QWEN_SPLIT, _QWEN_BYTES] and plain, "another split")
    _demand(not settings.get("add_prefix_space"), "a space before each text")
    listed = settings.get("added_tokens_decoder")
    _demand(listed is None or {*map(int, listed)} == added.keys(), "unlisted added tokens")
    special = [AddedToken(token.content, special=True).__getstate__() for token in added.values() if token.special]
    _demand(special == [token.__getstate__() for token in added.values() if token.special], "options of tokens")


def _demand(met: bool, reason: str) -> None:
    if not met:
        raise ValueError(reason)


def _text(token: Any) -> str:
    """Return the text of a token in the settings, which may be written with its options."""
    return str(token["content"] if isinstance(token, dict) else token)
