"""Chats and long prompts on engines of small random hybrid models, and the requests that they made."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from hybrid_parts.workloads import Ask

from radixkv import Engine, SamplingParams
from radixkv.chat.messages import Message
from radixkv.chat.template import ChatTemplate
from radixkv.models import adapter

TEMPLATES = {
    "keeps replies": """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # As Qwen3.5's: it opens the reasoning of a reply, and leaves it out of earlier replies.
    "strips reasoning": """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}""",
}
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "they", "at", "not")
ROWS = 2
VOCAB = 1536


def build(kind: str) -> Any:
    """Return a random model of 4 layers with state and 2 (Qwen3.5) or 4 (LFM2) with attention; the same each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    if kind == "qwen3_5":
        linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
        config = transformers.Qwen3_5TextConfig(num_hidden_layers=8, **linear, **dims, **sizes)
    else:
        config = transformers.Lfm2Config(layer_types=["conv", "full_attention"] * 4, num_hidden_layers=8, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokenizer(template: str) -> Any:
    """Return the bundled model's tokenizer with another chat template."""
    with resources.as_file(resources.files("radixkv").joinpath("assets", "tiny")) as folder:
        found = transformers.AutoTokenizer.from_pretrained(folder)
    found.chat_template = template
    return found


def load(kind: str, template: str, slots: int) -> Engine:
    """Load an engine with `slots` states for snapshots and KV memory for all requests."""
    model = build(kind)
    memory = (ROWS + slots) * adapter.load(model, dtype="float32").state_bytes
    options: dict[str, Any] = {"num_blocks": 3000, "max_sequences": ROWS, "state_memory": memory, "monitor": False}
    return Engine.load(model, tokenizer=tokenizer(template), dtype="float32", **options)


# ---- chats


def chats(engine: Engine, *, strips: bool, sessions: int, turns: int) -> tuple[list[Ask], list[int]]:
    """Hold conversations whose turns mix; returns their requests, and how many tokens of each hit.

    Prompts are rendered as ChatSession renders them: sampled ids stay, and the template decides where reasoning is
    shown. The text of a reply is given up to its last word, of which the model samples one of two.
    """
    rng = random.Random(5)
    template = ChatTemplate(engine.model.tokenizer, engine.model.stop_token_ids)
    histories = [Conversation([{"role": "system", "content": _said(rng, 150)}], {}) for _ in range(sessions)]
    order = [number for number in range(sessions) for _ in range(turns)]
    rng.shuffle(order)
    asks, hits = [], []
    for number in order:
        messages, said = histories[number]
        messages.append({"role": "user", "content": _said(rng, rng.randint(10, 60))})
        prompt = np.array(template.spliced(messages, said, keep_thinking=not strips), np.int32)
        message_end = template.reply_start(prompt)
        thoughts, answer = _said(rng, rng.randint(30, 90)), _said(rng, rng.randint(15, 60))
        reply = f"{thoughts}\n</think>\n\n{answer}" if strips else answer
        params = SamplingParams(temperature=0, max_tokens=1000, choice=(reply + " that", reply + " it"))
        done = engine.submit(prompt, params, reply_start=message_end).result()
        assert done.finish_reason == "stop", f"a reply of a chat ended by {done.finish_reason}"
        said[len(messages)] = done.token_ids
        messages.append({"role": "assistant", "content": done.text.rpartition("</think>")[2].lstrip()})
        with_kv = done.usage.cached_tokens + done.usage.computed_tokens - len(prompt)
        asks.append(Ask(number, prompt, message_end, np.array(done.token_ids[: with_kv + 1], np.int32)))
        hits.append(done.usage.cached_tokens)
    return asks, hits


class Conversation(NamedTuple):
    """The messages of a conversation, and the sampled ids of its replies by their positions."""

    messages: list[Message]
    said: dict[int, Sequence[int]]


def _said(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


# ---- time to the first token


def ttft(kind: str, *, rounds: int, tokens: int = 2048, share: float = 0.9) -> dict[str, Any]:
    """Time the first token of prompts of which nothing, or a share that ends at a snapshot, is cached, in turns."""
    rng = random.Random(6)
    hit = int(tokens * share)
    found: dict[str, list[float]] = {"cold_cpu": [], "hit_cpu": [], "cold": [], "hit": []}
    with load(kind, TEMPLATES["keeps replies"], 4) as engine:
        for _ in _warmed(rounds):
            engine.clear_cache()
            prefix = _ids(rng, hit)
            _first_token(engine, [*prefix, *_ids(rng, 9)], message_end=hit)
            for name, prompt, expected in (
                ("hit", [*prefix, *_ids(rng, tokens - hit)], hit),
                ("cold", _ids(rng, tokens), 0),
            ):
                cpu, seconds, cached = _first_token(engine, prompt)
                assert cached == expected, f"{cached} tokens hit instead of {expected}"
                found[name + "_cpu"].append(cpu)
                found[name].append(seconds)
        state = engine.model.state_bytes
    medians = {name + "_ms": round(statistics.median(times[1:]) * 1000, 1) for name, times in found.items()}
    return {"model": kind, "tokens": tokens, "hit_tokens": hit, "state_bytes": state, **medians}


def _warmed(rounds: int) -> Iterator[int]:
    """Count one round more, whose times the caller drops."""
    yield from range(rounds + 1)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB - 10) for _ in range(count)]


def _first_token(engine: Engine, prompt: list[int], message_end: int = 0) -> tuple[float, float, int]:
    """Return CPU seconds of the process, wall seconds, and the tokens that hit."""
    begin = time.process_time()
    params = SamplingParams(temperature=0, max_tokens=1)
    usage = engine.submit(prompt, params, reply_start=message_end).result().usage
    return time.process_time() - begin, usage.ttft_s, usage.cached_tokens
