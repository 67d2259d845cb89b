"""Count the messages and bytes of tensor-parallel ranks, and compare a step on two ranks with one on one rank.

    python benchmarks/ranks.py [--rounds 5]

Both engines run the same random Llama-like model (4 layers, hidden size 256) on this CPU: eight prompts of 200 tokens,
then 64 decodes of all eight. The rounds alternate between the engines, which hit nothing, since each round has prompts
of its own. A step on two ranks sends one message to the other rank, and awaits one answer; its all-reduces are counted
from the model (two a layer, one for the embedding, one gather for the head). The ranks share the cores that one rank
has alone, so on a CPU a figure above 1 is overhead, and says nothing about GPUs. Tokens must be equal. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv import Engine, SamplingParams

_LAYERS, _VOCABULARY, _STREAMS, _PROMPT, _TOKENS = 4, 2048, 8, 200, 64
_GREEDY = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)


def save_model(folder: str) -> None:
    """Write a random model of 4 million weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def prompts(number: int) -> list[list[int]]:
    """Return the prompts of a round."""
    draw = random.Random(number)
    return [[draw.randrange(_VOCABULARY) for _ in range(_PROMPT)] for _ in range(_STREAMS)]


def timed(engine: Any, number: int) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds of a step, and the replies, of one round."""
    steps, began = engine.stats().steps, time.perf_counter()
    replies = engine.generate(prompts(number), _GREEDY)
    seconds = time.perf_counter() - began
    return seconds / (engine.stats().steps - steps), [each.token_ids for each in replies]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        settings: dict[str, Any] = {"num_blocks": 1024, "monitor": False, "model_code": "transformers"}
        with Engine.load(folder, **settings) as one, Engine.load(folder, tensor_parallel=2, **settings) as two:
            processes = two.core.runner.processes
            timed(one, -1), timed(two, -1)
            steps, messages, sent = two.stats().steps, processes.messages, processes.bytes_sent
            times: dict[str, list[float]] = {"one": [], "two": []}
            for number in range(rounds):
                (a, first), (b, second) = timed(one, number), timed(two, number)
                assert first == second, "the replies differ"
                times["one"].append(a)
                times["two"].append(b)
            steps = two.stats().steps - steps
            found = {
                "steps": steps,
                "messages_per_step": round((processes.messages - messages) / steps, 3),
                "bytes_per_step": round((processes.bytes_sent - sent) / steps),
                "collectives_per_step": 2 * _LAYERS + 2,
                "step_ms_one": round(1e3 * statistics.median(times["one"]), 3),
                "step_ms_two": round(1e3 * statistics.median(times["two"]), 3),
            }
    found["ratio"] = round(statistics.median(b / a for a, b in zip(times["one"], times["two"], strict=True)), 2)
    for name, value in found.items():
        print(f"{name:<24}{value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
