"""Count what makes the product hard to follow; `tests/test_house.py` has the bar of each count.

Each function returns the places that it counts. They read the sources and import nothing; `tests.walk` runs a request.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("radixkv", "kernels/radixkv_kernels", "monitor/radixkv_monitor", "traces/radixkv_traces")
CACHE, ENGINE = "radixkv/cache/", "radixkv/engine/"
CORE = ("PrefixCache", "RadixTree", "Sequence", "BlockPool", "Node")
CORE += ("Core", "Scheduler", "Admission", "Work", "Request", "Stream")
PARTS = {"observer", "changed", "tracker", "events", "snapshots", "shares", "tier", "lower", "row", "loading"}
LIBRARIES = {"_parameters", "_replace"}  # of torch's modules and of named tuples; classes of ours have such names, too
LONG = 40


@cache
def sources() -> dict[str, ast.Module]:
    """All modules of the product, by their paths."""
    paths = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def nodes(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    """Each syntax node in these folders, with its place."""
    for path, module in sources().items():
        if path.startswith(folders):
            for node in ast.walk(module):
                yield f"{path}:{getattr(node, 'lineno', 0)}", node


def subclasses() -> list[str]:
    """Classes that inherit from a core class of cache or engine, directly or not."""
    parents: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path, module in sources().items():
        own = path.removesuffix(".py").removesuffix("/__init__").rpartition("/radixkv_")
        name = (own[1].removeprefix("/") + own[2]).replace("/", ".")
        imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                parents[name, node.name] = {imported.get(base, (name, base)) for base in bases}
    found = {key for key in parents if key[1] in CORE and key[0].startswith(("radixkv.cache", "radixkv.engine"))}
    core = set(found)
    # Packages export their classes: (radixkv.cache, Sequence) is (radixkv.cache.sequence, Sequence).
    while added := {key for key, bases in parents.items() if key not in found and any(_is(b, found) for b in bases)}:
        found |= added
    return [".".join(key) for key in sorted(found - core)]


def _is(base: tuple[str, str], found: set[tuple[str, str]]) -> bool:
    return any(name == base[1] and module.startswith(base[0]) for module, name in found)


def casts() -> list[str]:
    """Calls of `cast` in cache and engine."""
    return [place for place, node in nodes(CACHE, ENGINE) if _called(node) == "cast"]


def probing() -> list[str]:
    """Calls of `getattr` with a default and of `hasattr`, and changes of `__class__`, in cache and engine.

    A tokenizer is no object of ours and may be asked.
    """
    return [
        f"{place}: {ast.unparse(node)}"
        for place, node in nodes(CACHE, ENGINE)
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


def guards() -> list[str]:
    """Comparisons in the cache, but for its invariants, of an optional part with None: by its name, see PARTS."""
    return [
        f"{place}: {ast.unparse(node)}"
        for place, node in nodes(CACHE)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
        and ast.unparse(node.comparators[0]) == "None"
        and ast.unparse(node.left).rpartition(".")[2].removeprefix("_") in PARTS
        and "invariants.py" not in place
    ]


def private_names() -> list[str]:
    """Uses of a `_name` that a class of ours declares, of any object but self, cls and the class around.

    Invariants may read them: modules of this name, and functions named `check`.
    """
    declared = {name for _, node in nodes(*SOURCES) if isinstance(node, ast.ClassDef) for name in _declared(node)}
    declared -= LIBRARIES
    return [
        f"{path}:{each.lineno}: {ast.unparse(each)}"
        for path, module in sources().items()
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


def fields_of(name: str) -> list[str]:
    """The fields of a class of the engine: annotated in its body, or set by one of its methods."""
    (kind,) = [node for _, node in nodes(ENGINE) if isinstance(node, ast.ClassDef) and node.name == name]
    found = [
        each.target.id for each in kind.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    found += [
        each.attr
        for each in ast.walk(kind)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    ]
    return list(dict.fromkeys(found))


def long_functions() -> list[str]:
    """Functions of more than 40 lines, from `def` to the last line."""
    return [
        f"{place}: {node.name}"
        for place, node in nodes(*SOURCES)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG
    ]


COUNTS: dict[str, Callable[[], list[str]]] = {
    each.__name__: each for each in (subclasses, casts, probing, guards, private_names, long_functions)
}
