"""The house rules that no linter keeps: source roots, lazy imports, public names, the tree of errors, and ratchets."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv import errors
from tests import ratchets

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "triton", "numpy", "rich", "jinja2", "tokenizers", "safetensors")

WALK = {"functions": 218, "files": 31, "returns": 92}
"""How much of the product one request of one token may visit: `python -m tests.walk` prints it."""

MOST = {
    "subclasses": 0,
    "casts": 5,
    "probing": 5,
    "guards": 43,
    "private_names": 16,
    "fields of Request": 17,
    "fields of Stream": 14,
    "long_functions": 18,
}
"""How often the product may have what makes it hard to follow. `tests.ratchets` has the rule of each count.

A change that lowers a count lowers its number here, too. No change raises one.
"""


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


def test_a_reader_of_one_request_visits_no_more() -> None:
    found = walked()
    assert all(found[counted] <= most for counted, most in WALK.items()), found


def walked() -> dict[str, int]:
    """What `tests.walk` counts, in a process of its own: other tests fill caches, and would shorten the walk."""
    done = subprocess.run([sys.executable, "-m", "tests.walk"], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_the_product_gets_no_harder_to_follow() -> None:
    """One test, because each process would read all sources."""
    counted = {name: count() for name, count in ratchets.COUNTS.items()}
    counted |= {f"fields of {name}": ratchets.fields_of(name) for name in ("Request", "Stream")}
    assert counted.keys() == MOST.keys()
    for name, found in counted.items():
        assert len(found) <= MOST[name], "\n".join([name, *found])


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
    "radixkv/engine/request.py": "class Request:\n    prompt: str\n    def f(self):\n        self.n = self.n = 1",
    "radixkv/long.py": "def short():\n" + "    pass\n" * 39 + "def long():\n" + "    pass\n" * 40,
}


def test_what_the_ratchets_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ratchets, "ROOT", tmp_path)
    monkeypatch.setattr(ratchets, "sources", ratchets.sources.__wrapped__)
    assert {name: len(count()) for name, count in ratchets.COUNTS.items()} == {
        "subclasses": 2,
        "casts": 1,
        "probing": 2,
        "guards": 1,
        "private_names": 2,
        "long_functions": 1,
    }
    assert ratchets.fields_of("Request") == ["prompt", "n"]
