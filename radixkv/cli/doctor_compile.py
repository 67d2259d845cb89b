"""Compile the Triton kernels of a model in advance, for `radixkv doctor --compile`: later engines find them cached."""

from __future__ import annotations

import argparse
import sys
import time

from radixkv.config import EngineConfig, settings_in
from radixkv.errors import InvalidInput


def run(arguments: argparse.Namespace) -> int:
    """Load an engine, which runs all kernels of its steps, and serve two requests that share a prefix; return 0.

    Raises InvalidInput without a GPU on which Triton runs.
    """
    from radixkv import Engine, SamplingParams  # takes seconds: it imports torch
    from radixkv.attention.triton_backend import device_obstacle
    from radixkv.device import unusable_gpu
    from radixkv.models.adapter import place_of

    if reason := unusable_gpu() or device_obstacle(place_of(arguments.device)):
        raise InvalidInput(f"--compile needs a GPU and Triton: {reason}")
    from triton import knobs

    folder, began, compiled = knobs.cache.dir, time.perf_counter(), 0

    def count(*, cache_hit: bool, **_: object) -> None:
        nonlocal compiled
        compiled += not cache_hit
        print(f"\r{compiled} kernels, {time.perf_counter() - began:.0f} s", end="", file=sys.stderr, flush=True)

    knobs.compilation.listener = count
    whole = EngineConfig(verify="always", monitor=False)
    with Engine.load(arguments.model, whole, tokenizer=arguments.tokenizer, **settings_in(arguments)) as engine:
        prefix = [0] * min(300, engine.model.max_length - 8)
        engine.generate([[*prefix, 0], [*prefix, 1]], SamplingParams(max_tokens=4))
    print(file=sys.stderr)
    print(f"{compiled} kernels were compiled in {time.perf_counter() - began:.0f} s: {folder}")
    return 0
