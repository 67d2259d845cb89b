"""Write a small random model with a byte-level tokenizer and a chat template as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.chat.worlds import CHATML, byte_tokenizer
from tests.models.gguf_files import SIZES, made, write

_CONTROL, _NORMAL = 3, 1


def write_chat_model(path: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """Write the file and return its path; `changes` replace metadata."""
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 264, "max_position_embeddings": 512})
    return write(made(config), path, kind, **{**_tokenizer_keys(), **changes})


def _tokenizer_keys() -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in special else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ċ Ċ", "o u"],
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.chat_template": CHATML,
    }
