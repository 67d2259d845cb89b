"""Find in the source of a Triton kernel which arguments it loads from, and which it stores to.

A name stands for the arguments that its value is computed from; a number that is loaded, or returned by another kernel,
stands for none. All branches count, so a launch may use less.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, NamedTuple


class Uses(NamedTuple):
    """The names of arguments, some of which may be no tensors."""

    loads: set[str]
    stores: set[str]


@cache
def uses_of(function: Any) -> Uses:
    """Return the uses of a kernel's plain function, with those of the kernels that it calls."""
    origins = {name: {name} for name in inspect.signature(function).parameters}
    found = Uses(set(), set())

    def called(call: ast.Call) -> Uses | None:
        """Return the uses of loads, stores and kernels; others compute numbers or addresses."""
        verb = ast.unparse(call.func)
        if verb in ("tl.load", "tl.store") or verb.startswith("tl.atomic_"):
            return Uses(set() if verb == "tl.store" else {"pointer"}, set() if verb == "tl.load" else {"pointer"})
        return uses_of(kernel.fn) if hasattr(kernel := function.__globals__.get(verb), "fn") else None

    def of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return origins.get(node.id, set())
        if (isinstance(node, ast.Call) and called(node)) or getattr(node, "attr", None) == "dtype":
            return set()
        return set().union(*map(of, ast.iter_child_nodes(node)))

    def read(node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[target], value=value) | ast.For(target=target, iter=value):
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        origins[each.id] = origins.get(each.id, set()) | of(value)
            case ast.Call(args=arguments) if uses := called(node):
                kernel = function.__globals__.get(ast.unparse(node.func))
                names = inspect.signature(kernel.fn).parameters if kernel else ["pointer"]
                for name, argument in zip(names, arguments, strict=False):
                    for some, inner in zip(found, uses, strict=True):
                        some.update(of(argument) if name in inner else ())

    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for _ in range(3):  # names of loops may be assigned after their use
        for node in ast.walk(tree):
            read(node)
    return found
