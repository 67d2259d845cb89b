"""Cached and uncached greedy answers are equal in float32, on a real model over the real pool."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv import Engine, SamplingParams, ToolResult
from tests.chat.worlds import byte_tokenizer
from tests.engine.fakes import check
from tests.selection import mostly_long

GREEDY = SamplingParams(max_tokens=16, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A random Llama with the byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def converse(engine: Engine) -> list[tuple[int, ...]]:
    """Turns, forks that run together, an edit, a rewind; every reply's ids."""
    replies = []

    def said(reply) -> None:
        replies.append(reply.token_ids)

    chat = engine.chat("You are nobody in particular, and say so at length. " * 3)
    for text in ("Hello there.", "And now?", "hello again"):
        said(chat.send(text, GREEDY))
    agents = chat.fork(4)
    streams = [agent.stream(f"Task {n}: {'do it. ' * n}", GREEDY) for n, agent in enumerate(agents)]
    for stream in streams:
        said(stream.wait())
    said(chat.edit(2, "Something else entirely.", GREEDY))
    chat.rewind()
    said(chat.send("And now?", GREEDY))
    for agent, size in zip(agents, itertools.cycle([3, 40]), strict=False):
        said(agent.send("more " * size, GREEDY.but(max_tokens=5)))
        said(agent.send("again", GREEDY))
    return replies


@pytest.mark.parametrize("block_size", mostly_long([1, 16], 16))
def test_cached_and_uncached_answers_are_equal(folder, block_size):
    torch.set_num_threads(1)
    with (
        Engine.load(folder, kv_memory="8MB", block_size=block_size, prefill_chunk=64) as cached,
        Engine.load(folder, kv_memory="8MB", block_size=block_size, prefill_chunk=64, prefix_cache=False) as plain,
    ):
        assert converse(cached) == converse(plain)
        check(cached)
        assert cached.stats().hit_rate > 0.6
        assert plain.stats().cached_tokens == 0
        assert cached.stats().computed_tokens < 0.5 * plain.stats().computed_tokens


def test_answers_are_equal_under_pressure(folder):
    torch.set_num_threads(1)
    with Engine.load(folder, num_blocks=60) as tight, Engine.load(folder, num_blocks=2000, prefix_cache=False) as plain:
        assert converse(tight) == converse(plain)
        check(tight)
        assert tight.stats().cache.evicted_blocks > 0


TINY = Path(__file__).parents[2] / "radixkv" / "assets" / "tiny"


def test_the_bundled_model_answers_alike_with_and_without_a_cache():
    torch.set_num_threads(1)
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]

    def talk(engine: Engine) -> list[tuple[int, ...]]:
        replies = []
        chat = engine.chat("You are a helpful assistant.")
        agent = engine.chat("You are a helpful assistant.", tools=tools)
        texts = ("Hello!", "My name is Nora.", "What is two plus three?", "What is my name?")
        replies += [chat.send(text, GREEDY).token_ids for text in texts]
        replies += [fork.send("Thanks!", GREEDY).token_ids for fork in chat.fork(2)]
        reply = agent.send("What is the weather in Paris?", GREEDY.but(max_tokens=48))
        replies.append(reply.token_ids)
        if reply.tool_calls:
            results = [ToolResult(call.id, {"weather": "sunny"}) for call in reply.tool_calls]
            replies.append(agent.tool_results(results, GREEDY).token_ids)
        return replies

    with (
        Engine.load("tiny", kv_memory="64MB") as cached,
        Engine.load("tiny", kv_memory="64MB", prefix_cache=False) as plain,
    ):
        assert talk(cached) == talk(plain)
        assert cached.stats().hit_rate > 0.3
