"""Stream to hundreds of clients of one `radixkv serve` at once: count lost or wrong replies, and the cost of HTTP.

    python benchmarks/http_load.py [--clients 200] [--turns 3] [--threads 1] [--save FILE]

The server is a separate process, `radixkv serve tiny --port 0`. Each client is one connection with a conversation of
its own after a system prompt that all share. It sends the whole conversation at each turn, and reads the reply as a
stream of events. Then as many clients begin a long reply and disconnect in the middle of it. All clients live in this
process.

First the same conversations run in this process on an `AsyncEngine`, all at once, without HTTP. Every client must get
the replies of these `chat` sessions, word for word, with the same number of prompt tokens.

  tokens/s      output tokens over wall time, of all clients together. On few cores the clients compete with the server.
  TTFT          from sending a request to its first text, and in process from submitting it.
  loop us/token CPU time of the thread that runs the event loop (the server's main thread, from /proc), over output
                tokens. With HTTP it reads bodies, counts tokens and writes events. The overhead of HTTP is the
                difference to the loop in process. Templates and tokenizers run on a second thread, the engine on a
                third one.

(This file is not named `http.py`: the folder of a script comes first on Python's path, so `import http` would find it
in every script of this folder.)

The last line is one JSON object; the exit code is 1 if a reply is missing or wrong, or if the server has a running
request or a held block after all clients have disconnected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from cpu_decode import cpu_name

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
GREEDY = SamplingParams(temperature=0, max_tokens=200)
CLOCK = os.sysconf("SC_CLK_TCK")


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
        cuts = statistics.quantiles(self.ttfts, n=100)
        return {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "ttft_p50_ms": round(cuts[49] * 1e3, 1),
            "ttft_p99_ms": round(cuts[98] * 1e3, 1),
            "loop_us_per_token": round(self.loop_seconds / self.tokens * 1e6, 1),
        }


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    print(f"{options.clients} clients, {options.turns} turns each; {options.threads} thread(s) a model, {cpu_name()}")
    own = asyncio.run(in_process(options.clients, options.turns))
    print(_line("in process", own))
    with served(options.threads) as (pid, url):
        served_run = asyncio.run(over_http(pid, url, options.clients, options.turns))
        print(_line("over HTTP", served_run))
        left = asyncio.run(leave_early(url, options.clients))
    overhead = served_run.row["loop_us_per_token"] - own.row["loop_us_per_token"]
    print(f"HTTP costs {overhead:.0f} us a token on the server's event loop")
    missed = [*_wrong(own, served_run), *left]
    for line in missed:
        print(f"MISSED: {line}")
    result = {"in_process": own.row, "http": served_run.row, "overhead_us_per_token": round(overhead, 1)}
    machine = {"clients": options.clients, "turns": options.turns, "threads": options.threads, "cpu": cpu_name()}
    summary = {"benchmark": "http_load", **result, "missed": missed, **machine, "torch": torch.__version__}
    if options.save:
        options.save.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 1 if missed else 0


def said(client: int, turn: int) -> str:
    return LINES[turn % len(LINES)].format(name=NAMES[client % len(NAMES)], city=CITIES[client % len(CITIES)])


# ---- without HTTP


async def in_process(clients: int, turns: int) -> Run:
    """The same conversations as sessions of an engine in this process."""
    run = Run()

    async def one(engine: AsyncEngine, client: int) -> list[tuple[str, int]]:
        answers = []
        async with engine.chat(SYSTEM) as chat:
            for turn in range(turns):
                began, first = time.perf_counter(), None
                stream = await chat.stream(said(client, turn), GREEDY)
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


@contextmanager
def served(threads: int) -> Iterator[tuple[int, str]]:
    """Yield the process id and the address of a server; print its log after an error."""
    command = [sys.executable, "-m", "radixkv", "serve", "tiny", "--port", "0", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RADIXKV_MONITOR": "0"}
    with tempfile.TemporaryFile("a+") as log:
        server = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield server.pid, _address(server, log)
            server.send_signal(signal.SIGTERM)
            if server.wait(60):
                raise RuntimeError(f"the server ended with status {server.returncode}")
        except BaseException:
            print(f"the server logged:\n{_logged(log)}", file=sys.stderr)
            raise
        finally:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: TextIO) -> str:
    while server.poll() is None:
        if found := re.search(r"http://[^ ]+(?=/v1)", _logged(log)):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: exit status {server.returncode}")


def _logged(log: TextIO) -> str:
    log.seek(0)
    return log.read()


class Connection:
    """The connection of one client, kept for all its requests. It handles bytes only, since the clients share a core
    with the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> Connection:
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[bytes]:
        """The body of the response, as it comes; raises RuntimeError unless the status is 200."""
        sent = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        self._writer.write(head.encode() + sent)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        parts = self._parts(headers)
        if " 200 " not in f"{status} ":
            raise RuntimeError(f"{status}: {b''.join([part async for part in parts])!r}")
        async for part in parts:
            yield part

    async def _parts(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def over_http(pid: int, url: str, clients: int, turns: int) -> Run:
    """All clients at once, each on a connection of its own."""
    run = Run()

    async def one(client: int) -> list[tuple[str, int]]:
        answers = []
        connection = await Connection.to(url)
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            messages.append({"role": "user", "content": said(client, turn)})
            began = time.perf_counter()
            text, usage, first = await reply(connection, messages)
            run.ttfts.append(first - began)
            run.tokens += usage["completion_tokens"]
            answers.append((text, usage["prompt_tokens"]))
            messages.append({"role": "assistant", "content": text})
        await connection.close()
        return answers

    warm = await Connection.to(url)
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
    assert [part async for part in warm.ask("POST", "/v1/completions", body)]
    began, loop_began = time.perf_counter(), loop_seconds(pid)
    run.answers = await asyncio.gather(*(one(client) for client in range(clients)))
    run.seconds, run.loop_seconds = time.perf_counter() - began, loop_seconds(pid) - loop_began
    await warm.close()
    return run


async def reply(connection: Connection, messages: list[dict[str, str]]) -> tuple[str, dict[str, int], float]:
    """The text of one streamed reply, its usage, and when its first text came; raises for an error in the stream."""
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 200, "stream": True}
    text, usage, first = "", {}, None
    async for event in events(connection, body | {"stream_options": {"include_usage": True}}):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            first = first or (time.perf_counter() if text else None)
    return text, usage, first or time.perf_counter()


async def leave_early(url: str, clients: int) -> list[str]:
    """Begin a long reply, disconnect after its third text, and check that the server frees the request."""

    async def one(client: int) -> None:
        messages = [{"role": "user", "content": said(client, 0)}]
        body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 2000, "ignore_eos": True}
        connection, texts = await Connection.to(url), 0
        async for event in events(connection, body):
            texts += bool(event["choices"][0]["delta"].get("content"))
            if texts == 3:
                break
        await connection.close()

    await asyncio.gather(*(one(client) for client in range(clients)))
    for _ in range(200):
        numbers = await metrics(url)
        busy = numbers['radixkv:requests{state="running"}'] + numbers['radixkv:requests{state="waiting"}']
        if not busy:
            break
        await asyncio.sleep(0.05)
    held, failed = numbers['radixkv:blocks{state="held"}'], numbers['radixkv:requests_ended_total{outcome="failed"}']
    gone = numbers['radixkv:requests_ended_total{outcome="cancelled"}']
    print(f"{clients} clients left in the middle: {gone:.0f} cancelled, {held:.0f} blocks held, {busy:.0f} running")
    checks = {f"{busy:.0f} requests run on": busy, f"{held:.0f} blocks are held": held, f"{failed:.0f} failed": failed}
    return [
        *(what for what, count in checks.items() if count),
        *(["not all were cancelled"] if gone != clients else []),
    ]


async def events(connection: Connection, body: Any) -> AsyncIterator[Any]:
    """Parse a stream of events. A server may put several events into one part, but never one into two."""
    ended = False
    async for part in connection.ask("POST", "/v1/chat/completions", body):
        for line in part.decode().splitlines():
            if line == "data: [DONE]":
                ended = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"the stream ended with an error: {event['error']}")
                yield event
    if not ended:
        raise RuntimeError("a stream ended without [DONE]")


async def metrics(url: str) -> dict[str, float]:
    connection = await Connection.to(url)
    body = b"".join([part async for part in connection.ask("GET", "/metrics")]).decode()
    await connection.close()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in body.splitlines() if line[0] != "#"}


def loop_seconds(pid: int) -> float:
    """CPU seconds of a process's main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


# ---- results


def _wrong(own: Run, http: Run) -> list[str]:
    """Which clients got something else than a session got."""
    found = []
    for client, pair in enumerate(zip(own.answers, http.answers, strict=True)):
        for turn, (wanted, got) in enumerate(zip(*pair, strict=True)):
            if wanted != got:
                found.append(f"client {client}, turn {turn}: {got} instead of {wanted}")
    return found[:10]


def _line(name: str, run: Run) -> str:
    row = run.row
    times = f"TTFT {row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms"
    return f"{name:12} {row['tokens_per_s']:8.0f} tokens/s  {times}  loop {row['loop_us_per_token']:.0f} us/token"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="for the model's forward")
    parser.add_argument("--save", type=Path, help="write all figures to a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
