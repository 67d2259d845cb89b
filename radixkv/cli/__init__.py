"""The command line: `radixkv chat`, `demo`, `ps`, `plan`, `doctor`, `serve` and `convert`.

Importing it loads neither torch nor rich: the module of a command is imported when the command runs.
"""

from radixkv.cli.main import main

__all__ = ["main"]
