"""Unpack real chat templates into .templates: those of llama.cpp, from the source package of its Python binding.

python -m tests.templates.install
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".templates"
_PACKAGE = "llama-cpp-python==0.3.36"
_INSIDE = "vendor/llama.cpp/models/templates/"


def main() -> None:
    """Download the source package, and keep its templates. It is not built."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*command, "--dest", scratch, _PACKAGE], check=True)
        [archive] = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                if _INSIDE in member.name and member.name.endswith(".jinja") and (file := files.extractfile(member)):
                    (FOLDER / Path(member.name).name).write_bytes(file.read())
    print(f"{len(list(FOLDER.glob('*.jinja')))} templates in {FOLDER.name}")


if __name__ == "__main__":
    main()
