"""Every command and every option.

Does not know what the commands do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from radixkv.cli import entry_point

_PROGRAM = "radixkv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns its status."""
    return entry_point.run(_PROGRAM, _parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    about = "A prefix-caching inference engine that lives inside your Python process."
    parser, commands, common = entry_point.parsers(_PROGRAM, about)
    _add_chat(commands, common)
    _add_demo(commands, common)
    _add_ps(commands, common)
    _add_plan(commands, common)
    _add_doctor(commands, common)
    _add_serve(commands, common)
    return parser


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = "talk with a model; fork, rewind and edit the conversation"
    chat = commands.add_parser("chat", help=about, description=about.capitalize() + ".", parents=[common])
    chat.set_defaults(module="radixkv.cli.chat")
    chat.add_argument("--model", default="tiny", help="'tiny' (bundled, the default), a local folder, or a hub name")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of a reply (default 256)")
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    chat.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling, when the temperature is above 0")
    chat.add_argument(
        "--kv-memory", default="auto", metavar="SIZE", help="memory of the KV pool, such as 512MB (default: auto)"
    )
    chat.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    chat.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (default: auto)")
    chat.add_argument(
        "--record", metavar="FILE", help="write a trace of the requests, without their text, for radixkv-replay"
    )


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = (
        "conversations and branches share one KV pool, on the bundled model, and every answer equals an uncached run"
    )
    demo = commands.add_parser("demo", help=about, description=about.capitalize() + ".", parents=[common])
    demo.set_defaults(module="radixkv.cli.demo")


def _add_ps(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = "list the engines that run here: pool, hit rate, requests; radixkv-monitor shows one in full"
    ps = commands.add_parser("ps", help=about, description=about.capitalize() + ".", parents=[common])
    ps.set_defaults(module="radixkv.cli.ps")
    ps.add_argument("--json", action="store_true", help="a list of objects, for scripts")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = "what the KV of a model takes, and how many sequences fit into a memory; loads and fetches nothing"
    plan = commands.add_parser(
        "plan", help=about, description=about[0].upper() + about[1:] + ".", parents=[common],
        epilog="A named model is one of the usual shapes; an unknown name lists them. See docs/sizing.md.",
    )  # fmt: skip
    plan.set_defaults(module="radixkv.cli.plan")
    plan.add_argument("model", metavar="MODEL", help="a config.json, a folder that has one, 'tiny', or a usual name")
    plan.add_argument("--memory", metavar="SIZE", help="for KV, on each rank, such as 8GiB: what fits into it")
    plan.add_argument(
        "--context", type=int, metavar="N", help="tokens of a whole sequence (default: the model's longest)"
    )
    plan.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default 16)")
    plan.add_argument("--dtype", help="float32, bfloat16, float16, ... (default: what the weights are saved in)")
    plan.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the KV heads")
    plan.add_argument("--json", action="store_true", help="one object, for scripts; all bytes and layers")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = "whether radixkv works here with a model, line by line, and what would make it faster"
    doctor = commands.add_parser(
        "doctor", help=about, description=about.capitalize() + ".", parents=[common],
        epilog="Loads the model as an engine would, which fetches one from the hub that is not here yet. "
        "'+ ok' is well, '~ note' works, '! problem' does not: with one of those the exit status is 1.",
    )  # fmt: skip
    doctor.set_defaults(module="radixkv.cli.doctor")
    doctor.add_argument(
        "model", metavar="MODEL", nargs="?", default="tiny", help="as for chat (default: the bundled one)"
    )
    doctor.add_argument("--kv-memory", default="auto", metavar="SIZE", help="memory of the KV pool, such as 512MB")
    doctor.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default 16)")
    doctor.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    doctor.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (default: auto)")
    doctor.add_argument("--attention", default="auto", help="torch, triton, or auto (the default)")
    doctor.add_argument("--revision", help="of a model on the hub")
    doctor.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    doctor.add_argument("--json", action="store_true", help="one object with all findings, for scripts")


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    about = "answer OpenAI's HTTP API (chat, completions, models, metrics) from one engine; needs radixkv[serve]"
    serve = commands.add_parser("serve", help=about, description=about.capitalize() + ".", parents=[common])
    serve.set_defaults(module="radixkv.serve.command")
    serve.add_argument("model", metavar="MODEL", help="'tiny' (bundled), a local folder, or a hub name")
    _add_doors(serve.add_argument_group("who may come in"))
    _add_serving_limits(serve.add_argument_group("how much at once"))
    _add_engine(serve.add_argument_group("the engine"))


def _add_doors(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0 takes one that is free")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="a tenant and its key, or NAME=@FILE; again for more tenants, each has its own part of the cache. "
        "Keys in the environment: RADIXKV_API_KEYS=NAME=KEY,NAME=KEY. Needed to listen wider than this machine",
    )
    group.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: its own name)")
    group.add_argument("--vllm-metrics", action="store_true", help="also vLLM's names on /metrics")
    group.add_argument("--quiet", action="store_true", help="log no line a request; no line ever has content")


def _add_serving_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-sequences", type=int, default=64, metavar="N", help="replies computed at once (default 64)"
    )
    group.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="replies that may wait; more get 429 (default 256)"
    )
    group.add_argument("--max-per-key", type=int, metavar="N", help="replies of one tenant, waiting or not")
    group.add_argument("--max-body", default="8MiB", metavar="SIZE", help="largest request (default 8MiB)")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longest prompt (default: the context)")
    group.add_argument("--timeout", type=float, metavar="S", help="seconds a request may take (default: no limit)")
    group.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that replies have to finish at the end; a second signal cuts everything off (default 30)",
    )
    group.add_argument(
        "--history-memory",
        default="64MiB",
        metavar="SIZE",
        help="for what was said, so that clients that send it again hit the cache; 0 for none (default 64MiB)",
    )
    group.add_argument(
        "--history",
        choices=("auto", "append", "template"),
        default="auto",
        help="where new messages go: behind what is known (append), or through the template, around the replies that "
        "are known; auto (the default) appends unless the template leaves the thinking of earlier replies out, or "
        "appending would lose what it writes",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-memory", default="auto", metavar="SIZE", help="memory of the KV pool, such as 512MB")
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    group.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (default: auto)")
    group.add_argument("--attention", default="auto", help="torch, triton, or auto (the default)")
    group.add_argument("--eviction", default="lru", metavar="POLICY", help="what goes first (default lru)")
    group.add_argument("--max-batch-tokens", type=int, default=2048, metavar="N", help="tokens a step (default 2048)")
    group.add_argument("--prefill-chunk", type=int, default=512, metavar="N", help="of one prompt a step (default 512)")
    group.add_argument("--deterministic", action="store_true", help="the same bits whether a prompt hits or not")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of requests that bring none")
    group.add_argument("--record", metavar="FILE", help="write a trace of all requests, without their text")
    group.add_argument("--revision", help="of a model on the hub")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
