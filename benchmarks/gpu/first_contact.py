"""The first run on a new GPU: three checks in order, and advice at the first one that fails.

1. `kernels`: attention, writes and copies of small random batches against the reference in float64, in a process under
   compute-sanitizer, which finds accesses outside of the tensors.
2. `capture`: a capture that fails on purpose, then the release of unused memory, an ordinary capture and its replay.
3. `engine`: a small random Llama passes its self-test at load, and decodes sequences that share five levels of
   prefixes. Every step is replayed from a graph, and the replies equal those of an engine that launches each step.

Each check runs in a process of its own, because an error of the device ends the use of the device in a process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 600
"""Seconds that a check may take; compute-sanitizer makes a process ten times slower or more."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One check: what it shows, and what to do if it fails."""

    name: str
    says: str
    advice: str


CHECKS = (
    Check(
        "kernels",
        "kernels under compute-sanitizer, against the reference",
        "A kernel reads or writes outside of a tensor, or computes something else. Do not serve with it: load engines "
        "with attention='torch', and report the output above with the name of the GPU.",
    ),
    Check(
        "capture",
        "a failed capture, then one that works",
        "torch does not recover from a failed capture here. Use torch 2.13 or later, or load engines with "
        "attention='torch', which record no graphs.",
    ),
    Check(
        "engine",
        "the self-test, decodes from graphs, replies",
        "The engine does not compute the same with recorded steps. Load engines with attention='torch', and report the "
        "output above with the versions of torch and Triton.",
    ),
)


def main(smoke: bool, say: Say) -> int:
    """Run the checks, and stop at the first that fails; return the exit status. `smoke`: in the interpreter."""
    from . import device

    found = device.find(smoke)
    if isinstance(found, str):
        say(f"nothing was checked: {found}")
        return 0
    say(f"{found.name}: {found.processors} processors, generation {found.generation}")
    for check in CHECKS:
        if smoke and check.name == "capture":
            say(f"- {check.name}: skipped, the interpreter captures nothing")
            continue
        say(f"- {check.name}: {check.says}")
        if failed := _run(check, smoke, say):
            say(f"  FAILED: {failed}\n\n{check.advice}")
            return 1
    say("All checks have passed. Next: python benchmarks/gpu")
    return 0


def _run(check: Check, smoke: bool, say: Say) -> str:
    """Run a check in a process of its own; return the reason if it failed."""
    command = [sys.executable, str(Path(__file__).parent), "--check", check.name, *(["--smoke"] if smoke else [])]
    if check.name == "kernels" and not smoke:
        sanitizer = _sanitizer()
        if sanitizer is None:
            say("  compute-sanitizer is not installed (it is a part of the CUDA toolkit): accesses are not checked")
        else:
            command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *command]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT_S} s"
    say("\n".join("    " + line for line in done.stdout.strip().splitlines()[-40:]))
    return f"its process ended with {done.returncode}" if done.returncode else ""


def _sanitizer() -> str | None:
    """Return the path of compute-sanitizer, if it is installed."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)])
    return shutil.which("compute-sanitizer", path=path)


# ---- the checks, each in its own process


def run_check(name: str, smoke: bool) -> int:
    """Run one check in this process; return the exit status."""
    from . import device

    place = device.find(smoke)
    if isinstance(place, str):
        raise SystemExit(place)
    {"kernels": kernels, "capture": capture, "engine": engine}[name](place)
    return 0


def kernels(device) -> None:
    """Compare attention over all kinds of batch, writes and copies with the reference; raises for a difference."""
    import torch

    from radixkv.attention import triton_backend
    from radixkv.attention.kv_store import KVStore, LayerShape

    from .pools import Attention, Pools
    from .shapes import HeadShape, chunk, comb, private, shared, two_level

    dims = (16,) if device.interpreted else (64, 80, 128, 256)
    batches = [private(3, 40), shared(4, 96, 20), two_level(2, 2, 96, 16, 16), comb(5, 16, 2, 5), chunk(20, 40)]
    for dim in dims:
        shape = HeadShape(f"8 heads of {dim}", 8, 2, dim)
        for batch in batches[3:] if device.interpreted else batches:
            pools = Pools(shape, batch.num_blocks, 1, device)
            error = Attention(pools, batch, pools.query(batch.rows)).error()
            print(f"{shape.name}, {batch.name}: error {error:.1e}")
        stores = [KVStore([LayerShape(2, dim, dim)], 6, 16, device=device.torch, dtype=device.dtype) for _ in range(2)]
        new = torch.randn(2, 2, 20, dim, device=device.torch).to(device.dtype)
        slots = torch.randperm(96, device=device.torch)[:20]
        triton_backend.write(stores[0], 0, slots, *new)
        stores[1].write(0, slots, *new)
        triton_backend.copy(stores[0], [(0, 4), (1, 5)])
        stores[1].copy([(0, 4), (1, 5)])
        pairs = zip((*stores[0].keys, *stores[0].values), (*stores[1].keys, *stores[1].values), strict=True)
        if not all(torch.equal(ours[:, 4:], expected[:, 4:]) for ours, expected in pairs):
            raise SystemExit(f"writes or copies of heads of {dim} numbers differ from torch's")
    device.synchronize()


def capture(device) -> None:
    """Let a capture fail, release unused memory, then capture and replay; raises if something does not recover."""
    import torch

    from radixkv.device import device_of

    place = device_of(device.torch)
    numbers = torch.ones(1 << 16, device=device.torch)
    stream, pool = place.stream(), place.graph_pool()
    try:
        place.capture(lambda: numbers * numbers.sum().item(), stream=stream, pool=pool)
    except RuntimeError as error:
        print(f"a capture with a synchronisation raised {type(error).__name__}, as it must")
    else:
        raise SystemExit("a capture with a synchronisation raised nothing")
    torch.cuda.empty_cache()
    print("unused memory can be released")
    graph = place.capture(lambda: numbers * 2, stream=stream, pool=place.graph_pool())
    numbers.fill_(3)
    if graph.replay().sum().item() != 6 * numbers.numel():
        raise SystemExit("the replay of a later capture is wrong")
    print("a later capture replays")


def engine(device) -> None:
    """Decode a deep tree with recorded steps and with launched ones; raises for a difference."""
    from contextlib import nullcontext
    from dataclasses import replace
    from unittest.mock import patch

    from radixkv import SamplingParams

    from .model import TINY, build, serving, token_ids, with_prefix

    sizes = TINY if device.interpreted else replace(TINY, layers=4, hidden=512, heads=8, kv_heads=2, intermediate=1024)
    path = token_ids(1, 5 * 32, sizes.vocab)
    prompts = [
        prompt
        for level in range(1, 6)
        for prompt in with_prefix(path[: 32 * level], 2, 3, sizes.vocab, seed=10 * level)
    ]
    params = SamplingParams(max_tokens=3 if device.interpreted else 32, temperature=0, ignore_eos=True)
    replies, eager = [], []
    for recorded in (True, False):
        model, _ = build(sizes, device)
        unrecorded = nullcontext() if recorded else patch("radixkv.models.cuda_graphs.record_graphs", _record_nothing)
        options = {"kv_tokens": 4096, "sequences": 16, "batch_tokens": 256}
        with unrecorded, serving(model, device, **options) as loaded:
            replies.append([each.token_ids for each in loaded.generate(prompts, params)])
            eager.append(loaded.stats().eager_steps)
    if replies[0] != replies[1]:
        raise SystemExit("replies of recorded steps differ from those of launched ones")
    print(f"{len(prompts)} replies are equal; steps that no graph served: {eager[0]}")
    if eager[0] and not device.interpreted:
        raise SystemExit("some steps were not replayed")


def _record_nothing(*_: object) -> None:
    """Leave the runner as it is."""
