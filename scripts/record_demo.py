"""Record eight agents on the bundled model for `radixkv-monitor --demo`: a real run, with a host tier.

Run `python scripts/record_demo.py [FILE]`. The pool is too small for all agents. Four belong to each of two namespaces,
and all pause between their turns. The texts are of this script, so the recording may show them.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path

from radixkv import ChatSession, Engine, SamplingParams
from radixkv.errors import RadixKVError
from radixkv_monitor.feed_factory import DEMO

SECONDS, AGENTS = 45, 8
RULES = "You are Mira, the assistant of the Harbor Shop in Lisbon. The shop opens at 9 and closes at 18. " * 3
ASKED = (
    "Do you have a lamp in stock?",
    "My name is Nora and I live in Oslo.",
    "What is my name?",
    "Where do I live?",
    "When does the shop open?",
    "Is a kettle cheaper than a tent?",
)


def talk(engine: Engine, number: int, until: float) -> None:
    """Hold conversations with one agent until then, and return to earlier ones, which may have left the pool."""
    draws = random.Random(number)
    chats: list[ChatSession] = []
    while time.monotonic() < until:
        if len(chats) < 3:
            opening = f"You are agent {number} of a shop in Lisbon, and this is customer {len(chats)}. " + RULES
            chats.append(
                engine.chat(RULES if draws.random() < 0.5 else opening, namespace=("alice", "bob")[number % 2])
            )
        chat = draws.choice(chats)
        try:
            chat.send(draws.choice(ASKED), SamplingParams(max_tokens=draws.randrange(8, 40), seed=number))
        except RadixKVError as error:  # the conversation has grown longer than the model's context
            print(f"agent {number}: {error}")
            chats.remove(chat)
        if len(chat.token_ids) > 500 and chat in chats:
            chats.remove(chat)
        time.sleep(draws.uniform(0.5, 3))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Record the run that radixkv-monitor --demo plays.")
    parser.add_argument("target", nargs="?", type=Path, default=DEMO)
    target = parser.parse_args().target
    with Engine.load("tiny", num_blocks=128, host_memory="4MiB", expose_text=True, monitor=True) as engine:
        until = time.monotonic() + SECONDS
        agents = [threading.Thread(target=talk, args=(engine, number, until)) for number in range(AGENTS)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
        engine.flight_recording(target)
    print(f"wrote {target.stat().st_size:,} bytes to {target}")


if __name__ == "__main__":
    main()
