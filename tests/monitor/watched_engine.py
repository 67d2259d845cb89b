"""A process with a real engine under load: print its pid, work until a line of input, then print its stats and wait.

Run by test_end_to_end: `python -m tests.monitor.watched_engine`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict

from radixkv import Engine, SamplingParams
from radixkv.errors import RadixKVError

SYSTEM = "You are a helpful assistant who answers in one short sentence."


def load(engine: Engine, number: int, stop: threading.Event) -> None:
    """Run one conversation after another."""
    turn = 0
    while not stop.is_set():
        with engine.chat(SYSTEM) as chat:
            for _ in range(4):
                chat.send(f"Question {number}.{turn}: what is two plus three?", SamplingParams(max_tokens=12))
                turn += 1


def main() -> None:
    with Engine.load(num_blocks=192, max_sequences=4) as engine:
        stop = threading.Event()
        threads = [threading.Thread(target=load, args=(engine, number, stop)) for number in range(3)]
        for thread in threads:
            thread.start()
        print(os.getpid(), flush=True)
        sys.stdin.readline()
        stop.set()
        for thread in threads:
            thread.join()
        print(json.dumps(asdict(engine.stats())), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    try:
        main()
    except RadixKVError as error:
        sys.exit(str(error))
