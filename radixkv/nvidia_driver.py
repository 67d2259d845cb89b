"""Read the version of the NVIDIA driver, and of the newest CUDA that it runs."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # for each major version of CUDA


def driver() -> tuple[str, int]:
    """Return the NVIDIA driver in words, and the major version of the newest CUDA that it runs; 0 without one."""
    found = re.search(r"\d+\.\d[\d.]*", DRIVER.read_text() if DRIVER.exists() else "")
    name, cuda = f"the NVIDIA driver {found[0] if found else ''}".rstrip(), ctypes.c_int()
    with suppress(OSError, AttributeError):  # a container without its GPUs lacks the library
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    if major := cuda.value // 1000:
        return f"{name} (CUDA {major}.{cuda.value % 1000 // 10})", major
    number = float(found[0].partition(".")[0]) if found else 0
    return name, max((newest for newest, oldest in OLDEST_DRIVERS.items() if oldest <= number), default=0)
