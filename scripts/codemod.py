"""Move and merge modules, and rename names, as a table says: codemod.py TABLE.

A table has one entry a line, `#` starts a comment, and an entry that is done already changes nothing:

    move  radixkv.engine.intake  radixkv.engine.input_processor
    merge radixkv.engine.wait_queue  radixkv.engine.waiting radixkv.engine.coalescing
    name  Parked PrefixWait                      in the whole repository
    name  asleep suspended  in radixkv/engine tests/engine

`name` replaces identifiers only: names in code, in braces of f-strings, and in code spans of comments, docstrings and
pages. Other strings stay, and those that hold the old name are listed. `merge` keeps the order of the sources, joins
their imports, and reports names that two of them define. Both end with ruff's import sorting and formatting.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize

TOP = pathlib.Path(__file__).resolve().parent.parent
ROOTS = {
    "radixkv": ".",
    "radixkv_kernels": "kernels",
    "radixkv_monitor": "monitor",
    "radixkv_traces": "traces",
    "tests": ".",
}
TEXT = {".py", ".md", ".toml", ".sh", ".yml"}


def tracked() -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True, check=True).stdout.split("\n")
    own = {"scripts/codemod.py", "CHANGELOG.md"}
    paths = [TOP / each for each in listed if each and each not in own and not each.startswith("scripts/renames/")]
    return [path for path in paths if (path.suffix in TEXT or path.name == "Makefile") and path.is_file()]


def path_of(module: str) -> pathlib.Path:
    base = TOP / ROOTS[module.split(".")[0]] / pathlib.Path(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def ruff(paths: list[pathlib.Path]) -> None:
    files = [str(path) for path in paths if path.suffix == ".py" and path.exists()]
    if files:
        tool = str(TOP / ".venv/bin/ruff")
        subprocess.run(
            [tool, "check", "-q", "--fix", "--select", "I,F401,F811", "--exit-zero", *files], cwd=TOP, check=True
        )
        subprocess.run([tool, "format", "-q", *files], cwd=TOP, check=True)


def redirect(old: str, new: str) -> list[pathlib.Path]:
    """Have everybody import `new` where they imported `old`."""
    dotted = re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)")
    slashed = re.compile(rf"(?<!\w){re.escape(old.replace('.', '/'))}\.py\b")
    old_package, old_leaf = old.rsplit(".", 1)
    new_package, new_leaf = new.rsplit(".", 1)
    changed = []
    for path in tracked():
        before = text = path.read_text()
        if path.suffix == ".py" and old_leaf in text:
            text = _module_imports(text, old_package, old_leaf, new_package, new_leaf, path)
        text = slashed.sub(new.replace(".", "/") + ".py", dotted.sub(new, text))
        if text != before:
            path.write_text(text)
            changed.append(path)
    return changed


def _module_imports(text: str, old_package: str, old: str, new_package: str, new: str, path: pathlib.Path) -> str:
    """`from package import module` in its new form, and `module.name` after it."""
    lines = text.splitlines(keepends=True)
    found = False
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.module != old_package or node.level:
            continue
        for alias in node.names:
            if alias.name != old:
                continue
            found = True
            others = [a.name + (f" as {a.asname}" if a.asname else "") for a in node.names if a is not alias]
            indent = " " * node.col_offset
            moved = f"{indent}from {new_package} import {new}" + (f" as {alias.asname}" if alias.asname else "") + "\n"
            rest = f"{indent}from {old_package} import {', '.join(others)}\n" if others else ""
            lines[node.lineno - 1] = moved + rest
            for number in range(node.lineno, node.end_lineno or node.lineno):
                lines[number] = ""
            if not alias.asname and old != new:
                text = "".join(lines)
                return re.sub(rf"(?<![\w.]){old}\.(?=\w)", f"{new}.", text)
    return "".join(lines) if found else text


def move(old: str, new: str) -> None:
    source, target = path_of(old), path_of(new)
    if not source.exists():
        return
    if target.exists():
        sys.exit(f"{target} exists: merge instead")
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", str(source), str(target)], cwd=TOP, check=True)
    ruff([target, *redirect(old, new)])
    print(f"moved {old} -> {new}")


def merge(target: str, sources: list[str]) -> None:
    paths = [path_of(each) for each in sources]
    if not any(path.exists() for path, name in zip(paths, sources, strict=True) if name != target):
        return
    documents, imports, checking, bodies, defined = [], [], [], [], {}
    for path, name in zip(paths, sources, strict=True):
        text = path.read_text()
        tree, lines = ast.parse(text), text.splitlines(keepends=True)
        documents.append(ast.get_docstring(tree, clean=True) or "")
        drop: set[int] = set()
        for node in tree.body:
            span = range(node.lineno - 1, node.end_lineno or node.lineno)
            segment = "".join(lines[i] for i in span)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is tree.body[0]:
                drop.update(span)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                drop.update(span)
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    continue
                if isinstance(node, ast.ImportFrom) and node.module in (*sources, target):
                    if any(alias.asname for alias in node.names):
                        print(f"  look at {name}: {segment.strip()}")
                    continue
                imports.append(segment)
            elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                drop.update(span)
                for each in node.body:
                    part = "".join(lines[i] for i in range(each.lineno - 1, each.end_lineno or each.lineno))
                    if not (isinstance(each, ast.ImportFrom) and each.module in (*sources, target)):
                        checking.append(part)
            else:
                names = [getattr(node, "name", None)]
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = [t.id for t in targets if isinstance(t, ast.Name)]
                for each in names:
                    if each and each in defined:
                        print(f"  {each}: defined by {defined[each]} and by {name}")
                    elif each:
                        defined[each] = name
        bodies.append("".join(line for i, line in enumerate(lines) if i not in drop).strip("\n"))
    header = '"""' + "\n\n".join(documents).replace("\\", "\\\\") + '\n"""\n\nfrom __future__ import annotations\n\n'
    block = "if TYPE_CHECKING:\n" + "".join(checking) + "\n" if checking else ""
    text = header + "".join(imports) + "\n" + block + "\n\n" + "\n\n\n".join(bodies) + "\n"
    goal = path_of(target)
    goal.parent.mkdir(parents=True, exist_ok=True)
    if not goal.exists():
        longest = max(paths, key=lambda path: path.stat().st_size)
        subprocess.run(["git", "mv", str(longest), str(goal)], cwd=TOP, check=True)
    changed = []
    for path in paths:
        if path != goal and path.exists():
            subprocess.run(["git", "rm", "-qf", str(path)], cwd=TOP, check=True)
    goal.write_text(text)
    for name in sources:
        if name != target:
            changed += redirect(name, target)
    ruff([goal, *changed])
    print(f"merged {', '.join(sources)} -> {target}: {len(goal.read_text().splitlines())} lines")


def rename(old: str, new: str, places: list[str]) -> None:
    span = re.compile(r"(``?)([^`\n]+)\1")
    word = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    changed = []
    for path in tracked():
        relative = str(path.relative_to(TOP))
        if places and not any(relative == place or relative.startswith(place.rstrip("/") + "/") for place in places):
            continue
        before = path.read_text()
        if old not in before:
            continue
        in_spans = lambda text: span.sub(lambda m: m[1] + word.sub(new, m[2]) + m[1], text)  # noqa: E731
        text = _rename_python(before, old, new, word, in_spans, relative) if path.suffix == ".py" else in_spans(before)
        if path.suffix == ".md":  # code blocks of pages
            text = re.sub(r"```.*?```", lambda m: word.sub(new, m[0]), text, flags=re.S)
        if text != before:
            path.write_text(text)
            changed.append(path)
    ruff(changed)
    if changed:
        print(f"renamed {old} -> {new} in {len(changed)} files")


def _rename_python(text: str, old: str, new: str, word: re.Pattern[str], in_spans, relative: str) -> str:  # type: ignore[no-untyped-def]
    lines = text.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == old:
            edits.append((token.start, token.end, new))
        elif token.type in (tokenize.COMMENT, tokenize.STRING) and old in token.string:
            changed = in_spans(token.string)
            prefix = token.string[: token.string.find(token.string.lstrip("rRbBuUfF")[0])].lower()
            if token.type == tokenize.STRING and "f" in prefix:
                changed = re.sub(r"\{[^{}]*\}", lambda m: word.sub(new, m[0]), changed)
            if token.type == tokenize.STRING and '"""' in token.string:  # doctests
                changed = re.sub(r"^\s*(>>>|\.\.\.).*$", lambda m: word.sub(new, m[0]), changed, flags=re.M)
            if changed != token.string:
                edits.append((token.start, token.end, changed))
            elif token.type == tokenize.STRING and word.search(changed) and '"""' not in changed:
                print(f"  string left: {relative}:{token.start[0]}: {changed[:80]}")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    for start, end, value in reversed(edits):
        text = text[: offsets[start[0] - 1] + start[1]] + value + text[offsets[end[0] - 1] + end[1] :]
    return text


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
        match line.split("#")[0].split():
            case []:
                continue
            case ["move", old, new]:
                move(old, new)
            case ["merge", target, *sources]:
                merge(target, sources)
            case ["name", old, new]:
                rename(old, new, [])
            case ["name", old, new, "in", *places]:
                rename(old, new, places)
            case _:
                sys.exit(f"not an entry: {line}")


if __name__ == "__main__":
    main()
