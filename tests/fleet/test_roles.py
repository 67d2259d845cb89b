"""A decode worker behind a frontend: a prefill worker computes its long prompts, and dies meanwhile."""

from __future__ import annotations

import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.fleet.processes import Fleet, Process, Reply, free_port, until

HERE = "is computed here"
KEY = {"RADIXKV_PREFILL_KEY": "k" * 16}
ASKS_SOON = (  # after a fault
    "import sys; from radixkv.cli import main; from radixkv.fleet import roles; roles._PAUSE = 0.5; "
    "sys.exit(main(sys.argv[1:]))"
)
WORDS = ["boats", "kites", "maps", "rivers", "lanterns", "oranges", "wind", "stones"]


def test_two_hundred_requests_have_the_answers_of_one_worker_while_prefill_workers_die(empty: Fleet) -> None:
    address, done = f"127.0.0.1:{free_port()}", threading.Event()
    empty.frontend()
    prefill = started(empty, address)
    role = ("--role", "decode", "--prefill-address", address, "--prefill-threshold", "60")
    decode = empty.run("worker", "-c", ASKS_SOON, "worker", "tiny", "--discovery-backend", "file", *role, **KEY)
    empty.joined(decode, empty.worker("--served-model-name", "alone", "--component", "alone"))
    until(lambda: len(empty.models()) == 2, "both models")
    contents = [f"{text(seed % 20, 20)} {text(seed, 10 + seed % 60)}" for seed in range(200)]

    def kill(living: Process) -> Process:
        while not done.wait(1.5):
            living.signal(signal.SIGKILL)
            living.ended()
            living = started(empty, address)
        return living

    with ThreadPoolExecutor(5) as pool:
        killing = pool.submit(kill, prefill)
        apart = list(pool.map(lambda content: empty.stream(content, 30), contents))
        done.set()
        alone = list(pool.map(lambda content: empty.stream(content, 30, model="alone"), contents))
    assert [each.error for each in apart] == [None] * 200
    assert [each.text for each in apart] == [each.text for each in alone]
    assert sum(computed(each) == 1 for each in apart) > 10
    assert decode.output.count(HERE) > 0
    killing.result().signal(signal.SIGTERM)
    assert killing.result().ended() == 0


def started(fleet: Fleet, address: str) -> Process:
    """A prefill worker, which listens."""
    made = fleet.start("prefill", "radixkv", "worker", "tiny", "--role", "prefill", "--prefill-address", address, **KEY)
    until(lambda: "prefill at" in made.output, "it listens")
    return made


def text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def computed(reply: Reply) -> int:
    """How many tokens of its prompt the decode worker has computed."""
    return int(reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"])
