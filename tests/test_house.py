"""The house rules that no linter keeps: source roots, lazy imports, public names, the tree of errors."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv import errors

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "triton", "numpy", "rich", "jinja2", "tokenizers", "safetensors")


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
