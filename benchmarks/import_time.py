"""CPU seconds of `import radixkv` and `import radixkv.cache` (numpy included), each in fresh processes.

    python benchmarks/import_time.py [--processes 9]

Clock: `time.process_time()` around the import alone, the interpreter's own start left out; compiled files are warm
(one process runs before). Neither import may load torch. Bar: a median below 0.15 s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

MODULES = ("radixkv", "radixkv.cache")
BAR = 0.15
PROBE = """
import sys, time
begin = time.process_time()
import {module}
spent = time.process_time() - begin
assert "torch" not in sys.modules, "this import loads torch"
print(spent)
"""


def seconds(module: str, byte_code: str) -> float:
    command = [sys.executable, "-c", PROBE.format(module=module)]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": byte_code}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def in_processes(module: str, processes: int) -> list[float]:
    with tempfile.TemporaryDirectory() as byte_code:
        seconds(module, byte_code)
        return sorted(seconds(module, byte_code) for _ in range(processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=9)
    processes = parser.parse_args().processes
    medians = {}
    for module in MODULES:
        runs = in_processes(module, processes)
        medians[module] = round(statistics.median(runs), 4)
        met = "met" if medians[module] < BAR else "MISSED"
        print(
            f"import {module:16} {medians[module]:.3f} s of CPU ({runs[0]:.3f} to {runs[-1]:.3f})  bar < {BAR}: {met}"
        )
    print(json.dumps({"benchmark": "import_time", "bar": BAR, "processes": processes, "median_s": medians}))


if __name__ == "__main__":
    main()
