"""A folder's tokenizer without transformers has the ids, texts and templates of the one that transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from radixkv import Engine
from radixkv.engine.chat_prompts import encode_chat
from radixkv.model_path import BUNDLED
from radixkv.models import file_tokenizer, loader
from radixkv.models.file_tokenizer import FileTokenizer
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.cli.gguf_chat_model import write_chat_model
from tests.gguf.tokenizer_files import published_bytes, published_pieces
from tests.models.checkpoints.files import rewrite
from tests.selection import mostly_long

TEXTS = (
    "", "x", "  two  spaces ", "I'VE 12345 apples, don't I?", "\t\n\r\n  \n", "\u00e9 e\u0301 \u65e5\u672c \U0001f680",
    "\u0645\u0631 \ufffd \u200b\xa0|", "<|im_start|>user\nhi<|im_end|>", "</s>a <s> </s>", "<0x0A><unk>", "\u2581a ",
    "<|im_ start|>", "<tool_call>{}</tool_call> <|endoftext|>\n", "a ' b n't . !",
)  # fmt: skip
CHAT = [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": " yes "}]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def unigram() -> Tokenizer:
    pieces = ["\u2581", "\u2581a", "a", "b", "\u2581t", "w", "o", "<", "|", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [("<unk>", 0.0), *((piece, -1.0 - at / 50) for at, piece in enumerate(pieces))]
    made = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "x", "two", "a", "##p", "##s", "don", "'", "t", "12", "##3", ".", "!", "hi", "user"]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def with_begin(made: Tokenizer) -> Tokenizer:
    made.add_special_tokens(CONTROLS)
    begin = "<|endoftext|>"
    made.post_processor = processors.TemplateProcessing(
        f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
    )
    return made


MADE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_tokenizer().backend_tokenizer,
    "published bytes": lambda: with_begin(published_bytes("qwen2")),
    "pieces": lambda: published_pieces("always"),
    "first pieces": lambda: with_begin(published_pieces("first", ("[INST]",))),
    "unigram": lambda: with_begin(unigram()),
    "wordpiece": lambda: with_begin(wordpiece()),
}


def written(folder: Path, made: Tokenizer, kind: str = "llama", **settings: Any) -> Path:
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", bos_token="<|endoftext|>", chat_template=CHATML
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    rewrite(folder / "tokenizer_config.json", **settings)
    return folder


def check(folder: Path) -> None:
    ours, theirs = file_tokenizer.read(folder, dict), AutoTokenizer.from_pretrained(folder)
    assert ours is not None and type(theirs) is PreTrainedTokenizerFast
    same(ours, theirs)


def same(ours: FileTokenizer, theirs: Any) -> None:
    for text in (*TEXTS, "".join(TEXTS)):
        for flag in (True, False):
            ids = ours.encode(text, add_special_tokens=flag)
            assert ids == theirs.encode(text, add_special_tokens=flag)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        ours_at, theirs_at = ours(text, return_offsets_mapping=True), theirs(text, return_offsets_mapping=True)
        assert all(ours_at[name] == theirs_at[name] for name in ("input_ids", "offset_mapping"))
    for name in ("special_tokens_map", "all_special_tokens", "chat_template", "eos_token_id", "is_fast"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert repr(ours.added_tokens_decoder) == repr(theirs.added_tokens_decoder)
    if ours.chat_template:
        for tools in (None, [{}]):
            assert ours.get_chat_template(None, tools=tools) == theirs.get_chat_template(None, tools=tools)
        assert encode_chat(CHAT, ours, reply=True) == encode_chat(CHAT, theirs, reply=True)


@pytest.mark.parametrize("name", MADE)
def test_made_up_tokenizers(tmp_path: Path, name: str) -> None:
    check(written(tmp_path, MADE[name]()))


def test_the_bundled_tokenizer() -> None:
    check(BUNDLED["tiny"])


END = str(byte_tokenizer().convert_tokens_to_ids("<|im_end|>"))
OLD = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "an older class": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2, "legacy": True},
    "tokens with options": {
        "eos_token": {"__type": "AddedToken", **OLD},
        "added_tokens_decoder": {END: {**OLD, "special": True}},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    },
    "text of merges is not cleaned up": {"clean_up_tokenization_spaces": True, "padding_side": "left"},
    "flags that the file overrides": {"add_bos_token": True, "add_eos_token": True, "pad_token": None},
    "several templates": {
        "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML + "t"}]
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, MADE["bytes"](), **SETTINGS[name])
    if "chat_template" in SETTINGS[name]:
        (folder / "chat_template.jinja").unlink()
    check(folder)


KINDS = [*((kind, "PreTrainedTokenizerFast") for kind in ("smollm3", "qwen3", "gemma", "gemma2", "gemma3_text"))]
KINDS += [(kind, name) for kind in ("mistral", "granite", "phi3") for name in ("LlamaTokenizer", "TokenizersBackend")]


@pytest.mark.parametrize(("kind", "named"), [*KINDS, ("granite", "GPT2Tokenizer"), ("llama", "TokenizersBackend")])
def test_types_for_which_transformers_reads_the_file_as_it_is(tmp_path: Path, kind: str, named: str) -> None:
    check(written(tmp_path, MADE["bytes"](), kind, tokenizer_class=named))


QWEN = [("qwen2", "PreTrainedTokenizerFast"), ("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2TokenizerFast")]


def of_qwen(folder: Path, kind: str, named: str, split: str = "qwen2", **settings: Any) -> Path:
    made = published_bytes(split)
    made.add_special_tokens(CONTROLS)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return written(folder, made, kind, tokenizer_class=named, **settings)


@pytest.mark.parametrize(("kind", "named"), QWEN)
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False, "bos_token": None, "pad_token": "<|endoftext|>"}])
def test_folders_of_qwen(tmp_path: Path, kind: str, named: str, settings: dict[str, Any]) -> None:
    folder = of_qwen(tmp_path, kind, named, **settings)
    ours = file_tokenizer.read(folder, partial(AutoTokenizer.from_pretrained, folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ours is not None and type(theirs) is Qwen2Tokenizer
    same(ours, theirs)
    same(ours, ours.of_transformers())


@pytest.mark.parametrize(
    "settings",
    [{"split": "llama-bpe"}, {"add_prefix_space": True}, {"named": "GPT2Tokenizer"}, {"added_tokens_decoder": {}}],
)
def test_other_folders_of_qwen_are_read_by_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = of_qwen(tmp_path, "qwen2", **{"named": "Qwen2Tokenizer", **settings})
    assert file_tokenizer.read(folder, dict) is None


def clean_up(folder: Path) -> None:
    written(folder, MADE["wordpiece"](), clean_up_tokenization_spaces=True)


def truncate(folder: Path) -> None:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(4)
    made.save(str(folder / "tokenizer.json"))


REFUSED: dict[str, Any] = {
    "an unknown setting": {"unheard_of": 1},
    "a class of its own": {"tokenizer_class": "LlamaTokenizer"},
    "split special tokens": {"split_special_tokens": True},
    "a token that is not there": {"pad_token": "<new>"},
    "a token that is not special": {"pad_token": "<tool_call>"},
    "another option of a token": {"added_tokens_decoder": {END: {**OLD, "lstrip": True, "special": True}}},
    "named tokens of its own": {"image_token": "<|im_end|>"},
    "a type with a class": lambda folder: rewrite(folder / "config.json", model_type="qwen2"),
    "cleaned text": clean_up,
    "truncation": truncate,
    "an older file of tokens": lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_read_by_transformers(tmp_path: Path, name: str) -> None:
    given = REFUSED[name]
    folder = written(tmp_path, MADE["bytes"](), **({} if callable(given) else given))
    if callable(given):
        given(folder)
    assert file_tokenizer.read(folder, dict) is None
    assert isinstance(loader.given_tokenizer(folder, trust_remote_code=False), PreTrainedTokenizerFast)


def test_what_a_user_changes_is_used() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine:
        before, chat = len(engine.generate([CHAT])[0].token_ids), engine.model.codec
        assert isinstance(chat, FileTokenizer) and before
        theirs = engine.model.tokenizer
        assert type(theirs) is PreTrainedTokenizerFast and engine.model.tokenizer is theirs
        same(chat, theirs)
        theirs.chat_template = "{{ messages[0]['content'] }}"
        assert engine.generate([CHAT[:1]])[0].usage.prompt_tokens < 20
        theirs.add_tokens(["zqzq"])
        assert len(chat) == len(theirs) == len(theirs.get_vocab()) and "zqzq" in chat.get_vocab()


ABSENT = {
    "transformers", "huggingface_hub", "torch._dynamo", "torch.distributed.tensor", "sympy", "PIL", "triton", "rich",
    "radixkv.models.rope", "radixkv.models.fallback", "radixkv.models.quantized.on_load",
}  # fmt: skip
CHILD = """
import sys
from radixkv import Engine, SamplingParams
with Engine.load(sys.argv[1], weights=sys.argv[2], num_blocks=64, monitor=False) as engine:
    engine.generate(["Hello", [{"role": "user", "content": "Hi"}]], SamplingParams(max_tokens=1))
    engine.chat("Be brief.").send("Hi", SamplingParams(max_tokens=1))
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("name", "weights"), mostly_long([("tiny", "int8"), ("model.gguf", "auto")], ("model.gguf", "auto"))
)
def test_layers_of_our_own_import_what_runs(tmp_path: Path, name: str, weights: str) -> None:
    model = name if name == "tiny" else str(write_chat_model(tmp_path / name))
    done = subprocess.run([sys.executable, "-c", CHILD, model, weights], capture_output=True, text=True, check=True)
    assert "tokenizers" in done.stdout and not ABSENT & set(done.stdout.split())
