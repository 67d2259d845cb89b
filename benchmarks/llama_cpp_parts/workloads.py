"""Define the work of each row of benchmarks/llama_cpp.py, and measure it on the processes of one engine.

Prompts are token ids, tokenized once and sent to both engines. Each engine continues its own replies, which have a
fixed length and do not end with the text.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .worker import Side, Worker

LICENSE = Path(__file__).parents[2] / "LICENSE"
"""The text of prompts: English, and always the same."""
QUESTIONS = (
    "What is the capital of France?",
    "Which river flows through it?",
    "How long is that river, roughly?",
    "Name three museums of the city.",
    "Which one should I visit first, and why?",
    "How do I get there from the main station?",
    "What does a ticket for the metro cost?",
    "Where can I eat well for little money?",
    "What is a typical breakfast there?",
    "Which sights are free?",
    "Write one sentence about the weather in May.",
    "What should I pack for three days?",
    "Is the city safe to walk at night?",
    "Which words of French should I learn first?",
    "How do I say thank you, and how do I say goodbye?",
    "Name a day trip that takes an hour by train.",
    "What is there to see?",
    "Which book about the city would you read first?",
    "Who wrote it, and when?",
    "Sum up your advice in two sentences.",
)
TASKS = (
    "List the duties of a person who redistributes the work.",
    "Explain in plain words what a contribution is.",
    "Which rights end if somebody starts a patent claim?",
    "May the name of the licensor be used in advertising?",
    "What must a NOTICE file contain?",
    "Who is liable for damages, according to this text?",
    "Is it allowed to charge a fee for support?",
    "Describe how to apply the license to new work.",
)
STREAMS = 8
THREADS = {"cpu": 1, "wall": 2}
"""The clocks, and the threads that each of them measures."""


@dataclass(frozen=True)
class Sizes:
    """How much each row does: tokens of a prompt, of a reply and of a shared prefix, turns, prompts to prefill."""

    prefill: int = 512
    prefills: int = 3
    decode: int = 64
    stream_prompt: int = 256
    turns: int = 20
    reply: int = 32
    shared: int = 2048
    context: int = 4096

    @property
    def stream_context(self) -> int:
        """Tokens of one of eight streams, in whole 256, by which llama.cpp allocates them."""
        longest = max(self.shared + 128 + self.reply, self.stream_prompt + self.decode)
        return -(-longest // 256) * 256


QUICK = Sizes(prefill=64, prefills=1, decode=4, stream_prompt=16, turns=3, reply=4, shared=64, context=512)


@dataclass(frozen=True)
class Work:
    """The prompts of every row, in token ids."""

    sizes: Sizes
    prefills: list[list[int]]
    streams: list[list[int]]
    turns: list[list[int]]
    agents: list[list[int]]

    @classmethod
    def of(cls, sizes: Sizes, text: list[int], turns: list[list[int]], tasks: list[list[int]]) -> Work:
        """Cut the prompts out of the text. Those of a row that is not about sharing differ in their first tokens."""
        text = text * (1 + (sizes.shared + 64 * STREAMS) // len(text))

        def windows(count: int, length: int, start: int) -> list[list[int]]:
            return [text[start + 32 * each :][:length] for each in range(count)]

        return cls(
            sizes,
            windows(sizes.prefills, sizes.prefill, 1),
            windows(STREAMS, sizes.stream_prompt, 17),
            turns[: sizes.turns],
            [text[: sizes.shared] + task for task in tasks],
        )


def texts(worker: Worker) -> list[str]:
    """All texts that are tokenized: the prompts' text, the turns of the chat, the tasks. `worker` is ours."""
    turns = worker.ask("render", questions=list(QUESTIONS))["texts"]
    return [LICENSE.read_text(), *turns, *(f"\n\n{task}" for task in TASKS)]


def work_of(sizes: Sizes, ids: list[list[int]]) -> Work:
    """The work in the token ids of `texts`."""
    text, *others = ids
    return Work.of(sizes, text, others[: len(QUESTIONS)], others[len(QUESTIONS) :])


# ---- rows


@dataclass(frozen=True)
class Row:
    """A row of the table; less is better. `clocks` are those by which it is measured."""

    title: str
    unit: str
    clocks: tuple[str, ...] = ("cpu", "wall")


ROWS = {
    "load": Row("start, load, first token", "s"),
    "prefill": Row("prefill, per token", "ms"),
    "decode_1": Row("decode, 1 stream, per token", "ms"),
    "decode_8": Row("decode, 8 streams, per token", "ms"),
    "chat_ttft": Row("chat, median TTFT", "ms"),
    "chat_total": Row("chat, all turns", "s"),
    "agents_ttft": Row("8 agents, median TTFT", "ms"),
    "agents_total": Row("8 agents, total", "s"),
    "peak_mb": Row("peak memory, load and chat", "MB", ("cpu",)),
}


@dataclass(frozen=True)
class Measured:
    """The figures of two processes of one engine.

    `rows` has a number for each row, `replies` the token ids to compare, `computed` the tokens that ran through the
    model in the chat and for the agents. `others` are the cores that other programs kept busy meanwhile; None where
    the system has no such figure.
    """

    rows: dict[str, float]
    replies: list[list[int]]
    computed: dict[str, int]
    others: float | None


def measure(side: Side, model: str, work: Work, clock: str) -> Measured:
    """Run every row once, in two new processes: one stream, then eight. Raises WorkerError."""
    sizes, threads = work.sizes, THREADS[clock]
    busy, began, own = busy_s(), time.perf_counter(), time.process_time()
    with side.start(model, threads=threads, streams=1, context=sizes.context) as worker:
        rows, replies, chat = _one_stream(worker, work, clock)
        own -= worker.ask("usage")["cpu_s"]
    with side.start(model, threads=threads, streams=STREAMS, context=sizes.stream_context) as worker:
        more, further, agents = _eight_streams(worker, work, clock)
        own -= worker.ask("usage")["cpu_s"]
    others = None
    if busy is not None and (now := busy_s()) is not None:
        ours = time.process_time() - own
        others = max(0.0, (now - busy - ours) / (time.perf_counter() - began))
    return Measured(rows | more, replies + further, {"chat": chat, "agents": agents}, others)


def _one_stream(worker: Worker, work: Work, clock: str) -> tuple[dict[str, float], list[list[int]], int]:
    sizes, first = work.sizes, work.turns[0]
    worker.ask("generate", prompts=[first[:8]], tokens=1)
    wall_s = time.perf_counter() - worker.started
    rows = {"load": worker.ask("usage")["cpu_s"] if clock == "cpu" else wall_s}
    history: list[int] = []
    answers, computed = [], 0
    for turn in work.turns:
        answers.append(worker.ask("generate", prompts=[history + turn], tokens=sizes.reply))
        history += turn + answers[-1]["replies"][0]
        computed += answers[-1]["computed"]
    rows["chat_ttft"] = statistics.median(answer["first"][0][f"{clock}_ms"] for answer in answers)
    rows["chat_total"] = sum(answer["total"][f"{clock}_ms"] for answer in answers) / 1e3
    rows["peak_mb"] = worker.ask("usage")["peak_mb"]
    prefills = [worker.ask("generate", prompts=[prompt], tokens=1) for prompt in work.prefills]
    rows["prefill"] = statistics.median(answer["total"][f"{clock}_ms"] for answer in prefills) / sizes.prefill
    per_token, decoded = _decode(worker, work.prefills[-1:], sizes.decode, clock)
    rows["decode_1"] = per_token
    return rows, [*answers[0]["replies"], *decoded], computed


def _eight_streams(worker: Worker, work: Work, clock: str) -> tuple[dict[str, float], list[list[int]], int]:
    worker.ask("generate", prompts=[work.turns[0]], tokens=1)  # warm up
    per_token, decoded = _decode(worker, work.streams, work.sizes.decode, clock)
    agents = worker.ask("generate", prompts=work.agents, tokens=work.sizes.reply)
    rows = {
        "decode_8": per_token,
        "agents_ttft": statistics.median(first[f"{clock}_ms"] for first in agents["first"]),
        "agents_total": agents["total"][f"{clock}_ms"] / 1e3,
    }
    return rows, decoded, agents["computed"]


def _decode(worker: Worker, prompts: list[list[int]], tokens: int, clock: str) -> tuple[float, list[list[int]]]:
    """Milliseconds a token and stream after the prompts, and the replies. The prompts are computed beforehand."""
    begun = worker.ask("generate", prompts=prompts, tokens=1)["replies"]
    grown = [prompt + reply for prompt, reply in zip(prompts, begun, strict=True)]
    answer = worker.ask("generate", prompts=grown, tokens=tokens)
    replies = [first + rest for first, rest in zip(begun, answer["replies"], strict=True)]
    return answer["total"][f"{clock}_ms"] / (tokens * len(prompts)), replies


def busy_s() -> float | None:
    """CPU seconds of all programs on this machine since it started; None where the system has no such figure."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def calibrate(side: Side, choices: dict[str, dict[str, Any]], model: str, work: Work) -> dict[str, float]:
    """CPU milliseconds of a prefill and a decode under each of the settings. Raises WorkerError."""
    found = {}
    for name, settings in choices.items():
        with replace(side, settings=settings).start(model, threads=1, streams=1, context=work.sizes.context) as worker:
            worker.ask("generate", prompts=[work.turns[0]], tokens=1)  # warm up
            answer = worker.ask("generate", prompts=work.prefills[:1], tokens=work.sizes.decode)
            found[name] = answer["total"]["cpu_ms"]
    return found
