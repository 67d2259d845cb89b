"""Build sdist and wheel, install the wheel into fresh environments, and run every command outside of the checkout.

    python scripts/dist.py            # the wheel alone, then with each extra, from the package index; then fill dist/
    python scripts/dist.py --beside   # the wheel alone, beside the packages of this Python, without a download

The wheel is built from the sdist, so both have all files. Commands run in an empty folder, without the variables that
lead to a checkout. Extras share the first environment, so that torch is installed once. The status is 1 if one fails.
"""

import argparse
import os
import shlex
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import copytree, ignore_patterns
from subprocess import DEVNULL, PIPE, STDOUT, Popen, run
from tempfile import TemporaryDirectory
from threading import Timer
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
PACKAGES = ("radixkv", "kernels/radixkv_kernels", "monitor/radixkv_monitor", "traces/radixkv_traces")
CHOOSE = """from radixkv import Engine, SamplingParams; engine = Engine.load("tiny", num_blocks=64)
print(engine.generate(["Which?"], SamplingParams(choice=["maybe"]))[0].text)"""
LOGS = """import pyarrow, pyarrow.parquet; said = [{"role": name, "content": "Hi"} for name in ("user", "assistant")]
pyarrow.parquet.write_table(pyarrow.table({"conversation_id": ["a"], "conversation": [said]}), "logs.parquet")"""
MODEL = f"""import pathlib, sys; sys.path.insert(0, {str(ROOT)!r})
from tests.cli.gguf_chat_model import write_chat_model; write_chat_model(pathlib.Path("model.gguf"), "Q5_0")"""
COMMANDS: dict[str, list[tuple[str, ...]]] = {  # by extra: a command, a text that it prints, its standard input
    "": [
        ("radixkv demo", "Savings by sharing"),
        ("radixkv chat tiny", "Your name is Nora.", "My name is Nora.\nWhat is my name?\n"),
        ("radixkv doctor tiny", "ok       self-test"),
        ("radixkv plan llama-3.1-8b --memory 8GiB", "4,096 blocks"),
        ("radixkv-replay simulate sample:conversation --capacity 2.5% --policy lru", "0.1207"),
        ("radixkv-monitor --demo --once", "hit rate"),
    ],
    "serve": [("radixkv ps", "tiny"), ("radixkv-monitor --once", "tiny, cpu")],
    "gguf": [(shlex.join([sys.executable, "-c", MODEL]), ""), ("radixkv convert model.gguf folder", "")],
    "grammar": [(shlex.join(["python", "-c", CHOOSE]), "maybe")],
    "parquet": [(shlex.join(["python", "-c", LOGS]), ""), ("radixkv-replay import logs.parquet", "input_length")],
    "plots": [("radixkv-replay run sample:chat --limit 1 --out made", ""), ("radixkv-replay report made", ".png")],
}
SERVER = "radixkv serve tiny --port 0"
"""It runs during the commands of the extra `serve`."""


def build(folder: Path) -> Path:
    """Build both archives in `folder`, by the packages of this Python, and return the wheel."""
    for command in ("hatchling build -t sdist -d", "pip wheel --no-build-isolation --no-deps -w"):
        print(f"python -m {command} {folder}", flush=True)
        words = [sys.executable, "-m", *command.split(), folder, *folder.glob("*.tar.gz")]
        run(words, cwd=ROOT, check=True, stdout=DEVNULL)
    return next(folder.glob("*.whl"))


def check_files(wheel: Path, root: Path = ROOT) -> None:
    """Exit unless the wheel has exactly the files of the packages: every asset, and no test."""
    files = [(file, (root / name).parent) for name in PACKAGES for file in (root / name).rglob("*") if file.is_file()]
    wanted = {file.relative_to(parent).as_posix() for file, parent in files if "__pycache__" not in file.parts}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if found != wanted:
        sys.exit(f"{wheel.name} lacks {sorted(wanted - found)}, and has {sorted(found - wanted)} of no package")


class Environment:
    """A fresh environment in `folder`: the wheel, the packages in the folders `shared`, and `requirements`."""

    def __init__(self, folder: Path, shared: list[str], wheel: Path, *requirements: str) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(shared))  # .pth files in these folders are not read
        (work := folder / "work").mkdir(mode=0o700)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RADIXKV"))}
        variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(work), "COLUMNS": "120"}
        self.packages = [str(packages), *shared]
        self._how = {"cwd": work, "env": variables, "text": True, "stdout": PIPE, "stderr": STDOUT}
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
        for what in (["--no-index", "--no-deps", "--ignore-installed", str(wheel)], *([each] for each in requirements)):
            print(f"pip install {' '.join(what)}", flush=True)
            run([*pip, *what], check=True, env=variables)
        where = self.run("python -c 'import radixkv as r, radixkv_traces as t; print(r.__file__, t.__file__)'")
        if not all(Path(file).is_relative_to(packages) for file in where.split()):
            sys.exit(f"not the wheel is imported, but {where}")

    def run(self, command: str, expected: str = "", given: str = "", status: int = 0) -> str:
        """Return the output of a command; exit unless its status is `status` and it prints `expected`."""
        begin = time.perf_counter()
        ended = run(shlex.split(command), input=given, timeout=300, **self._how)
        if ended.returncode != status or expected not in ended.stdout:
            sys.exit(f"{command}: status {ended.returncode}, not {status} and {expected!r}:\n{ended.stdout[-4000:]}")
        print(f"{time.perf_counter() - begin:6.1f} s  {command.splitlines()[0]}", flush=True)
        return str(ended.stdout)

    def check(self, extra: str) -> None:
        """Run the commands of an extra; those of `serve` while its server runs."""
        with self._serving() if extra == "serve" else nullcontext():
            for command in COMMANDS[extra]:
                self.run(*command)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        print(f"          {SERVER}", flush=True)
        with Popen(shlex.split(SERVER), stdin=DEVNULL, **self._how) as process:
            (limit := Timer(120, process.kill)).start()
            try:
                words = (word for line in process.stdout for word in line.split())
                url = next((word for word in words if word.startswith("http://")), "it printed no URL")
                body = b'{"model": "tiny", "prompt": "Hi"}'
                request = Request(url + "/completions", body, {"Content-Type": "application/json"})
                with urlopen(request, timeout=60) as reply:
                    found = b"choices" in reply.read()
                yield
                process.terminate()
                if process.wait() != 0 or not found:
                    sys.exit(f"{SERVER}: choices replied: {found}; status after SIGTERM: {process.returncode}")
            finally:
                limit.cancel()
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", action="store_true", help="the wheel alone, beside the packages of this Python")
    beside = parser.parse_args().beside
    with TemporaryDirectory(prefix="radixkv-") as folder:
        check_files(wheel := build(Path(folder)))
        shared = [path for path in sys.path if beside and path.endswith("site-packages")]
        alone = Environment(wheel.parent / "alone", shared, wheel, *([] if beside else [str(wheel)]))
        alone.check("")
        alone.check("serve") if beside else alone.run(SERVER, "pip install 'radixkv[serve]'", status=1)
        if not beside:
            for extra in [*COMMANDS][1:]:
                Environment(wheel.parent / extra, alone.packages, wheel, f"{wheel}[{extra}]").check(extra)
            copytree(folder, ROOT / "dist", ignore=ignore_patterns("alone", *COMMANDS), dirs_exist_ok=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
