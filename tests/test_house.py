"""The house rules that no linter keeps: source roots, lazy imports, public names, the tree of errors, and ratchets."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv import errors
from tests import ratchets

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "triton", "numpy", "rich", "jinja2", "tokenizers", "safetensors")

WALK = {"functions": 214, "files": 31, "returns": 92}
"""How much of the product one request of one token may visit: `python -m tests.walk` prints it."""

MOST = {
    "subclasses": 0,
    "casts": 5,
    "probing": 4,
    "guards": 20,
    "private_names": 16,
    "fields of Request": 17,
    "fields of Stream": 14,
    "long_functions": 18,
}
"""How often the product may have what makes it hard to follow. `tests.ratchets` has the rule of each count.

A change that lowers a count lowers its number here, too. No change raises one.
"""

NODES = {"product": 379_060, "tests": 457_450, "benchmarks, scripts, examples": 77_760}
"""How many syntax nodes the code may have, without docstrings."""


def imported_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("folder", ["kernels", "monitor", "traces"])
def test_source_roots_are_no_packages(folder: str) -> None:
    """A top-level package `kernels` would shadow the Hugging Face package that transformers looks for."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "package",
    ["radixkv", "kernels/radixkv_kernels", "monitor/radixkv_monitor", "traces/radixkv_traces"],
)
def test_every_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_importing_radixkv_imports_nothing_heavy() -> None:
    assert not imported_by("import radixkv") & set(HEAVY)


def test_the_files_of_a_model_are_checked_without_torch() -> None:
    assert not imported_by("import radixkv.cli.model_check") & {"torch", "transformers"}


def test_importing_the_cache_imports_numpy_and_sortedcontainers_only() -> None:
    ours = imported_by("import radixkv.cache") - imported_by("pass") - set(sys.stdlib_module_names)
    assert ours == {"radixkv", "numpy", "sortedcontainers"}


def test_the_public_names_of_the_cache() -> None:
    cache = importlib.import_module("radixkv.cache")
    assert sorted(cache.__all__) == [
        "CacheStats",
        "CachedRun",
        "Explanation",
        "Hint",
        "Match",
        "Observer",
        "POLICIES",
        "Pin",
        "PrefixCache",
        "Sequence",
        "WritePlan",
    ]
    for name in cache.__all__:
        assert getattr(cache, name).__doc__, name


def test_every_error_is_in_the_tree() -> None:
    """One line per class, indented below its parent."""
    raised = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert raised["RadixKVError"].__bases__ == (Exception,)
    drawn = drawn_tree()
    assert set(drawn) == set(raised)
    for name, parent in drawn.items():
        if parent is not None:
            assert raised[name].__bases__[0] is raised[parent]
        assert issubclass(raised[name], errors.RadixKVError)
        assert raised[name].__doc__


def drawn_tree() -> dict[str, str | None]:
    """name -> parent, read from the docstring of `radixkv.errors`."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines()[1:]:
        name = line.lstrip(" │├└─").split(" ")[0]
        if not name.isidentifier():
            continue
        column = line.index(name)
        above = [(where, who) for where, who in above if where < column]
        parents[name] = above[-1][1] if above else None
        above.append((column, name))
    return parents


def test_a_reader_of_one_request_visits_no_more(tmp_path: Path) -> None:
    found, functions = walked(ROOT)
    if over := {name: f"{found[name]} found, {most} allowed" for name, most in WALK.items() if found[name] > most}:
        before = walked(ratchets.merge_base(tmp_path))[1]
        pytest.fail(f"{over}; new since the merge base: " + "\n".join(dict.fromkeys(functions) - before.keys()))


def walked(top: Path) -> tuple[dict[str, int], dict[str, None]]:
    """What `tests.walk` counts and visits, in a process of its own: other tests fill caches, and would shorten it."""
    paths = os.pathsep.join(str(top / each) for each in (".", "kernels"))
    command, environment = [sys.executable, "-m", "tests.walk"], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout)), dict.fromkeys(done.stderr.splitlines())


def test_the_product_gets_no_harder_to_follow(tmp_path: Path) -> None:
    """One test, because each process would read all sources."""
    modules = ratchets.parsed(ROOT, *ratchets.SOURCES)
    found, larger = ratchets.counted(modules), sum(map(ratchets.size, modules.values())) > NODES["product"]
    assert found.keys() == MOST.keys()
    over = [name for name in MOST if len(found[name]) > MOST[name]]
    if over or larger:
        base = ratchets.parsed(ratchets.merge_base(tmp_path), *ratchets.SOURCES)
        before = ratchets.counted(base)
        reports = [ratchets.report(name, MOST[name], found[name], before[name]) for name in over]
        reports += [ratchets.report_sizes("product", NODES["product"], modules, base)] if larger else []
        pytest.fail("\n\n".join(reports))


@pytest.mark.parametrize("folders", [("tests",), ("benchmarks", "scripts", "examples")], ids=", ".join)
def test_other_code_gets_no_larger(folders: tuple[str, ...], tmp_path: Path) -> None:
    name, found = ", ".join(folders), ratchets.parsed(ROOT, *folders)
    if sum(map(ratchets.size, found.values())) > NODES[name]:
        base = ratchets.parsed(ratchets.merge_base(tmp_path), *folders)
        pytest.fail(ratchets.report_sizes(name, NODES[name], found, base))


MODULES = {
    "radixkv/cache/__init__.py": "from radixkv.cache.tree import RadixTree",
    "radixkv/cache/tree.py": """
class RadixTree:
    def __init__(self):
        self.observer = self._index = None

    def _other(self, other):
        return RadixTree._other, self._index, other._index, other._foreign

    def check(self, other):
        return other._index
""",
    "radixkv/cache/host.py": """
from typing import cast
from radixkv import cache
from radixkv.cache import RadixTree

class HostTree(RadixTree):
    def grow(self, other, tokenizer):
        if self.observer is not None and other is None:
            cast(RadixTree, other)._index.add(getattr(other, "moves", None), getattr(tokenizer, "moves", None))
        self.__class__ = HostTree

class DiskTree(HostTree): ...
""",
    "radixkv/cache/invariants.py": "def recount(tree):\n    assert tree.observer is not None and tree._index",
    "radixkv/engine/request.py": """
class Request:
    prompt: str
    def f(self):
        self.n = self.n = 1

class Stream: ...
""",
    "radixkv/long.py": "def short():\n" + "    pass\n" * 39 + "def long():\n" + "    pass\n" * 40,
}


def test_what_the_ratchets_count(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = ratchets.counted(ratchets.parsed(tmp_path, *ratchets.SOURCES))
    assert {name: len(places) for name, places in found.items()} == {
        "subclasses": 2,
        "casts": 1,
        "probing": 2,
        "guards": 1,
        "private_names": 2,
        "long_functions": 1,
        "fields of Request": 2,
        "fields of Stream": 0,
    }
    assert found["fields of Request"] == ["prompt", "n"]


def test_the_reports_of_ratchets() -> None:
    found, before = ["a.py:9: f", "a.py:20: f", "b.py:1: g"], ["a.py:2: f", "c.py:1: h"]
    assert ratchets.report("casts", 2, found, before) == (
        "casts: 3 found, 2 allowed; new since the merge base:\na.py:20: f\nb.py:1: g"
    )
    small, large = ([*ast.walk(ast.parse(text))] for text in ("x", '"""Doc."""\ndef f(x):\n    """Doc."""\n    -x'))
    assert (ratchets.size(small), ratchets.size(large)) == (3, 7)
    assert ratchets.report_sizes("tests", 9, {"a.py": large, "b.py": small}, {"a.py": small, "c.py": small}) == (
        "tests: 10 nodes found, 9 allowed; since the merge base:\na.py: +4\nb.py: +3\nc.py: -3"
    )
