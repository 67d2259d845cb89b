"""Name the arguments, settings and flags that were removed, and refuse them until 0.2 with a sentence of advice.

Calls, commands and settings files ask here about each unknown name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from radixkv.errors import InvalidInput

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

REMOVED: dict[str, str] = {
    "notify": "--notify was removed: use --bell, or --watch with a command of your own",
    "notify.log": "notify.log was removed: append the lines of --watch --json to a file",
    "osc9": "notify.osc9 was removed: use notify.bell, or --watch with a command of your own",
    "model": "--model was removed: radixkv demo plays the bundled model, and other commands take MODEL without a flag",
    "queue_blind": "--queue-blind was removed: leave it out, as eviction always spares the text of waiting requests",
    "report": "--report was removed: use --once --json, or export a view with the key e",
    "key_share": "--key-share was removed: tenants take turns, and each gets at most half of --max-sequences",
    "max_overtakes": "max_overtakes was removed: max_delay bounds how long requests of its group overtake a request",
    "namespace_limits": "namespace_limits was removed: namespaces take turns, each with at most half of the streams",
    "host_blocks": "--host-blocks was removed: the recording that --demo plays has a host tier",
    "replicas": "--replicas was removed: simulate one engine, and measure a fleet with Dynamo",
    "scrub": "scrub was removed: call engine.audit(blocks), from a thread of your own while requests run",
    "routing": "--routing was removed with --replicas: simulate one engine, and measure a fleet with Dynamo",
    "verdict_log": "--verdict-log was removed: append the lines of --watch --json to a file",
    "victim": "victim was removed: the request that is cheapest to resume is preempted",
    "web": "--web was removed: use textual serve",
}
"""name in Python's form (the flag `--key-share` is `key_share`) -> a sentence: it was removed, and what to use."""


def refuse_removed(names: Iterable[str]) -> None:
    """Raise InvalidInput for the first of these unknown names that was removed."""
    for name in names:
        if name in REMOVED:
            raise InvalidInput(REMOVED[name])


def parse_arguments(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parse a command line as `parser.parse_args` does; the error about a removed flag names its replacement."""
    arguments, unknown = parser.parse_known_args(argv)
    flags = [word[2:].partition("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
    try:
        refuse_removed(flags)
    except InvalidInput as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments
