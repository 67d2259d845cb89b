"""Compare greedy replies with transformers' own forward in float32, from scratch and without a cache.

A forward is causal: its logits at a position depend on the tokens up to there only. So one forward over a prompt and
its reply checks every token of the reply, and one forward over a conversation checks every reply in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-3
"""The largest difference between two logits that rounding may turn around; a reply may then have either token.

Logits of this model differ by about 1e-4 between two orders of the same float32 sums.
"""


@dataclass
class Comparison:
    """Numbers of compared replies and tokens; near ties and mismatches, each described."""

    replies: int = 0
    tokens: int = 0
    forwards: int = 0
    near_ties: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    smallest_gap: float = float("inf")  # between the two largest logits, over all compared tokens

    def __str__(self) -> str:
        """Return the numbers as a line."""
        return (
            f"{self.replies} greedy replies, {self.tokens:,} tokens, against {self.forwards} forwards of transformers: "
            f"{len(self.mismatches)} mismatches, {len(self.near_ties)} near ties, smallest gap {self.smallest_gap:.4f}"
        )

    def add(self, logits: torch.Tensor, reply: Sequence[int]) -> None:
        """Compare a reply with the logits [tokens, vocab] before each of its tokens."""
        self.replies += 1
        self.tokens += len(reply)
        top = logits.topk(2).values
        self.smallest_gap = min(self.smallest_gap, float((top[:, 0] - top[:, 1]).min()))
        for at, token in enumerate(reply):
            best = int(logits[at].argmax())
            if token == best:
                continue
            gap = float(logits[at, best] - logits[at, token])
            text = f"token {at} of {list(reply)} is {token}, expected {best}, whose logit is {gap:.6f} larger"
            (self.near_ties if gap < NEAR_TIE else self.mismatches).append(text)


class Reference:
    """The model as transformers itself reads it from the GGUF file, in float32, with its own attention."""

    def __init__(self, file: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the logits [len(positions), vocab] after the tokens at `positions`; one forward over all tokens."""
        ids, kept = torch.tensor([list(tokens)]), torch.tensor(list(positions))
        logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=kept).logits[0]
        return logits

    def compare(self, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Comparison:
        """Compare each (prompt, greedy reply) with the most likely tokens."""
        result = Comparison()
        for whole, replies in conversations(answers):
            result.forwards += 1
            before = [at for start, reply in replies for at in range(start - 1, start - 1 + len(reply))]
            logits = self.logits(whole, before).split([len(reply) for _, reply in replies])
            for (_, reply), rows in zip(replies, logits, strict=True):
                result.add(rows, reply)
        return result


def conversations(
    answers: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]]:
    """Return the longest token sequences, each with the (start, reply) of every answer that it begins with."""
    found: list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = []
    # In reverse order, a sequence comes after those that it begins.
    for tokens, start in sorted({((*prompt, *reply), len(prompt)) for prompt, reply in answers}, reverse=True):
        if not found or found[-1][0][: len(tokens)] != tokens:
            found.append((tokens, []))
        found[-1][1].append((start, tokens[start:]))
    return found
