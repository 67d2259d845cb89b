"""Stream to hundreds of clients of one `radixkv serve` at once: count lost or wrong replies, and the cost of HTTP.

    python benchmarks/http_load.py [--endpoint chat responses messages] [--clients 64 200] [--turns 3] [--save FILE]

Each endpoint is measured with each number of clients, against a server process of its own: `radixkv serve tiny --port 0
--quiet`. Each client is one connection with a conversation of its own after a system prompt that all share. It sends
the whole conversation at each turn, in the format of the endpoint, and reads the reply as a stream of events. Then as
many clients begin a long reply and disconnect in the middle of it. All clients live in this process.

First the same conversations run in this process on an `AsyncEngine`, all at once, without HTTP. Every client must get
the replies of these `chat` sessions, word for word, with the same number of prompt tokens.

  tokens/s      output tokens over wall time, of all clients together. On few cores the clients compete with the server.
  TTFT          from sending a request to its first text, and in process from submitting it.
  loop us/token CPU time of the thread that runs the event loop (the server's main thread, from /proc), over output
                tokens. With HTTP it reads bodies, counts tokens and writes events, about one for each token. The
                overhead of HTTP is the difference to the loop in process. Templates and tokenizers run on a second
                thread, the engine on a third one.

Replies of the conversations have about 11 tokens, so that a part of the overhead is the cost of a request. A second run
has one reply of 200 tokens for each client: its overhead is almost the cost of an event alone.

  call/text     CPU time of the loop for each event of a call's arguments, over the time for each event of a text.
                Both have 200 tokens and the same prompt with a tool, whose call is required or forbidden. The runs
                take turns, and the figure is the ratio of the medians. The bar is 1.15. Needs `radixkv[grammar]`.

(This file is not named `http.py`: the folder of a script comes first on Python's path, so `import http` would find it
in every script of this folder.)

The last line is one JSON object; the exit code is 1 if a reply is missing or wrong, or if the server has a running
request or a held block after all clients have disconnected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cpu_decode import cpu_name
from http_load_parts.connection import Connection
from http_load_parts.endpoints import ENDPOINTS, Endpoint, Message, Tokens
from http_load_parts.server import loop_seconds, metrics, served

from radixkv import AsyncEngine, SamplingParams

SYSTEM = """\
You are Mira, the assistant of the Harbor Shop in Lisbon.
Answer from this manual. Use a tool for the weather, for the stock, for orders and for large numbers.
The shop opens at 9 and closes at 18.
Delivery takes 3 days and costs 5 coins."""
NAMES = ("Sam", "Nora", "Ben", "Ana", "Tom", "Eva", "Max", "Lea")
CITIES = ("Oslo", "Paris", "Rome", "Lima", "Cairo")
LINES = (
    "My name is {name} and I live in {city}.",
    "Where do I live?",
    "What is my name?",
    "What is the capital of France?",
)
MOST = 200  # tokens of a reply
GREEDY = SamplingParams(temperature=0, max_tokens=MOST)
LONG = GREEDY.but(ignore_eos=True)
WRITE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}
ROUNDS = 5  # of calls and texts in turn
CANCELLED = 'radixkv:requests_ended_total{outcome="cancelled"}'


@dataclass
class Run:
    """The replies of some clients, in their order, and their cost."""

    answers: list[list[tuple[str, int]]] = field(default_factory=list)  # text and prompt tokens of each turn
    ttfts: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    loop_seconds: float = 0.0

    @property
    def row(self) -> dict[str, float]:
        """The figures of the run."""
        cuts = statistics.quantiles(self.ttfts, n=100)
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "ttft_p50_ms": round(cuts[49] * 1e3, 1),
            "ttft_p99_ms": round(cuts[98] * 1e3, 1),
            "loop_us_per_token": round(self.loop_seconds / self.tokens * 1e6, 1),
        }

    @property
    def long_row(self) -> dict[str, float]:
        """The figures of a run with long replies."""
        return {f"long_{key}": self.row[key] for key in ("tokens_per_s", "loop_us_per_token")}


def main() -> int:
    """Measure the endpoints with each number of clients; return the exit code."""
    options = _options()
    torch.set_num_threads(options.threads)
    print(f"{options.turns} turns of each client; {options.threads} thread(s) a model, {cpu_name()}")
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for clients in options.clients:
        own, own_long = asyncio.run(in_process(clients, options.turns)), asyncio.run(in_process(clients, 1, LONG))
        rows.append({"endpoint": "in process", "clients": clients, **own.row, **own_long.long_row})
        print(_line(rows[-1]))
        for name in options.endpoint:
            row, wrong = measure(name, clients, options, own, own_long)
            rows.append(row)
            print(_line(row))
            missed += wrong
    for line in missed:
        print(f"MISSED: {line}")
    machine = {"turns": options.turns, "threads": options.threads, "cpu": cpu_name(), "torch": torch.__version__}
    summary = {"benchmark": "http_load", "rows": rows, "missed": missed, **machine}
    if options.save:
        options.save.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 1 if missed else 0


def measure(
    name: str, clients: int, options: argparse.Namespace, own: Run, own_long: Run
) -> tuple[dict[str, Any], list[str]]:
    """Measure one endpoint against a new server; return its row, and each fault in words."""
    endpoint = ENDPOINTS[name]
    with served(options.threads) as (pid, url):
        run = asyncio.run(over_http(endpoint, pid, url, clients, options.turns))
        left = asyncio.run(leave_early(endpoint, url, clients))
        long = asyncio.run(over_http(endpoint, pid, url, clients, 1, ignore_eos=True))
        text, call = asyncio.run(event_costs(endpoint, pid, url, clients))
    overheads = {
        "overhead_us_per_token": run.row["loop_us_per_token"] - own.row["loop_us_per_token"],
        "long_overhead_us_per_token": long.row["loop_us_per_token"] - own_long.row["loop_us_per_token"],
    }
    row = {"endpoint": name, "clients": clients, **run.row, **long.long_row}
    row |= {key: round(overhead, 1) for key, overhead in overheads.items()}
    row |= {"text_us_per_event": round(text, 1), "call_us_per_event": round(call, 1), "call_ratio": call / text}
    slow = [f"an event of a call costs {call / text:.2f} times one of a text"] if call > 1.15 * text else []
    faults = [*_wrong(own, run), *left, *_wrong(own_long, long), *slow]
    return row, [f"{name}, {clients} clients: {fault}" for fault in faults]


def said(client: int, turn: int) -> str:
    """Return the message of a client at a turn."""
    return LINES[turn % len(LINES)].format(name=NAMES[client % len(NAMES)], city=CITIES[client % len(CITIES)])


# ---- without HTTP


async def in_process(clients: int, turns: int, params: SamplingParams = GREEDY) -> Run:
    """Run the same conversations as sessions of an engine in this process."""
    run = Run()

    async def one(engine: AsyncEngine, client: int) -> list[tuple[str, int]]:
        answers = []
        async with engine.chat(SYSTEM) as chat:
            for turn in range(turns):
                began, first = time.perf_counter(), None
                stream = await chat.stream(said(client, turn), params)
                async for chunk in stream:
                    first = first or (time.perf_counter() if chunk.text else None)
                reply = await stream.wait()
                run.ttfts.append((first or time.perf_counter()) - began)
                run.tokens += reply.usage.output_tokens
                answers.append((reply.text, reply.usage.prompt_tokens))
        return answers

    async with await AsyncEngine.load("tiny", monitor=False) as engine:
        await engine.generate([[1, 2, 3]], GREEDY.but(max_tokens=2))  # buffers are made with the first step
        began, loop_began = time.perf_counter(), time.thread_time()
        run.answers = await asyncio.gather(*(one(engine, client) for client in range(clients)))
        run.seconds, run.loop_seconds = time.perf_counter() - began, time.thread_time() - loop_began
    return run


# ---- with HTTP


async def over_http(endpoint: Endpoint, pid: int, url: str, clients: int, turns: int, **fields: Any) -> Run:
    """Run all clients at once, each on a connection of its own. `fields` are more options of the requests."""
    run = Run()

    async def one(client: int) -> list[tuple[str, int]]:
        answers = []
        messages: list[Message] = []
        async with await Connection.to(url) as connection:
            for turn in range(turns):
                messages.append({"role": "user", "content": said(client, turn)})
                began = time.perf_counter()
                text, tokens, first = await reply(endpoint, connection, messages, fields)
                run.ttfts.append(first - began)
                run.tokens += tokens.output
                answers.append((text, tokens.prompt))
                messages.append({"role": "assistant", "content": text})
        return answers

    async with await Connection.to(url) as warm:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
        assert [part async for part in warm.parts("POST", "/v1/completions", body)]
        began, loop_began = time.perf_counter(), loop_seconds(pid)
        run.answers = await asyncio.gather(*(one(client) for client in range(clients)))
        run.seconds, run.loop_seconds = time.perf_counter() - began, loop_seconds(pid) - loop_began
    return run


async def reply(
    endpoint: Endpoint, connection: Connection, messages: list[Message], fields: dict[str, Any]
) -> tuple[str, Tokens, float]:
    """Return the text of one streamed reply, its tokens, and when its first text arrived."""
    text, tokens, first = "", Tokens(0, 0, 0), None
    async for event in connection.events(endpoint, endpoint.body(SYSTEM, messages, MOST, temperature=0, **fields)):
        tokens = endpoint.tokens(event) or tokens
        text += endpoint.text(event)
        first = first or (time.perf_counter() if text else None)
    return text, tokens, first or time.perf_counter()


async def event_costs(endpoint: Endpoint, pid: int, url: str, clients: int) -> tuple[float, float]:
    """Return the CPU time of the loop in us for each event of long texts, and of calls with long arguments."""

    async def one(client: int, required: bool) -> int:
        tools = endpoint.tools("write", WRITE, required=required)
        messages = [{"role": "user", "content": said(client, 0)}]
        body = endpoint.body(SYSTEM, messages, MOST, temperature=0, ignore_eos=not required, **tools)
        shown = endpoint.arguments if required else endpoint.text
        async with await Connection.to(url) as connection:
            return sum([bool(shown(event)) async for event in connection.events(endpoint, body)])

    costs: dict[bool, list[float]] = {False: [], True: []}
    for required in (False, True) * ROUNDS:
        began = loop_seconds(pid)
        events = sum(await asyncio.gather(*(one(client, required) for client in range(clients))))
        assert events > clients * MOST * 0.8, "not every token is an event"
        costs[required].append((loop_seconds(pid) - began) / events * 1e6)
    return statistics.median(costs[False]), statistics.median(costs[True])


async def leave_early(endpoint: Endpoint, url: str, clients: int) -> list[str]:
    """Begin a long reply, disconnect after its third text, and check that the server frees the request."""

    async def one(client: int) -> None:
        messages = [{"role": "user", "content": said(client, 0)}]
        texts = 0
        async with await Connection.to(url) as connection:
            async for event in connection.events(endpoint, endpoint.body(SYSTEM, messages, 2000, ignore_eos=True)):
                texts += bool(endpoint.text(event))
                if texts == 3:
                    return
        raise RuntimeError("a reply ended before its third text")

    before = (await metrics(url)).get(CANCELLED, 0)
    await asyncio.gather(*(one(client) for client in range(clients)))
    for _ in range(200):
        numbers = await metrics(url)
        busy = numbers['radixkv:requests{state="running"}'] + numbers['radixkv:requests{state="waiting"}']
        if not busy:
            break
        await asyncio.sleep(0.05)
    held, failed = numbers['radixkv:blocks{state="held"}'], numbers['radixkv:requests_ended_total{outcome="failed"}']
    gone = numbers.get(CANCELLED, 0) - before
    print(f"{clients} clients left in the middle: {gone:.0f} cancelled, {held:.0f} blocks held, {busy:.0f} running")
    checks = {f"{busy:.0f} requests run on": busy, f"{held:.0f} blocks are held": held, f"{failed:.0f} failed": failed}
    return [
        *(fault for fault, count in checks.items() if count),
        *(["not all were cancelled"] if gone != clients else []),
    ]


# ---- results


def _wrong(own: Run, http: Run) -> list[str]:
    """Return the turns whose reply differs from that of the session in process."""
    found = []
    for client, pair in enumerate(zip(own.answers, http.answers, strict=True)):
        for turn, (wanted, got) in enumerate(zip(*pair, strict=True)):
            if wanted != got:
                found.append(f"client {client}, turn {turn}: {got} instead of {wanted}")
    return found[:10]


def _line(row: dict[str, Any]) -> str:
    times = f"TTFT {row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms"
    loop = f"loop {row['loop_us_per_token']:.0f} us/token"
    overhead = row.get("overhead_us_per_token")
    cost = "" if overhead is None else f", HTTP {overhead:.0f} us/token"
    long = row.get("long_overhead_us_per_token")
    cost += f"; long replies: loop {row['long_loop_us_per_token']:.0f}"
    cost += "" if long is None else f", HTTP {long:.0f}; call/text {row['call_ratio']:.2f}"
    return f"{row['clients']:4} x {row['endpoint']:12}{row['tokens_per_s']:8.0f} tokens/s  {times}  {loop}{cost}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", nargs="+", choices=list(ENDPOINTS), default=list(ENDPOINTS))
    parser.add_argument("--clients", nargs="+", type=int, default=[64, 200])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="for the model's forward")
    parser.add_argument("--save", type=Path, help="write all figures to a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
