"""Run batched `generate` of transformers with a static cache as a server: each batch runs to its end.

When the model is free, all waiting requests form one batch, up to `slots`, after a short pause in which more may
arrive. The batch is padded on the left. Each batch has a static cache as long as its longest prompt and reply together,
since every step reads all of it. Tokens are streamed. No request enters a running batch. A reply shorter than the
longest of its batch is passed on in time, and its row runs on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from serving_parts.servers import FLOAT32_TIE, Counted, bytes_per_token
from torch import Tensor

GATHER_S = 0.01  # clients that were answered by the same batch come back within this


@dataclass(eq=False)
class _Asked:
    prompt: list[int]
    tokens: int
    replies: queue.SimpleQueue[list[int] | BaseException] = field(default_factory=queue.SimpleQueue)


class GenerateStatic:
    """One model on one thread."""

    name = "generate, static cache"
    tie = FLOAT32_TIE

    def __init__(self, model: Any, *, slots: int) -> None:
        """Serve `model`, `slots` requests a batch."""
        self._model, self._slots = model, slots
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._computed = self._kv_bytes = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Greedy reply ids as they arrive."""
        asked = _Asked(prompt, tokens)
        self._asked.put(asked)
        for _ in range(tokens):
            reply = asked.replies.get()
            if isinstance(reply, BaseException):
                raise reply
            yield reply

    def counted(self) -> Counted:
        """Totals since the start."""
        return Counted(0, self._computed, None, self._kv_bytes, self._kv_bytes)

    def close(self) -> None:
        """Stop the thread once its batch has ended."""
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (first := self._asked.get()) is not None:
            time.sleep(GATHER_S)
            batch = [first]
            while len(batch) < self._slots and not self._asked.empty():
                if (another := self._asked.get()) is None:
                    return
                batch.append(another)
            try:
                self._run(batch)
            except BaseException as error:
                for asked in batch:
                    asked.replies.put(error)

    def _run(self, batch: list[_Asked]) -> None:
        longest, steps = max(len(each.prompt) for each in batch), max(each.tokens for each in batch)
        prompts = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, each in enumerate(batch):
            prompts[row, longest - len(each.prompt) :] = torch.tensor(each.prompt)
            mask[row, longest - len(each.prompt) :] = 1
        self._computed += len(batch) * (longest + steps - 1)
        cells = len(batch) * (longest + steps)
        self._kv_bytes = max(self._kv_bytes, cells * bytes_per_token(self._model.config))
        self._model.generate(
            prompts,
            attention_mask=mask,
            past_key_values=transformers.StaticCache(config=self._model.config, max_cache_len=longest + steps),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=_Streamer(batch),
        )


class _Streamer:
    """Passes the tokens of each step from `generate` to the waiting requests."""

    def __init__(self, batch: list[_Asked]) -> None:
        self._batch, self._step = batch, -1  # generate hands the prompts over first

    def put(self, tokens: Tensor) -> None:
        if self._step >= 0:
            for each, token in zip(self._batch, tokens.tolist(), strict=True):
                if self._step < each.tokens:
                    each.replies.put([token])
        self._step += 1

    def end(self) -> None:
        """Nothing is held back."""
