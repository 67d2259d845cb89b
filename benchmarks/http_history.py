"""Measure the cache hits of a client that keeps the conversation itself, with the server's index and without.

    python benchmarks/http_history.py [--turns 12] [--conversations 4] [--save FILE]

A client of an OpenAI-compatible server sends the whole conversation with each request. Without an index every message
goes through the chat template and the tokenizer again ("naive"), and a hit ends at the first token that differs from
the computed ones. With an index (radixkv/serve/conversations.py) the server keeps the ids of its own replies. It
appends new messages to them ("append"), or renders the template around them ("template"). "auto", the default of the
server, appends unless the template leaves out the thinking of earlier turns.

Two workloads: `chat`, turns of a user and an assistant, and `agent`, two turns of a user in which each reply calls a
tool until half of the turns are over. Clients send back content and tool calls but no thinking, as OpenAI's own client
does.

  bundled    The bundled model, greedy and at temperature 1.5, which spells words in more than one way.
  scripted   Fixed replies, spelled as an encoder spells them, on an engine without a model, so that only rendering can
             lose hits. `ChatML` renders a turn as it was. `thinking, kept` is the same for a model that thinks and a
             client that does not send its thinking back. `Qwen-like` is a template that strips the thinking of earlier
             turns itself. `Mistral-like` puts system prompt and tools into the last turn of the user.

For each: the share of all prompt tokens that were hits; of the tokens that the engine held of this conversation when
the request came, the share that was not hit ("lost"); and the number of computed tokens per request. Appended messages
can be longer than the rendering of the template (Mistral-like: the tools once a turn), so the last figure counts.

The last line is one JSON object; the exit code is 1 if appending loses more than 2%, or "auto" more than "naive".
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import radixkv

sys.path.insert(0, str(Path(__file__).parent.parent))  # the engine without a model, and the templates, are the tests'

from radixkv import Completion, Engine, SamplingParams
from radixkv.serve.conversations import Conversations, Mode
from radixkv.serve.reply import ReplyReader
from tests.engine.fakes import FakeModel, make_engine
from tests.serve.styles import MISTRAL, QWEN

SYSTEM = "You are a careful assistant. " + "Answer from what you were told, and say so if you were not. " * 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look {name} up and say what was found there.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
    for name in ("check_stock", "get_weather", "find_order", "read_page")
]
WORDS = re.findall(r"\w+", "the lamp costs nine coins and stands on a shelf in the harbor where it rains on tuesdays")
LINES = (
    "Hello! My name is Sam.",
    "I live in Oslo.",
    "What is my name?",
    "What is the capital of France?",
    "What is three plus four?",
    "My favorite color is blue.",
    "What is the opposite of hot?",
    "Where do I live?",
    "What does a cow say?",
    "What is my favorite color?",
    "Which day comes after Monday?",
    "Tell me everything you know about me.",
)
MODES = ("naive", "auto", "append", "template")
Ask = Callable[[Any, SamplingParams, str], Completion]  # ids, params, the text of a scripted reply


@dataclass
class Found:
    """Tokens, added up over requests."""

    prompt: int = 0
    cached: int = 0
    held: int = 0
    lost: int = 0
    requests: int = 0

    @property
    def row(self) -> dict[str, float]:
        return {
            "share": round(self.cached / self.prompt, 4),
            "lost": round(self.lost / self.held, 4) if self.held else 0.0,
            "computed": round((self.prompt - self.cached) / self.requests, 1),
        }


class Puppet:
    """An engine with fixed replies and a real cache."""

    def __init__(self, template: str | None) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(Path(radixkv.__file__).parent / "assets" / "tiny")
        tokenizer.chat_template = template or tokenizer.chat_template
        self.tokenizer, self._begin, self._reply = tokenizer, 0, [0]
        model = FakeModel(tokenizer, len(tokenizer), 100_000, frozenset({tokenizer.eos_token_id}))
        self.engine, _ = make_engine(8000, 16, model=model, brain=self._next)

    def _next(self, tokens: list[int]) -> int:
        return self._reply[min(max(len(tokens) - self._begin, 0), len(self._reply) - 1)]

    def ask(self, ids: Any, params: SamplingParams, text: str) -> Completion:
        self._begin = len(ids)
        self._reply = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return self.engine.generate([ids], params, namespace="x")[0]


def main() -> int:
    options = _options()
    print(f"{options.conversations} conversations of {options.turns} turns, each; prompt tokens from the cache")
    print(f"{'':34}" + "".join(f"{mode:>24}" for mode in MODES))
    print(f"{'':34}" + "".join(f"{'share':>8}{'lost':>7}{'computed':>9}" for _ in MODES))
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, rows in _measured(options):
        result[name] = rows
        print(
            f"{name:34}"
            + "".join(f"{row['share']:8.1%}{row['lost']:7.1%}{row['computed']:9.1f}" for row in rows.values())
        )
    missed = [f"{name}: lost by appending" for name, rows in result.items() if rows["append"]["lost"] > 0.02]
    for name, rows in result.items():
        if rows["auto"]["lost"] > rows["naive"]["lost"]:
            missed.append(f"{name}: more lost than the naive way loses")
    for name in missed:
        print(f"MISSED: {name}")
    if options.save:
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"benchmark": "http_history", "results": result, "missed": missed}))
    return 1 if missed else 0


def _measured(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    for temperature in (0.0, 1.5):
        with Engine.load("tiny", num_blocks=8000, monitor=False) as engine:

            def ask(ids: Any, params: SamplingParams, _: str, engine: Engine = engine) -> Completion:
                return engine.generate([ids], params, namespace="x")[0]

            yield f"bundled, temperature {temperature:g}, chat", _modes(engine, ask, "chat", options, temperature)
    styles: dict[str, tuple[str | None, bool]] = {
        "ChatML": (None, False),
        "thinking, kept": (None, True),
        "thinking, Qwen-like": (QWEN, True),
        "Mistral-like": (MISTRAL, False),
    }
    for name, (template, thinks) in styles.items():
        for workload in ("chat", "agent"):
            puppet = Puppet(template)
            with puppet.engine:
                yield f"{name}, {workload}", _modes(puppet.engine, puppet.ask, workload, options, 0.0, thinks)


def _modes(
    engine: Engine, ask: Ask, workload: str, options: argparse.Namespace, temperature: float, thinks: bool = False
) -> dict[str, dict[str, float]]:
    """Each mode on a cache that is empty at first; the same seeds, so that replies differ only with their prompts."""
    rows = {}
    for mode in MODES:
        engine.clear_cache()
        found = Found()
        way: Mode = "auto" if mode == "naive" else mode  # type: ignore[assignment]
        capacity = 0 if mode == "naive" else 1 << 30
        told = Conversations(engine.model.tokenizer, engine.model.stop_token_ids, capacity, way)
        for number in range(options.conversations):
            converse(told, ask, workload, options.turns, random.Random(number), temperature, thinks, found)
        rows[mode] = found.row
    return rows


def converse(
    told: Conversations,
    ask: Ask,
    workload: str,
    turns: int,
    rng: random.Random,
    temperature: float,
    thinks: bool,
    found: Found,
) -> None:
    """One conversation, as a client that keeps it holds it."""
    tools = TOOLS if workload == "agent" else None
    messages: list[Any] = [{"role": "system", "content": f"Conversation {rng.random()}. {SYSTEM}"}]
    held = 0
    for turn in range(turns):
        calls = workload == "agent" and turn % (turns // 2) != turns // 2 - 1
        if workload == "chat" or turn % (turns // 2) == 0:
            messages.append({"role": "user", "content": LINES[turn % len(LINES)]})
        prompt = told.prompt("x", messages, tools)
        params = SamplingParams(temperature=temperature, seed=rng.getrandbits(30), max_tokens=200)
        reply = ask(prompt.ids, params, scripted(rng, thinks, calls))
        found.prompt += len(prompt.ids)
        found.cached += reply.usage.cached_tokens
        found.held += held
        found.lost += max(held - reply.usage.cached_tokens, 0)
        found.requests += 1
        held = len(prompt.ids) + len(reply.token_ids) - 1
        reader = ReplyReader(reads_calls=bool(tools), thinking=False)
        reader.push(reply.text)
        reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": reader.content}
        if reader.calls:
            message["tool_calls"] = [call.as_message() for call in reader.calls]
        told.remember(
            prompt, message | ({"reasoning_content": reader.thinking} if reader.thinking else {}), reply.token_ids
        )
        messages.append(message)
        messages += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": json.dumps({"found": said(rng, 25)}),
            }
            for call in reader.calls
        ]


def scripted(rng: random.Random, thinks: bool, calls: bool) -> str:
    """A reply of a model: some thinking, then an answer or a call."""
    thinking = f"<think>\n{said(rng, 40)}\n</think>\n\n" if thinks else ""
    if not calls:
        return thinking + said(rng, 25)
    call = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": {"item": said(rng, 2)}}
    return f"{thinking}<tool_call>\n{json.dumps(call)}\n</tool_call>"


def said(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--save", type=Path, help="write all figures to a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
