"""The options of `radixkv-replay run`, and what they mean. Knows no engine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.live.player import Pace
from radixkv_traces.trace_options import add_trace, positive

_ASAP_CONCURRENCY = 64


def add(parser: argparse.ArgumentParser) -> None:
    """Add them all."""
    add_trace(parser, tokenizer=False)
    _add_pace(parser.add_argument_group("when requests are sent"))
    _add_size(parser.add_argument_group("what is sent"))
    _add_engine(parser.add_argument_group("the engine of this process"))
    _add_target(parser.add_argument_group("another server"))
    _add_results(parser.add_argument_group("results"))


def pace(arguments: argparse.Namespace) -> Pace:
    """When to send; raises InvalidInput."""
    concurrency = arguments.concurrency
    if concurrency is None and arguments.asap:
        concurrency = _ASAP_CONCURRENCY
    return Pace(arguments.loop, arguments.speedup, arguments.asap, concurrency)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `Engine.load` is given."""
    given = {
        "kv_memory": arguments.kv_memory,
        "num_blocks": arguments.num_blocks,
        "block_size": arguments.block_size,
        "eviction": arguments.eviction,
        "max_sequences": arguments.max_sequences,
        "attention": arguments.attention,
        "device": arguments.device,
        "dtype": arguments.dtype,
    }
    return {name: value for name, value in given.items() if value is not None}


def extra_body(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """What `--extra` adds to each body; raises InvalidInput."""
    try:
        extra = json.loads(arguments.extra)
    except ValueError as error:
        raise InvalidInput(f"--extra {arguments.extra!r} is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InvalidInput(f'--extra {arguments.extra!r}: allowed is a JSON object, such as {{"ignore_eos": null}}')
    return extra


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key that `--api-key-env` names; an argument would show in the list of processes."""
    return os.environ.get(arguments.api_key_env)


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loop",
        choices=("open", "closed"),
        default="closed",
        help="open: at the recorded times, come what may; closed (the default): a session's next request also waits "
        "for the answer to the one before",
    )
    group.add_argument("--speedup", type=float, default=1.0, metavar="X", help="recorded times pass X times as fast")
    group.add_argument("--asap", action="store_true", help="ignore recorded times: send as soon as there is room")
    group.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"at most N requests (closed loop: sessions) at once (default: no limit; {_ASAP_CONCURRENCY} with --asap)",
    )


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warmup", type=positive, default=0, metavar="N", help="send the first N ahead, and do not count them"
    )
    group.add_argument(
        "--shrink",
        type=positive,
        default=1,
        metavar="N",
        help="make prompts and answers of recorded blocks N times shorter (for small models)",
    )
    group.add_argument("--max-output", type=positive, metavar="N", help="at most N tokens of an answer")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the token ids made up for block ids")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="'tiny' (bundled, the default), a local folder, or a hub name")
    group.add_argument("--kv-memory", metavar="SIZE", help="memory of the KV pool, such as 512MB (default: auto)")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the KV pool, in place of --kv-memory")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens of a block of the pool (16)")
    group.add_argument("--eviction", metavar="POLICY", help="the eviction policy (lru)")
    group.add_argument("--max-sequences", type=int, metavar="N", help="most requests of a step (64)")
    group.add_argument("--attention", help="torch, triton or auto")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: auto)")
    group.add_argument("--dtype", help="float32, bfloat16, ... (default: auto)")
    group.add_argument("--compare", choices=("off",), help="off: play everything again without a prefix cache")


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", metavar="URL", help="drive this OpenAI-compatible server in place of an engine here")
    group.add_argument("--vocab-size", type=positive, default=30000, metavar="N", help="token ids are below N (30000)")
    group.add_argument("--extra", default="{}", metavar="JSON", help='more of each body; {"ignore_eos": null} drops it')
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="how long it may be silent (600)")
    group.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="the variable with its key")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep this bar; NAME is ttft, tpot or e2e; may be repeated",
    )
    group.add_argument("--out", metavar="DIR", help="write summary.json, requests.csv and moments.csv into a folder")
    group.add_argument("--json", action="store_true", help="print the summary as one JSON object")
