"""A fleet on this machine: a frontend and workers as processes, on loopback, with ports that the system chose."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

DEADLINE = 120.0  # seconds for anything that must happen
LOOPBACK = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1")


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Wait for a condition; return its value."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def low_port() -> int:
    """A free port below 32,768: Dynamo reads DYN_SYSTEM_PORT as a number of 16 bits with a sign."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as each, suppress(OSError):
            each.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no low port is free")


@dataclass
class Process:
    """A process of its own group, whose output goes to a file."""

    popen: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def ended(self, seconds: float = DEADLINE) -> int:
        """Wait for the end; return the status."""
        return self.popen.wait(seconds)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def instance(self) -> int | None:
        """The number of a worker in the fleet, None before it has one."""
        found = re.search(r" is worker (\d+)", self.output)
        return int(found[1]) if found else None


@dataclass
class Reply:
    """What a client has seen of one streamed reply."""

    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    worker: int | None = None
    overlap: float = 0.0  # the share of the prompt's blocks that the router believed to be cached
    error: Any = None
    arrivals: list[float] = field(default_factory=list)

    def take(self, data: dict[str, Any]) -> None:
        self.chunks.append(data)
        self.arrivals.append(time.monotonic())
        self.error = self.error or (data if "choices" not in data else None)
        self.usage = data.get("usage") or self.usage
        extra = data.get("nvext") or {}
        self.worker = (extra.get("worker_id") or {}).get("decode_worker_id", self.worker)
        self.overlap = (extra.get("timing") or {}).get("kv_hit_rate", self.overlap)
        for choice in data.get("choices", []):
            self.text += choice["delta"].get("content") or ""
            self.logprobs += (choice.get("logprobs") or {}).get("content") or []
            self.finish = choice.get("finish_reason") or self.finish


class Fleet:
    """One folder of discovery, and the processes that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: list[Process] = []
        self.environment = {**os.environ, **LOOPBACK, "DYN_FILE_KV": str(folder / "discovery"), "OMP_NUM_THREADS": "1"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, *command: str, **environment: str) -> Process:
        """Run a module."""
        return self.run(name, "-m", *command, **environment)

    def run(self, name: str, *command: str, **environment: str) -> Process:
        """Run Python with these arguments."""
        return self.spawn(name, sys.executable, *command, **environment)

    def spawn(self, name: str, *command: str, **environment: str) -> Process:
        """Run a program."""
        log = self.folder / f"{name}-{len(self.processes)}.log"
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**self.environment, **environment},
            )
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def worker(self, *options: str, model: str = "tiny", **environment: str) -> Process:
        """Start a worker; `joined` waits until it serves."""
        return self.start("worker", "radixkv", "worker", model, "--discovery-backend", "file", *options, **environment)

    def frontend(self, *options: str, **environment: str) -> Process:
        """Start a frontend that routes by cached prefix and moves streams."""
        plane = ("--discovery-backend", "file", "--event-plane", "zmq", "--migration-limit", "3")
        where = ("--http-host", "127.0.0.1", "--http-port", str(self.port))
        mode = () if "--router-mode" in options else ("--router-mode", "kv")
        return self.start(
            "frontend", "dynamo.frontend", *where, *mode, *plane, "--enable-anthropic-api", *options, **environment
        )

    def instances(self) -> set[int]:
        """The workers that the frontend knows."""
        try:
            found = httpx.get(f"{self.url}/health", timeout=10).json()
        except httpx.HTTPError:
            return set()
        return {each["instance_id"] for each in found.get("instances", []) if each["endpoint"] == "generate"}

    def models(self) -> list[str]:
        try:
            return [each["id"] for each in httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"]]
        except httpx.HTTPError:
            return []

    def joined(self, *workers: Process) -> None:
        """Wait until the frontend knows these workers."""

        def known() -> bool:
            for each in workers:
                assert each.popen.poll() is None, each.output[-3000:]
            return {each.instance for each in workers} <= self.instances() and bool(self.models())

        until(known, "the frontend knows the workers")

    def stream(
        self, content: Any, tokens: int = 40, on_chunk: Callable[[Reply], object] = lambda _: None, **more: Any
    ) -> Reply:
        """Send a greedy chat, and read its stream to the end; `on_chunk` is called for each chunk."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {
            "model": "tiny",
            "messages": messages,
            "stream": True,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
            "stream_options": {"include_usage": True},
            **more,
        }
        reply = Reply()
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=DEADLINE) as response:
            if response.status_code != 200:
                reply.error = (response.status_code, response.read().decode())
            for line in response.iter_lines() if reply.error is None else ():
                if line.startswith("data: ") and not line.endswith("[DONE]"):
                    reply.take(json.loads(line[6:]))
                    on_chunk(reply)
                elif line.startswith("event: error"):
                    reply.error = reply.error or line
        return reply

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": "tiny", **body}, timeout=DEADLINE)

    def close(self) -> None:
        """Kill all processes, each by its own id."""
        for each in self.processes:
            if each.popen.poll() is None:
                each.popen.send_signal(signal.SIGCONT)
                each.popen.kill()
        for each in self.processes:
            each.popen.wait()


@contextmanager
def fleet(folder: Path, workers: int = 0, *options: str) -> Iterator[Fleet]:
    """A frontend and some workers of the bundled model, which serve."""
    made = Fleet(folder)
    try:
        made.frontend()
        made.joined(*[made.worker(*options) for _ in range(workers)])
        yield made
    finally:
        made.close()
