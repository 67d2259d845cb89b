"""`radixkv disk FOLDER`: list the models whose text a disk cache has, and delete the folder of one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from radixkv.cli.entry_point import table
from radixkv.disk import folder as folders
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import size_text

_HEAD = ("NAME", "MODEL", "SIZE", "BLOCKS", "LAST USED")


def run(arguments: argparse.Namespace) -> int:
    """List the folders, last used first, or delete one; return 0. Raises InvalidInput."""
    if not os.path.isdir(arguments.folder):
        raise InvalidInput(f"{arguments.folder} is no folder")
    if arguments.delete is not None:
        folders.delete(arguments.folder, arguments.delete)
        print(f"deleted {arguments.delete}")
        return 0
    found = folders.listed(arguments.folder)
    if arguments.json:
        json.dump([each._asdict() for each in found], sys.stdout, indent=2)
        print()
    elif not found:
        print("No model has text here. An engine writes it with disk_cache=FOLDER.")
    else:
        print(table(_HEAD, [_row(each) for each in found], left=[0, 1, 4]))
    return 0


def _row(facts: folders.FolderFacts) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.used))
    return facts.name, facts.model, size_text(facts.nbytes), f"{facts.blocks:,}", used
