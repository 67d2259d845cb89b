"""Load a checkpoint with one field of its configuration changed, each in a process of its own with limits.

The result must be a refusal by radixkv that names the folder or the field, or a model with the logits of transformers.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from radixkv.errors import InvalidInput, RadixKVError, UnsupportedModel
from radixkv.models import adapter
from radixkv.models.rounding import relative_error
from tests.models.step_runner import in_chunks

ABSENT = object()
VALUES: dict[str, Any] = {
    "absent": ABSENT, "null": None, "text": "many", "list": [], "object": {}, "true": True, "fraction": 1.5,
    "negative": -1, "zero": 0, "one": 1, "large": 10**7, "huge": 10**15,
}  # fmt: skip
SECONDS, MEMORY = 20, 3 << 30  # of CPU time, and of address space on top of that at the start
_LONGEST = 1500  # characters of a message
_TOKENS = list(range(3, 40))
_STRIDE = 17  # of cases; no factor of 12, the cases a field


def cases(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, name of a value) for each field of a configuration, those of nested objects as "outer.inner"."""
    for name, value in config.items():
        inner = [f"{name}.{each}" for each in value] if isinstance(value, dict) else []
        for field in (name, *inner):
            yield from ((field, kind) for kind in VALUES)


def outcome(folder: Path, field: str, kind: str) -> str:
    """Return "refused: ...", "right" or a fault for a checkpoint with a changed `field`; in a process of its own."""
    changed = folder.parent / f"{folder.name}-changed"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(folder, changed)
    _change(changed / "config.json", field, VALUES[kind])
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        _run_limited(lambda: _outcome(changed, field), writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"FAULT: ended by {signal.Signals(os.WTERMSIG(status)).name} (the limit is {SECONDS} s of CPU time)"
    return said or f"FAULT: status {status}"


def _change(path: Path, field: str, value: Any) -> None:
    config = json.loads(path.read_text())
    *outer, name = field.split(".")
    place = config
    for each in outer:
        place = place[each]
    if value is ABSENT:
        del place[name]
    else:
        place[name] = value
    path.write_text(json.dumps(config))


def _run_limited(call: Callable[[], str], writer: int) -> None:
    """Write the result of `call` and end this process."""
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        used = int(sum(os.times()[:2])) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (used, used))
        os.write(writer, call().encode())
    except BaseException:
        os.write(writer, f"FAULT: {traceback.format_exc()[-1500:]}".encode())
    finally:
        os._exit(0)


def _outcome(folder: Path, field: str) -> str:
    try:
        loaded = adapter.load(str(folder))
    except RadixKVError as error:
        said = str(error)
        named = any(name in said for name in (folder.name, field.rpartition(".")[2], "ForCausalLM", "LMHeadModel"))
        if not isinstance(error, InvalidInput | UnsupportedModel) or len(said) > _LONGEST or not named:
            return f"FAULT: unclear {type(error).__name__}: {said}"
        return f"refused: {type(error).__name__}: {said}"
    [ours] = in_chunks(loaded, _TOKENS, [len(_TOKENS)])
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = own(input_ids=torch.tensor([_TOKENS]), use_cache=False).logits[0, -1]
    error_of = relative_error(ours, expected)
    return "right" if error_of <= 1e-3 else f"FAULT: differs from transformers by {error_of:.1e}"


def main() -> int:
    """Run every 17th case of folders (all in long runs), and those of FOLDER:FIELD; return 1 if there is a fault."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    faults = 0
    for place in sys.argv[1:]:
        folder, _, chosen = place.partition(":")
        assert _outcome(Path(folder), "") == "right"  # imports what each child would import otherwise
        for number, (field, kind) in enumerate(cases(json.loads((Path(folder) / "config.json").read_text()))):
            if field == chosen or (not chosen and number % _STRIDE == 0):
                found = outcome(Path(folder), field, kind)
                faults += found.startswith("FAULT")
                print(f"{place} {field} {kind}: {found}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
