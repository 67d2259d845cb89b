"""Define the commands of `radixkv` and their options.

The module of a command is imported when the command runs, so `--help` loads neither torch nor rich.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from radixkv.cli import entry_point
from radixkv.cli.entry_point import AddCommand
from radixkv.config import EngineConfig
from radixkv.removed import parse_arguments
from radixkv.server_settings import Settings
from radixkv.settings.command_line import add_settings

_PROGRAM = "radixkv"
_MODEL = "tiny (bundled), a local folder, a GGUF file, or a name on the hub"
_MONITOR_MODES = {"on": True, "off": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns its status."""
    return entry_point.run(_PROGRAM, parse_arguments(_parser(), argv))


def _parser() -> argparse.ArgumentParser:
    about = "A prefix-caching inference engine that lives inside your Python process."
    parser, add = entry_point.parser(_PROGRAM, about)
    for add_command in (
        _add_chat,
        _add_demo,
        _add_ps,
        _add_plan,
        _add_disk,
        _add_doctor,
        _add_serve,
        _add_worker,
        _add_convert,
    ):
        add_command(add)
    return parser


def _add_chat(add: AddCommand) -> None:
    about = "chat with a model; fork, rewind and edit the conversation"
    chat = add("chat", about, "radixkv.cli.chat")
    chat.set_defaults(check=_check_model)
    model = chat.add_mutually_exclusive_group()
    default = "default: SmolLM2 if `make real` has installed it, else tiny"
    model.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=f"{_MODEL} ({default})")
    model.add_argument("--model", dest="model", metavar="MODEL", help="the same, as an option")
    _add_tokenizer(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest reply in tokens (default 256)")
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    add_settings(
        chat, EngineConfig,
        "seed", "kv_memory", "host_memory", "disk_cache", "disk_memory", "device", "dtype", "kv_dtype",
        "speculate", "tensor_parallel", "rank_timeout", "weights", "model_code", "record", "what_if",
    )  # fmt: skip
    _add_monitor(chat)


def _add_demo(add: AddCommand) -> None:
    about = "show conversations and branches that share one KV pool, and compare each answer with an uncached run"
    add("demo", about, "radixkv.cli.demo")


def _add_ps(add: AddCommand) -> None:
    about = "list the running engines of this user: pool, hit rate, requests; radixkv-monitor shows one in detail"
    add("ps", about, "radixkv.cli.ps").add_argument(
        "--json", action="store_true", help="print a JSON list, for scripts"
    )


def _add_disk(add: AddCommand) -> None:
    about = "list the models whose text the folder of a disk cache has, or delete the text of one"
    disk = add("disk", about, "radixkv.cli.disk")
    disk.add_argument("folder", metavar="FOLDER", help="the folder that engines have as disk_cache")
    disk.add_argument("--delete", metavar="NAME", help="delete the folder of this name; no engine may use FOLDER")
    disk.add_argument("--json", action="store_true", help="print a JSON list, for scripts")


def _add_plan(add: AddCommand) -> None:
    about = "compute the KV size of a model, and the number of sequences that fit into a memory; loads no model"
    epilog = "A well-known model can be given by name; an unknown name lists them. See docs/sizing.md."
    plan = add("plan", about, "radixkv.cli.plan", epilog=epilog)
    plan.add_argument(
        "model", metavar="MODEL", help="a config.json or GGUF file, a folder with one, tiny, or a well-known name"
    )
    plan.add_argument(
        "--memory", metavar="SIZE", help="KV memory of each rank, such as 8GiB; shows how many sequences fit"
    )
    plan.add_argument(
        "--context", type=int, metavar="N", help="longest sequence in tokens (default: the context of the model)"
    )
    add_settings(plan, EngineConfig, "state_memory", "block_size", "max_sequences", "kv_dtype", "speculate")
    plan.add_argument("--dtype", help="float32, bfloat16, float16, ... (default: the dtype of the weights)")
    plan.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory of each rank for KV that leaves the pool, such as 64GiB (default: none)",
    )
    plan.add_argument("--disk-memory", metavar="SIZE", help="size of a disk cache of each rank (default: none)")
    plan.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the KV heads")
    plan.add_argument("--json", action="store_true", help="print one JSON object with all sizes, for scripts")


def _add_doctor(add: AddCommand) -> None:
    about = "check whether radixkv works on this machine with a model, and suggest settings that would make it faster"
    epilog = (
        "Loads the model as an engine does; a model on the hub is downloaded if necessary. A line begins with "
        "'+ ok', '~ note' or '! problem'. The exit status is 1 if there is a problem."
    )
    doctor = add("doctor", about, "radixkv.cli.doctor", epilog=epilog)
    doctor.add_argument("model", metavar="MODEL", nargs="?", default="tiny", help=f"{_MODEL} (default tiny)")
    _add_tokenizer(doctor)
    add_settings(
        doctor, EngineConfig,
        "kv_memory", "state_memory", "host_memory", "disk_cache", "disk_memory", "max_sequences", "block_size",
        "device", "dtype", "kv_dtype", "weights", "model_code", "attention", "revision", "trust_remote_code",
        "tensor_parallel", "rank_timeout",
    )  # fmt: skip
    output = doctor.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object with all findings, for scripts")
    about = "only fill Triton's cache with the kernels of an engine with these options, on a GPU"
    output.add_argument(
        "--compile", action="store_const", const="radixkv.cli.doctor_compile", dest="module", help=about
    )


def _add_serve(add: AddCommand) -> None:
    about = "serve OpenAI's and Anthropic's HTTP APIs and metrics, of one model or several; needs radixkv[serve]"
    serve = add("serve", about, "radixkv.serve.command")
    serve.set_defaults(check=_check_models)
    serve.add_argument(
        "models", metavar="MODEL", nargs="*", help=f"{_MODEL}; several are loaded when they are asked for"
    )
    _add_tokenizer(serve)
    several = serve.add_argument_group("several models")
    several.add_argument(
        "--models",
        dest="models_file",
        metavar="FILE.toml",
        help="a table [[model]] for each model: path, name, aliases, tokenizer, and settings of its engine",
    )
    several.add_argument("--lazy", action="store_true", help="load no model at the start, not even the first")
    add_settings(several, Settings, "keep_alive", "load_timeout", "max_loaded", "model_memory")
    access, limits = serve.add_argument_group("address and access"), serve.add_argument_group("limits")
    _add_keys(access)
    add_settings(
        access, Settings,
        "host", "port", "model_name", "allowed_origins", "allowed_hosts", "tls_cert", "tls_key",
        "strict_fields", "keep_billing_header", "vllm_metrics", "record_text",
    )  # fmt: skip
    access.add_argument("--quiet", action="store_true", help="do not log a line per request; logs never contain text")
    add_settings(
        limits, Settings,
        "max_waiting", "max_per_key", "max_connections", "max_body", "max_prompt_tokens", "timeout",
        "drain_timeout", "history_bytes", "response_bytes", "history",
    )  # fmt: skip
    engine = _add_engine(serve)
    add_settings(engine, EngineConfig, "tool_format", "expose_text")
    add_settings(engine, Settings, "fim_order")


def _add_engine(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the settings of an engine that serves; return their group."""
    engine = command.add_argument_group("the engine")
    add_settings(
        engine, EngineConfig,
        "max_sequences", "kv_memory", "host_memory", "disk_cache", "disk_memory", "device", "dtype", "weights",
        "attention", "tensor_parallel", "rank_timeout", "model_code", "eviction", "max_batch_tokens",
        "prefill_chunk", "order", "max_delay", "deterministic", "kv_dtype", "speculate",
        "verify", "seed", "record", "revision", "trust_remote_code", "what_if",
    )  # fmt: skip
    _add_monitor(engine)
    return engine


def _add_worker(add: AddCommand) -> None:
    about = "serve one engine as a worker of a Dynamo fleet: several processes behind one frontend"
    epilog = (
        "The frontend has the HTTP API: python -m dynamo.frontend --router-mode kv. See docs/fleet.md, which also says "
        "how to install Dynamo. Token ids travel between the processes; all addresses are of this machine, unless "
        "DYN_TCP_RPC_HOST and DYN_EVENT_PLANE_HOST name others."
    )
    worker = add("worker", about, "radixkv.fleet.command", epilog=epilog)
    worker.set_defaults(check=_check_model)
    worker.add_argument("model", metavar="MODEL", help=_MODEL)
    _add_tokenizer(worker)
    fleet = worker.add_argument_group("the fleet, as in Dynamo's own workers")
    fleet.add_argument(
        "--namespace", default=_dynamos("NAMESPACE", "dynamo"), metavar="NAME", help="its fleet (default dynamo)"
    )
    fleet.add_argument("--component", metavar="NAME", help="its kind of worker, one for each model (default: its name)")
    fleet.add_argument(
        "--discovery-backend",
        choices=("etcd", "file", "kubernetes", "mem"),
        default=_dynamos("DISCOVERY_BACKEND", "etcd"),
        help="how frontend and workers find each other (default etcd); file is for one machine",
    )
    fleet.add_argument("--served-model-name", metavar="NAME", help="name of the model in the API (default: its own)")
    fleet.add_argument(
        "--dyn-tool-call-parser", dest="tool_call_parser", metavar="NAME", help="the frontend's parser of tool calls"
    )
    fleet.add_argument(
        "--dyn-reasoning-parser", dest="reasoning_parser", metavar="NAME", help="the frontend's parser of thinking"
    )
    _add_roles(worker.add_argument_group("prefill and decode apart"))
    add_settings(worker.add_argument_group("limits"), Settings, "max_waiting", "drain_timeout")
    _add_engine(worker)


def _add_roles(group: argparse._ArgumentGroup) -> None:
    roles = (
        "prefill: only compute prompts, without a frontend; decode: fetch long prompts from it. RADIXKV_PREFILL_KEY is "
        "a secret of both, or @FILE (default both: one worker does all)"
    )
    group.add_argument("--role", choices=("both", "prefill", "decode"), default="both", help=roles)
    where = "address of the prefill worker (default 127.0.0.1:7300); prompts and runs are not encrypted"
    group.add_argument("--prefill-address", default="127.0.0.1:7300", metavar="HOST:PORT", help=where)
    least = "uncached tokens above which a decode worker asks the prefill worker (default: measured at the start)"
    group.add_argument("--prefill-threshold", type=float, metavar="N", help=least)
    longest = "seconds after which a decode worker computes a prompt itself (default 60)"
    group.add_argument("--prefill-timeout", type=float, default=60.0, metavar="S", help=longest)


def _dynamos(name: str, default: str) -> str:
    return os.environ.get(f"DYN_{name}", default)


def _add_monitor(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--monitor",
        type=_monitor_mode,
        default=argparse.SUPPRESS,
        metavar="MODE",
        help="on (the default): radixkv-monitor of the same user may attach; rw: it may also cancel requests, pin, "
        "unpin and demote cached prefixes, and clear namespaces; off; or a tcp:// address, for reading only",
    )


def _monitor_mode(text: str) -> bool | str:
    """Parse a value of --monitor. Raises ArgumentTypeError."""
    if text != "rw" and not text.startswith(("tcp://", "rw+tcp://")) and text not in _MONITOR_MODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not on, rw, off, or an address such as tcp://127.0.0.1:7777")
    return _MONITOR_MODES.get(text, text)


def _add_keys(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="name and key of a tenant, or NAME=@FILE; repeat for more tenants. Each tenant has its own part of the "
        "cache. The environment variable RADIXKV_API_KEYS=NAME=KEY,NAME=KEY does the same. Required to listen on an "
        "address that other machines can reach",
    )


def _add_convert(add: AddCommand) -> None:
    about = "write a GGUF model as a folder of safetensors, which loads without dequantisation; needs radixkv[gguf]"
    epilog = (
        "The folder has the weights as numbers of 32 bits, which give the same answers as the file, and is several "
        "times larger. --dtype bfloat16 halves it; it rounds the weights, which changes answers a little."
    )
    convert = add("convert", about, "radixkv.cli.convert", epilog=epilog)
    convert.add_argument("file", metavar="FILE.gguf", help="the file, one of its shards, or a folder with one model")
    convert.add_argument("folder", metavar="FOLDER", help="a new or empty folder; nothing is overwritten")
    _add_tokenizer(convert)
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the written weights (default float32)",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="folder, GGUF file or hub name of a tokenizer (default: the model's own)"
    )


def _check_models(arguments: argparse.Namespace) -> None:
    """Check the files of the models that the command names, before it imports torch."""
    from radixkv.cli import model_check
    from radixkv.model_path import find, models_named

    for name in arguments.models:
        for each in models_named(name):
            model_check.check(each)
    if arguments.tokenizer is not None:
        find(arguments.tokenizer, "tokenizer")


def _check_model(arguments: argparse.Namespace) -> None:
    """Check the model's files before the command imports torch."""
    from radixkv.cli import model_check

    model_check.check_arguments(arguments)
