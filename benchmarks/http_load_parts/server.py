"""A server process, its metrics, and the CPU time of its event loop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .connection import Connection


@contextmanager
def served(threads: int, model: str = "tiny", *options: str) -> Iterator[tuple[int, str]]:
    """Yield the process id and the address of a server; print its log after an error."""
    command = [sys.executable, "-m", "radixkv", "serve", model, "--port", "0", "--quiet", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RADIXKV_MONITOR": "0"}
    with tempfile.TemporaryFile("a+") as log:
        server = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield server.pid, _address(server, log)
            server.send_signal(signal.SIGTERM)
            if server.wait(60):
                raise RuntimeError(f"the server ended with status {server.returncode}")
        except BaseException:
            print(f"the server logged:\n{_logged(log)}", file=sys.stderr)
            raise
        finally:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: TextIO) -> str:
    while server.poll() is None:
        if found := re.search(r"http://[^ ]+(?=/v1)", _logged(log)):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: exit status {server.returncode}")


def _logged(log: TextIO) -> str:
    log.seek(0)
    return log.read()


async def metrics(url: str) -> dict[str, float]:
    """Return the server's metrics, by name and labels."""
    async with await Connection.to(url) as connection:
        body = b"".join([part async for part in connection.parts("GET", "/metrics")]).decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in body.splitlines() if line[0] != "#"}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process since its start, in steps of 10 ms. Linux only."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")  # in user and in kernel mode


def loop_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's main thread, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
