"""Start and warm up the engines of the serving benchmark, all over one model and with equal resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from cpu_decode import build_model
from peers import gguf_llama
from peers.continuous_batching import ContinuousBatching
from peers.generate_static import GenerateStatic
from peers.llama_server import EXACT, LlamaServer

from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel
from radixkv.models.loader import BUNDLED

from .servers import RadixKV, Server

OURS, PLAIN = "radixkv", "radixkv, no cache"
GENERATE, BATCHING, LLAMA = GenerateStatic.name, ContinuousBatching.name, LlamaServer.name
ENGINES = (PLAIN, OURS, GENERATE, BATCHING, LLAMA)
PEERS = (GenerateStatic, ContinuousBatching, LlamaServer)
TIES = {PLAIN: RadixKV.tie, OURS: RadixKV.tie} | {peer.name: peer.tie for peer in PEERS}
SHARPER = 1.5
"""What the 100M model's matrices are multiplied by: at 1 its greedy replies repeat one token."""


@dataclass(frozen=True)
class Bench:
    """One model for every engine: `loaded` for us, `plain` for transformers, `gguf` for llama.cpp."""

    name: str
    loaded: LoadedModel
    plain: Any
    llama: Path | None
    gguf: Path
    clients: int
    threads: int

    @classmethod
    def of(cls, name: str, folder: Path, llama: Path | None, clients: int, threads: int) -> Bench:
        """Load the model `name` ("tiny" or "100m") twice, and write it into `folder` for llama.cpp."""
        plain, gguf = model(name), folder / f"{name}.gguf"
        bench = cls(name, adapter.load(model(name)), plain, llama, gguf, clients, threads)
        if llama is not None:
            gguf_llama.write(plain, gguf)
            bench._check_gguf()
        return bench

    def _check_gguf(self) -> None:
        """In float32 llama.cpp gives the tokens that transformers gives, or the file is wrong."""
        draw = torch.Generator().manual_seed(2)
        server = LlamaServer(
            str(self.llama), self.gguf, self.plain.config, slots=1, kv_tokens=1024, threads=self.threads, options=EXACT
        )
        try:
            for length in (7, 100, 400):
                prompt = torch.randint(3, self.loaded.vocab_size, (1, length), generator=draw)
                expected = self.plain.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=16,
                    do_sample=False,
                    eos_token_id=None,
                )
                found = [token for tokens in server.stream(prompt[0].tolist(), 16) for token in tokens]
                if found != expected[0, length:].tolist():
                    raise SystemExit(f"{self.name}: llama.cpp does not compute the model that was written for it")
        finally:
            server.close()

    @contextmanager
    def serve(self, engine: str, kv_tokens: int) -> Iterator[Server]:
        """Create the engine with room for `kv_tokens`, and warm it up with one short request."""
        server = self._makers(kv_tokens)[engine]()
        try:
            for _ in server.stream([5, 6, 7, 8], 4):
                pass
            yield server
        finally:
            server.close()

    def _makers(self, kv_tokens: int) -> dict[str, Callable[[], Server]]:
        slots = self.clients
        return {
            OURS: lambda: RadixKV(self.loaded, slots=slots, kv_tokens=kv_tokens),
            PLAIN: lambda: RadixKV(self.loaded, slots=slots, kv_tokens=kv_tokens, prefix_cache=False),
            GENERATE: lambda: GenerateStatic(self.plain, slots=slots),
            BATCHING: lambda: ContinuousBatching(self.plain, slots=slots, kv_tokens=kv_tokens),
            LLAMA: lambda: LlamaServer(
                str(self.llama), self.gguf, self.plain.config, slots=slots, kv_tokens=kv_tokens, threads=self.threads
            ),
        }


def model(name: str) -> Any:
    """A transformers model in float32 with its own attention; the same weights each time."""
    if name == "tiny":
        return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"], dtype=torch.float32).eval()
    made = build_model()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if weight.ndim == 2 and "embed" not in key:
                weight.mul_(SHARPER)
    return made
