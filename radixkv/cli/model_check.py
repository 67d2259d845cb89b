"""Check the files of a model before torch is imported, which takes seconds.

Only local files are checked. Loading the model later makes the same checks, and all others.
"""

from __future__ import annotations

import argparse

from radixkv import model_path
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import GGUFHeader, read_header
from radixkv.models import checkpoint


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the options `model` and `tokenizer` of a command. Raises the errors of `check`."""
    if arguments.model is not None:
        check(arguments.model)
    if arguments.tokenizer is not None:
        model_path.find(arguments.tokenizer, "tokenizer")


def check(name: str) -> GGUFHeader | None:
    """Check the path and the headers of a model; return the header of a GGUF file, None for any other model.

    Raises InvalidInput or UnsupportedModel.
    """
    place = model_path.find(name)
    if place is None:
        return None
    if not model_path.is_gguf(place):
        with model_path.readable():
            checkpoint.examine(place)
        return None
    header = read_header(place)
    config_of(header)
    return header
