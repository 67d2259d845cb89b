"""The command line: `radixkv chat`, `radixkv demo`, `radixkv ps` and `radixkv serve`.

Knows arguments, terminals and how to say an error in one line. Importing it loads neither torch nor rich: a command's
module is imported when it runs.
"""

from radixkv.cli.main import main

__all__ = ["main"]
