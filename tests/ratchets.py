"""Count what makes the product hard to follow; `tests/test_house.py` has the bar of each count.

Each function returns the places that it counts in parsed modules. They import nothing; `tests.walk` runs a request. A
count over its bar is reported with the places that are new since the merge base with main.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("radixkv", "kernels/radixkv_kernels", "monitor/radixkv_monitor", "traces/radixkv_traces")
CACHE, ENGINE = "radixkv/cache/", "radixkv/engine/"
CORE = ("PrefixCache", "RadixTree", "Sequence", "BlockPool", "Node")
CORE += ("Core", "Scheduler", "Admission", "Work", "Request", "Stream")
PARTS = {"observer", "changed", "tracker", "events", "snapshots", "shares", "tier", "lower", "row", "loading"}
LIBRARIES = {"_parameters", "_replace"}  # of torch's modules and of named tuples; classes of ours have such names, too
LONG = 40
SIGNS = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)  # parts of the node around
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Modules = Mapping[str, list[ast.AST]]
"""The syntax nodes of modules by their paths, each module first."""


def parsed(top: Path, *folders: str) -> Modules:
    """Parse all modules in folders of a checkout."""
    paths = [path for folder in folders for path in sorted((top / folder).rglob("*.py"))]
    gc.disable()  # no node is garbage, and collections take longer than to parse
    try:
        return {str(path.relative_to(top)): [*ast.walk(ast.parse(path.read_bytes()))] for path in paths}
    finally:
        gc.enable()


def nodes(modules: Modules, *folders: str) -> Iterator[tuple[str, ast.AST]]:
    """Each syntax node in these folders, with its path."""
    for path, found in modules.items():
        if path.startswith(folders):
            for node in found:
                yield path, node


def place(path: str, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 0)}"


def subclasses(modules: Modules) -> list[str]:
    """Classes that inherit from a core class of cache or engine, directly or not."""
    parents: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path, found in modules.items():
        own = path.removesuffix(".py").removesuffix("/__init__").rpartition("/radixkv_")
        name = (own[1].removeprefix("/") + own[2]).replace("/", ".")
        imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in found
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in found:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                parents[name, node.name] = {imported.get(base, (name, base)) for base in bases}
    core = {key for key in parents if key[1] in CORE and key[0].startswith(("radixkv.cache", "radixkv.engine"))}
    below = set(core)
    # Packages export their classes: (radixkv.cache, Sequence) is (radixkv.cache.sequence, Sequence).
    while added := {key for key, bases in parents.items() if key not in below and any(_is(b, below) for b in bases)}:
        below |= added
    return [".".join(key) for key in sorted(below - core)]


def _is(base: tuple[str, str], found: set[tuple[str, str]]) -> bool:
    return any(name == base[1] and module.startswith(base[0]) for module, name in found)


def casts(modules: Modules) -> list[str]:
    """Calls of `cast` in cache and engine."""
    return [place(path, node) for path, node in nodes(modules, CACHE, ENGINE) if _called(node) == "cast"]


def probing(modules: Modules) -> list[str]:
    """Calls of `getattr` with a default and of `hasattr`, and changes of `__class__`, in cache and engine.

    A tokenizer is no object of ours and may be asked.
    """
    return [
        f"{place(path, node)}: {ast.unparse(node)}"
        for path, node in nodes(modules, CACHE, ENGINE)
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and _called(node) == "getattr" and len(node.args) == 3 and _is_ours(node))
        or (isinstance(node, ast.Call) and _called(node) == "hasattr" and _is_ours(node))
    ]


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return ""


def _is_ours(call: ast.Call) -> bool:
    return not ast.unparse(call.args[0]).endswith("tokenizer")


def guards(modules: Modules) -> list[str]:
    """Comparisons in the cache, but for its invariants, of an optional part with None: by its name, see PARTS."""
    return [
        f"{place(path, node)}: {ast.unparse(node)}"
        for path, node in nodes(modules, CACHE)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
        and ast.unparse(node.comparators[0]) == "None"
        and ast.unparse(node.left).rpartition(".")[2].removeprefix("_") in PARTS
        and "invariants.py" not in path
    ]


def private_names(modules: Modules) -> list[str]:
    """Uses of a `_name` that a class of ours declares, of any object but self, cls and the class around.

    Invariants may read them: modules of this name, and functions named `check`.
    """
    declared = {
        name for _, node in nodes(modules, *SOURCES) if isinstance(node, ast.ClassDef) for name in _declared(node)
    }
    declared -= LIBRARIES
    return [
        f"{place(path, each)}: {ast.unparse(each)}"
        for path, (module, *_) in modules.items()
        if not path.endswith("invariants.py")
        for each in _foreign(module, declared, "")
    ]


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """The private names of a class: its methods, its fields, and what its methods set."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _private(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield from _private(each.target.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield from _private(each.attr)


def _private(name: str) -> list[str]:
    return [name] if name.startswith("_") and not name.startswith("__") else []


def _foreign(node: ast.AST, names: set[str], around: str) -> Iterator[ast.Attribute]:
    """The attributes of these names, of other objects, below a node; `around` is the class that it is in."""
    if isinstance(node, ast.FunctionDef) and node.name.strip("_") == "check":
        return
    around = node.name if isinstance(node, ast.ClassDef) else around
    own = ("self", "cls", "super()", around)
    if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) not in own:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _foreign(child, names, around)


def fields_of(modules: Modules, name: str) -> list[str]:
    """The fields of a class of the engine: annotated in its body, or set by one of its methods."""
    (kind,) = [node for _, node in nodes(modules, ENGINE) if isinstance(node, ast.ClassDef) and node.name == name]
    found = [
        each.target.id for each in kind.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    found += [
        each.attr
        for each in ast.walk(kind)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    ]
    return list(dict.fromkeys(found))


def long_functions(modules: Modules) -> list[str]:
    """Functions of more than 40 lines, from `def` to the last line."""
    return [
        f"{place(path, node)}: {node.name}"
        for path, node in nodes(modules, *SOURCES)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG
    ]


COUNTS: dict[str, Callable[[Modules], list[str]]] = {
    each.__name__: each for each in (subclasses, casts, probing, guards, private_names, long_functions)
}


def counted(modules: Modules) -> dict[str, list[str]]:
    """The places of all counts."""
    fields = {f"fields of {name}": fields_of(modules, name) for name in ("Request", "Stream")}
    return {name: count(modules) for name, count in COUNTS.items()} | fields


def size(found: list[ast.AST]) -> int:
    """Count syntax nodes without docstrings: a joined line or a shorter name does not lower it."""
    kinds = Counter(map(type, found))
    documented = [node for node in found if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False)]
    return sum(count for kind, count in kinds.items() if not issubclass(kind, SIGNS)) - 2 * len(documented)


# ---- reports


def report(name: str, most: int, found: Iterable[str], before: Iterable[str]) -> str:
    """Say how many places there are, how many there may be, and which are new; the lines of the places do not count."""
    places = list(found)
    known = Counter(map(_without_line, before))
    new = [place for place in places if not known[_without_line(place)] or known.subtract([_without_line(place)])]
    return "\n".join([f"{name}: {len(places)} found, {most} allowed; new since the merge base:", *new])


def report_sizes(name: str, most: int, found: Modules, before: Modules) -> str:
    """Say how many nodes there are, how many there may be, and which modules have more or fewer than before."""
    now, then = ({path: size(nodes) for path, nodes in modules.items()} for modules in (found, before))
    grown = {path: now.get(path, 0) - then.get(path, 0) for path in now | then}
    lines = [f"{path}: {more:+}" for path, more in sorted(grown.items(), key=lambda item: -item[1]) if more]
    return "\n".join([f"{name}: {sum(now.values())} nodes found, {most} allowed; since the merge base:", *lines])


def _without_line(place: str) -> str:
    return re.sub(r":\d+", "", place)


def merge_base(folder: Path) -> Path:
    """Unpack the commit at which this branch left main; on main, HEAD if it was edited, otherwise its parent."""
    head = _git("rev-parse", "HEAD")
    base = next(filter(None, (_git("merge-base", "HEAD", main) for main in ("main", "origin/main"))), head)
    changed = _git("status", "--porcelain", "--untracked-files=no")
    commit = f"{head}~" if base == head and not changed else base
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        opened.extractall(folder, filter="data")
    return folder


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
