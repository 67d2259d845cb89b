"""Run llama.cpp's server as a peer: a separate process, over HTTP, with prompts and replies as token ids.

Its prompt cache is on in all forms. A slot keeps its last prompt (`cache_prompt`), a request goes to the slot with the
most similar prompt, and prompts that leave a slot are kept in memory (`--cache-ram`, 8 GiB by default).

The binary comes out of llama-cpp-python's source package (20 minutes on two cores; needs cmake and a C++ compiler):

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \\
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-server && mkdir -p .peers && cp build/bin/llama-server .peers/
"""

from __future__ import annotations

import http.client
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from serving_parts.servers import Counted, bytes_per_token

STARTS_WITHIN_S = 60
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
"""Options under which it computes in float32 throughout.

By default it keeps KV in half precision and its attention rounds to that as well, which takes half of the time; log
probabilities then lie 1e-3 from float64, instead of 3e-6.
"""


class LlamaServer:
    """One running server; `stream` may be called from many threads."""

    name = "llama.cpp"
    tie = 0.5  # half precision (see EXACT); the bundled model's logits spread by 3

    def __init__(
        self,
        binary: str,
        gguf: Path,
        config: object,
        *,
        slots: int,
        kv_tokens: int,
        threads: int,
        options: Sequence[str] = (),
    ) -> None:
        """Start the server with `slots` slots over one KV buffer of `kv_tokens`; raises RuntimeError if it does not."""
        self._port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        arguments = {
            "--model": gguf,
            "--port": self._port,
            "--parallel": slots,
            "--ctx-size": kv_tokens,
            "--threads": threads,
            "--threads-batch": threads,
            "--host": "127.0.0.1",
        }
        command = [binary, "--kv-unified", "--no-warmup", "--metrics", *options]
        command += [str(each) for pair in arguments.items() for each in pair]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._lock = threading.Lock()
        self._hits = self._computed = 0
        self._kv_bytes = kv_tokens * bytes_per_token(config) // (1 if options else 2)
        self._wait()

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Greedy reply ids as they arrive."""
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(f"llama.cpp's server: {response.status} {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"llama.cpp's server: {event['error']}")
                    if event["tokens"] and not event["stop"]:
                        yield event["tokens"]
                    if event["stop"]:
                        self._count(event["timings"])
        finally:
            connection.close()

    def counted(self) -> Counted:
        """Totals since the start."""
        return Counted(self._hits, self._computed, None, self._kv_bytes)

    def close(self) -> None:
        """Stop the process."""
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def _count(self, timings: dict[str, float]) -> None:
        with self._lock:
            self._hits += int(timings["cache_n"])
            self._computed += int(timings["prompt_n"] + timings["predicted_n"]) - 1

    def _wait(self) -> None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:
                time.sleep(0.05)
            finally:
                connection.close()
        self._process.kill()
        self._log.seek(0)
        raise RuntimeError(f"llama.cpp's server did not start:\n{self._log.read()[-2000:].decode(errors='replace')}")


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
