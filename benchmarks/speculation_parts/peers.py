"""Measure the prompt lookup of transformers and of llama.cpp for benchmarks/speculation.py, with and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llama_cpp import leading_equal
from llama_cpp_parts import worker
from llama_cpp_parts.worker import WorkerError

from .cases import CASES

LOOKUPS: dict[str, Any] = {"plain": None, "3 tokens": {}, "1 token": {"predictionLength": {"max": 1}}}
"""Settings of llama.cpp. The package accepts no more than the first token of a draft."""

Prompts = dict[str, list[int]]
Decode = Callable[[list[int], int], tuple[float, list[int]]]
"""Decode so many tokens after a prompt; returns CPU seconds after the first token, and the reply."""


def measure(model: str, folder: Path, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """The speed of each peer with lookup over without it, or why it is missing; prints them."""
    result: dict[str, Any] = {}
    for name, peer in {"transformers": transformers_peer, "llama.cpp": llama_cpp_peer}.items():
        try:
            result[name] = peer(model, folder, prompts, rounds)
        except (ImportError, WorkerError) as error:
            result[name] = {"missing": str(error)}
        print(f"{name}: {result[name]}", flush=True)
    return result


def transformers_peer(model: str, folder: Path, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Float32 weights of the same file, `generate` with and without prompt lookup."""
    from transformers import AutoModelForCausalLM

    path = Path(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    loaded.generation_config.pad_token_id = 0

    def decode(prompt: list[int], tokens: int, **lookup: int) -> tuple[float, list[int]]:
        spent, found = [], torch.empty(0)
        for count in (1, tokens):
            start = time.process_time()
            length = {"max_new_tokens": count, "min_new_tokens": count}
            found = loaded.generate(torch.tensor([prompt]), do_sample=False, **length, **lookup)
            spent.append(time.process_time() - start)
        return spent[1] - spent[0], found[0, len(prompt) :].tolist()

    decodes = {"plain": decode, "10 tokens": partial(decode, prompt_lookup_num_tokens=10)}
    return {"version": version("transformers"), "cases": compared(decodes, prompts, rounds)}


def llama_cpp_peer(model: str, folder: Path, prompts: Prompts, rounds: int) -> dict[str, Any]:
    """The file as it is, with and without InputLookupTokenPredictor."""
    side = worker.peer(folder, model)

    def decode(process: worker.Worker, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        found = process.ask("generate", prompts=[prompt], tokens=tokens)
        return (found["total"]["cpu_ms"] - found["first"][0]["cpu_ms"]) / 1e3, found["replies"][0]

    with ExitStack() as stack:
        decodes: dict[str, Decode] = {}
        for name, lookup in LOOKUPS.items():
            settings = side.settings | {"lookup": lookup}
            process = stack.enter_context(
                replace(side, settings=settings).start(model, threads=1, streams=1, context=1024)
            )
            decodes[name] = partial(decode, process)
        return {"version": process.versions, "cases": compared(decodes, prompts, rounds)}


def compared(decodes: dict[str, Decode], prompts: Prompts, rounds: int) -> dict[str, Any]:
    """Seconds without lookup over seconds with it, median of the rounds, and the tokens before replies differ."""
    result: dict[tuple[str, str], Any] = {}
    for name, prompt in prompts.items():
        found: dict[str, list[float]] = {each: [] for each in decodes}
        replies = {}
        for number in range(rounds):
            for each in decodes if number % 2 == 0 else reversed(decodes):
                seconds, replies[each] = decodes[each](prompt, CASES[name].tokens)
                found[each].append(seconds)
        plain, expected = found.pop("plain"), replies.pop("plain")
        for each, reply in replies.items():
            ratio = statistics.median(a / b for a, b in zip(plain, found[each], strict=True))
            result[name, each] = {"speed": round(ratio, 2), "equal": leading_equal(expected, reply)}
    return {" ".join(each): figures for each, figures in result.items()}
