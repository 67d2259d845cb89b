"""Change single places of the product, and run the tests that should fail then.

    python scripts/mutants.py                             120 mutants of this checkout, drawn by a fixed seed
    python scripts/mutants.py --checkout OLD --only 7,31  two of them in another checkout, with its own tests

Mutants are drawn from lines that a base commit and this checkout have in common, in every folder but the monitor, at
least three in a folder. A mutant has one syntactic change. The checkout is edited while its tests run, so use a clone.
Each mutant runs the tests that are named after its module, import it, or lie in its folder, until one fails or a limit
of CPU time is reached. A line of JSON for each mutant goes to stderr, and the last line has the numbers of verdicts.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TOP = Path(__file__).resolve().parent.parent
SOURCES = ("radixkv", "kernels", "traces")
OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
OPERATORS |= {"in": "not in", "not in": "in", "+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "+"}
OPERATORS |= {"&": "|", "|": "&", "<<": ">>", ">>": "<<", "and": "or", "or": "and"}
SKIPPED = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # an assert has no behaviour that a test could see
BASE = "5f9d9bd7"
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=no", "-rfE", "-m", "not long"]
LEFT_OUT = {"real", "clients", "fleet", "templates", "interpreted"}  # `make test` does not collect these folders


class Mutant(NamedTuple):
    """A change of one line of a function; `nth` counts equal lines of functions of this name."""

    path: str
    function: str
    line: str
    nth: int
    start: int
    end: int
    new: str


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the parts of a node that have mutants, with their new text."""
    match node:
        case ast.Compare(left, [_], [right]):
            old = ast.unparse(node)[len(ast.unparse(left)) : -len(ast.unparse(right))].strip()
            if old in OPERATORS:
                yield node, f"{ast.unparse(left)} {OPERATORS[old]} {ast.unparse(right)}"
        case ast.BinOp(left, operator, right):
            old = ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b")))[2:-2]
            if old in OPERATORS and not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
                yield node, f"(({ast.unparse(left)}) {OPERATORS[old]} ({ast.unparse(right)}))"
        case ast.BoolOp(operator, values):
            word = "or" if isinstance(operator, ast.And) else "and"
            yield node, "(" + f" {word} ".join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"bool({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            yield node, str(not value)
        case ast.Constant(int(value)):
            yield node, str(value + 1)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Call(function, [first, second, *rest], keywords):
            equal = ast.unparse(first) == ast.unparse(second) or ast.unparse(function) in ("min", "max")
            if not equal and not isinstance(first, ast.Starred):
                yield node, ast.unparse(ast.Call(function, [second, first, *rest], keywords))


def visited(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield nodes below with the names of their functions, without annotations."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED) and name not in ("annotation", "returns"):
                inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
                yield child, inner
                yield from visited(child, inner)


def lines(text: str) -> dict[int, tuple[str, str, int]]:
    """Return the lines of functions, stripped, by number, with the function and the count of equal lines before."""
    owners: dict[int, str] = {}
    for node, function in visited(ast.parse(text)):
        if function and isinstance(node, ast.expr | ast.stmt):
            owners[node.lineno] = function
    seen, found = Counter[tuple[str, str]](), dict[int, tuple[str, str, int]]()
    for number, line in enumerate(text.splitlines(), 1):
        if number in owners:
            key = owners[number], line.strip()
            found[number] = (*key, seen[key])
            seen[key] += 1
    return found


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    found, rows = lines(text), text.splitlines()
    for node, _ in visited(ast.parse(text)):
        for part, new in changes(node):
            at = part.lineno  # type: ignore[attr-defined]
            if at == part.end_lineno and at in found:  # type: ignore[attr-defined]
                indent = len(rows[at - 1]) - len(rows[at - 1].lstrip())
                yield Mutant(path, *found[at], part.col_offset - indent, part.end_col_offset - indent, new)  # type: ignore[attr-defined]


def index(texts: dict[str, str]) -> dict[tuple[str, str, int], dict[str, int]]:
    """Return paths and numbers of the lines of all modules."""
    found: dict[tuple[str, str, int], dict[str, int]] = {}
    for path, text in texts.items():
        for number, key in lines(text).items():
            found.setdefault(key, {})[path] = number
    return found


def drawn(base: dict[str, str], now: dict[str, str], seed: int, count: int) -> list[tuple[int, Mutant]]:
    """Draw mutants of different lines, three of each folder first; numbers stay when other lines go."""
    found, standing = [mutant for path, text in base.items() for mutant in mutants(path, text)], index(now)
    random.Random(seed).shuffle(found)
    order, seen = list[tuple[bool, int, Mutant]](), Counter[str]()
    for at, mutant in enumerate({mutant[:4]: mutant for mutant in found}.values()):
        folder = os.path.dirname(mutant.path)
        seen[folder] += 1
        order.append((seen[folder] > 3, at, mutant))
    numbered = enumerate((mutant for *_, mutant in sorted(order)), 1)
    return [(number, mutant) for number, mutant in numbered if mutant[1:4] in standing][:count]


def read(top: Path) -> dict[str, str]:
    """Read the modules of the product in a checkout."""
    paths = [path for source in SOURCES for path in sorted((top / source).rglob("*.py"))]
    return {str(path.relative_to(top)): path.read_text(encoding="utf-8") for path in paths}


def read_commit(commit: str) -> dict[str, str]:
    """Read the modules of the product in a commit."""
    archive = subprocess.check_output(["git", "-C", str(TOP), "archive", commit, *SOURCES])
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        files = {member.name: opened.extractfile(member) for member in opened if member.name.endswith(".py")}
    return {name: file.read().decode() for name, file in files.items() if file}


def tests_of(path: str, top: Path) -> list[str]:
    """Return test files, the likeliest to fail first: named after the module, importing it, near it."""
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    dotted = dotted.removeprefix("kernels.").removeprefix("traces.")
    (parent, _, name), folders = dotted.rpartition("."), {*dotted.replace("radixkv_", "radixkv.").split(".")[1:-1]}
    imported = re.compile(rf"{re.escape(dotted)}\b|from {re.escape(parent)} import .*\b{name}\b")
    found = list[tuple[int, str]]()
    for test in sorted((top / "tests").rglob("test_*.py")):
        place = test.relative_to(top)
        score = 3 * (f"_{name}" in test.stem) + 2 * bool(imported.search(test.read_text(encoding="utf-8")))
        score += len(folders & {*place.parts[1:-1]})
        if score and not LEFT_OUT & {*place.parts}:
            found.append((-score, str(place)))
    return [test for _, test in sorted(found)]


def run(top: Path, tests: list[str], options: list[str], seconds: int) -> tuple[str, str]:
    """Run tests in a process until one fails or its CPU time is over; return the verdict and the first failure."""
    report = top / ".mutant.log"
    if not (child := os.fork()):
        os.setsid()
        os.chdir(top)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        out = os.open(report, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os._exit(pytest.main([*options, *tests]))
    ended, begin = (0, 0), time.monotonic()
    while ended == (0, 0):
        time.sleep(0.1)
        if time.monotonic() - begin > 20 * seconds:
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that its tests started
    if os.WIFSIGNALED(ended[1]):
        return "unfinished", f"signal {os.WTERMSIG(ended[1])}"
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", report.read_text(errors="replace"), re.MULTILINE)
    return ("killed", first[1]) if first else ("survived", f"status {os.WEXITSTATUS(ended[1])}")


def main() -> None:
    """Try the mutants, and print verdicts."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    arguments.add_argument("--base", default=BASE, help="the commit that the lines must have, too")
    arguments.add_argument("--checkout", type=Path, default=TOP, help="the checkout to change and to test")
    arguments.add_argument("--seed", type=int, default=58)
    arguments.add_argument("--count", type=int, default=120)
    arguments.add_argument("--only", type=lambda text: {*map(int, text.split(","))}, help="numbers of mutants")
    arguments.add_argument("--seconds", type=int, default=60, help="of CPU time for the tests of each mutant")
    arguments.add_argument("--known", type=Path, help="lines of an earlier run: its failed tests run first")
    arguments.add_argument("--list", action="store_true", help="print the mutants, and run none")
    arguments.add_argument("options", nargs="*", help="options of pytest, such as --deselect=TEST, after --")
    given = arguments.parse_args()
    top, verdicts = given.checkout.resolve(), Counter[str]()
    known = map(json.loads, given.known.read_text().splitlines() if given.known else ())
    failed = {told["number"]: told["by"].partition("[")[0] for told in known if told.get("verdict") == "killed"}
    texts = read(top)
    standing = index(texts)
    roots = [str(top / root) for root in ("", "kernels", "monitor", "traces")]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(roots)}
    sys.path[:0] = roots
    for number, mutant in drawn(read_commit(given.base), read(TOP), given.seed, given.count):
        if (given.only and number not in given.only) or mutant[1:4] not in standing:
            continue
        paths = standing[mutant[1:4]]
        path = mutant.path if mutant.path in paths else next(iter(paths))
        rows = texts[path].splitlines(keepends=True)
        row = rows[paths[path] - 1]
        indent = len(row) - len(row.lstrip())
        changed = row[: indent + mutant.start] + mutant.new + row[indent + mutant.end :]
        told: dict[str, Any] = {"number": number, "place": f"{path}:{paths[path]}"}
        told |= {"old": row.strip(), "new": changed.strip()}
        if not given.list:
            rows[paths[path] - 1] = changed
            (top / path).write_text("".join(rows), encoding="utf-8")
            begin, tests, options = time.monotonic(), tests_of(path, top), [*OPTIONS, *given.options]
            try:
                ended = run(top, [failed[number]], options, given.seconds) if number in failed else ("", "")
                if ended[0] != "killed":
                    ended = run(top, tests, options, given.seconds) if tests else ("survived", "no tests")
                told["verdict"], told["by"] = ended
            finally:
                (top / path).write_text(texts[path], encoding="utf-8")
            told["seconds"] = round(time.monotonic() - begin)
            verdicts[told["verdict"]] += 1
        print(json.dumps(told), file=sys.stderr, flush=True)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
