"""Find in the source of a Triton kernel which arguments it loads from, and which it stores to.

A name stands for the arguments that its value is computed from; a loaded number stands for none. All branches count, so
a launch may use less. Arguments whose addresses a kernel loads from memory are not found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Names = set[str]


@dataclass
class Uses:
    """The arguments of a function by name; `returned` are those that its result is computed from."""

    loads: Names = field(default_factory=set)
    stores: Names = field(default_factory=set)
    returned: Names = field(default_factory=set)


@cache
def uses_of(function: Any) -> Uses:
    """Return the uses of a kernel's plain function, with those of the kernels that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    reader = _Reader(inspect.signature(function).parameters, function.__globals__)
    before = None
    while before != (before := reader.count):  # until loops add nothing
        for node in ast.walk(tree.body[0]):
            if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
                reader.read(node)
    return reader.uses


class _Reader:
    """Follows the arguments of one function through its statements, in any order."""

    def __init__(self, arguments: Any, names: dict[str, Any]) -> None:
        self.uses = Uses()
        self._names = names
        self._origins: dict[str, Names] = {name: {name} for name in arguments}

    @property
    def count(self) -> int:
        """The facts that were found."""
        uses = self.uses
        return sum(map(len, (uses.loads, uses.stores, uses.returned, *self._origins.values())))

    def read(self, statement: ast.stmt) -> None:
        """Read a statement without those inside it."""
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=True):
                    self._assign(target, value)
            case ast.Assign(targets=[target], value=value) | ast.For(target=target, iter=value):
                self._assign(target, value)
            case ast.AugAssign(target=target, value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.Return(value=ast.expr() as value):
                self.uses.returned |= self._of(value)
            case _:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self._of(child)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        found = self._of(value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._origins.setdefault(node.id, set()).update(found)

    def _of(self, value: ast.AST) -> Names:
        """Return the arguments that an expression is computed from; note its loads and stores."""
        match value:
            case ast.Name(id=name):
                return self._origins.get(name, set())
            case ast.Attribute(attr="dtype" | "shape"):
                return set()
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr=verb), args=[_, *_]) if verb in (
                "load",
                "store",
            ) or verb.startswith("atomic"):
                places, *_ = [self._of(each) for each in (*value.args, *(each.value for each in value.keywords))]
                self.uses.loads |= places if verb != "store" else set()
                self.uses.stores |= places if verb != "load" else set()
                return set()
            case ast.Call(func=ast.Name(id=name)) if hasattr(self._names.get(name), "fn"):
                return self._call(self._names[name].fn, value)
            case _:
                return set().union(*map(self._of, ast.iter_child_nodes(value)))

    def _call(self, function: Any, call: ast.Call) -> Names:
        uses = uses_of(function)
        given = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
        given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
        found = {name: self._of(each) for name, each in given.items()}
        self.uses.loads |= set().union(*(found[name] for name in uses.loads & found.keys()))
        self.uses.stores |= set().union(*(found[name] for name in uses.stores & found.keys()))
        return set().union(*(found[name] for name in uses.returned & found.keys()))
