"""Replay recorded agents against a live engine, call by call, and measure the prefill that its cache saves.

    python traces/agent_replay.py                      # four sessions that ship with the package
    python traces/agent_replay.py gpt-4o-airline.json  # the trajectory file of a tau-bench run, or chats as JSONL

An agent's call sends the whole history: the policy, the user's words, tool calls and their results. The next call sends
it again and a little more. A retry of a task begins as the first attempt did and then differs. It needs no special call
here: its prompt hits the common prefix, and the tree forks where the two attempts differ.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

import radixkv
from radixkv import Engine, SamplingParams
from radixkv_traces.formats import open_trace, sample

CONTEXT = 32768  # tokens; sessions of tau-bench have up to 20,000 in the bundled model's small vocabulary


def long_model(folder: str) -> str:
    """Copy the bundled model with a longer context: its text makes no sense after 4,096 tokens, but its KV is valid."""
    place = Path(folder) / "tiny"
    shutil.copytree(Path(radixkv.__file__).parent / "assets" / "tiny", place)
    for file, longer in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((place / file).read_text())
        (place / file).write_text(json.dumps({**settings, longer: CONTEXT}))
    return str(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", help="a trajectory file; default: the sample")
    parser.add_argument("--sessions", type=int, help="the most sessions")
    parser.add_argument("--kv-memory", default="auto", help="memory of the pool, such as 2GB")
    parser.add_argument("--no-cache", action="store_true", help="compute every prompt in full, for comparison")
    options = parser.parse_args()

    recorded = open_trace(options.trace or sample("taubench"))
    sessions = [list(calls) for _, calls in groupby(recorded, key=lambda call: call.session)][: options.sessions]
    one_token = SamplingParams(max_tokens=1, temperature=0)  # the next prompt contains the recorded reply
    attempts: dict[str, int] = {}
    prompt_tokens = cached_tokens = retried_tokens = skipped = 0
    began = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(
            long_model(folder), kv_memory=options.kv_memory, prefix_cache=not options.no_cache, monitor=True
        )
        with engine:
            for number, calls in enumerate(sessions, 1):
                task = calls[0].session.partition(".")[0]  # "task.trial"
                retry = attempts.setdefault(task, 0) > 0
                attempts[task] += 1
                for turn, call in enumerate(calls):
                    try:
                        usage = engine.submit(list(call.messages), one_token, session=number).result().usage
                    except radixkv.PromptTooLong:
                        skipped += 1
                        continue
                    prompt_tokens += usage.prompt_tokens
                    cached_tokens += usage.cached_tokens
                    if retry and turn == 0:  # a hit although this session has sent nothing before
                        retried_tokens += usage.cached_tokens
                print(f"\rsession {number} of {len(sessions)}: {engine.stats().hit_rate:.1%} hit", end="", flush=True)
            stats, tree = engine.stats(), engine.tree()
    seconds = time.perf_counter() - began

    calls = sum(map(len, sessions))
    forks = sum(count > 1 for count in Counter(node.parent for node in tree).values())
    retries = sum(count - 1 for count in attempts.values())
    print(f"\r{len(sessions)} sessions, {calls} calls, {seconds:.1f} s" + f" ({skipped} too long)" * bool(skipped))
    print(f"prompt tokens    {prompt_tokens:>12,}")
    print(f"found in cache   {cached_tokens:>12,}  {cached_tokens / max(1, prompt_tokens):.1%}: prefill that was saved")
    print(f"  by {retries} retries   {retried_tokens:>12,}  at their first call, from earlier attempts and other tasks")
    print(f"forks in the tree{forks:>12,}  of {len(tree):,} nodes")
    print(f"evicted blocks   {stats.cache.evicted_blocks:>12,}  of a pool of {stats.cache.num_blocks:,}")


if __name__ == "__main__":
    main()
