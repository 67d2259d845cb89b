"""Hooks of `make docs`: the reference, pages of files outside docs/, and links to them.

Links in docs/ lead to files of the repository, as they must on GitHub. In the site, a link to a source file leads to a
page that shows it. The reference has a page for each module in `REFERENCE`, with the public names that it defines. The
build fails with the name of each public class, method, function or property without a docstring.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)]*)?)\)")
LANGUAGES = {".py": "python", ".md": "markdown", ".cpp": "cpp", ".h": "cpp", ".json": "json"}
TOP = ("CONTRIBUTING.md", "CHANGELOG.md")  # pages outside docs/
TREE = "::: radixkv.errors\n    options: {members: false, show_root_heading: false, show_root_toc_entry: false}"
FIRST = ("Engine", "PrefixCache", "RadixKVError")
PUBLIC = ("radixkv", "radixkv.cache", "radixkv.errors", "radixkv.serve")  # modules that a program imports from
REFERENCE = {  # the module that defines a name -> the page
    "radixkv.chat": ("engine", "Engines and conversations"),
    "radixkv.engine": ("requests", "Requests and results"),
    "radixkv.config": ("settings", "Settings of an engine"),
    "radixkv.sampling": ("sampling", "Sampling"),
    "radixkv.cache": ("cache", "The prefix cache"),
    "radixkv.serve": ("serve", "The server"),
    "radixkv.server_settings": ("serve", "The server"),
    "radixkv.errors": ("errors", "Errors"),
}


def on_config(config: MkDocsConfig) -> None:
    """Write the reference's pages, and fill the navigation with them and with the pages of results."""
    names, undocumented = {}, []
    for path, found in public_names():
        home = next(page for module, page in REFERENCE.items() if f"{found.path}.".startswith(f"{module}."))
        names.setdefault(home, []).append(path)
        undocumented += [f"{path}{name}" for name in without_docstring(found)]
    if undocumented:
        raise PluginError(f"public names without a docstring: {', '.join(undocumented)}")
    config.extra["reference"] = {
        f"reference/{page}.md": "\n\n".join([f"# {title}", *[TREE] * (page == "errors"), *listed(names[page, title])])
        for page, title in dict.fromkeys(REFERENCE.values())
    }
    results = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/results").glob("*.md"))
    sections = {"Reference": list(config.extra["reference"]), "Results": results}
    config.nav = [{part: sections.get(part, pages) for part, pages in entry.items()} for entry in config.nav]


def public_names() -> Iterator[tuple[str, griffe.Object]]:
    """Yield the path and the definition of each public name, each definition once."""
    radixkv = griffe.load("radixkv", search_paths=[ROOT])
    seen = set()
    for module in PUBLIC:
        parent = radixkv if module == "radixkv" else radixkv[module.removeprefix("radixkv.")]
        exports = parent.exports or [name for name, each in parent.classes.items() if not each.is_alias]
        for name in exports:
            found = parent[name].final_target if parent[name].is_alias else parent[name]
            if not name.startswith("_") and found.path not in seen:
                seen.add(found.path)
                yield f"{module}.{name}", found


def listed(paths: list[str]) -> list[str]:
    """Return the blocks of a page: the central class first, and variants for asyncio last."""
    last = [path.rpartition(".")[2] for path in paths]
    keys = [(name.startswith("Async"), name not in FIRST, name, path) for name, path in zip(last, paths, strict=True)]
    return [f"::: {key[-1]}" for key in sorted(keys)]


def without_docstring(found: griffe.Object) -> Iterator[str]:
    """Yield "" for an object without a docstring, and ".name" for each of its members that has none."""
    if not found.docstring:
        yield ""
    for name, member in (found.all_members if found.is_class else {}).items():
        callable_ = member.is_function or "property" in member.labels
        if callable_ and not name.startswith("_") and not member.docstring:
            yield f".{name}"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are no files of docs/."""
    for name in TOP:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path, text in config.extra["reference"].items():
        files.append(File.generated(config, path, content=text))
    linked = {target for file in files.documentation_pages() for target in targets(file) if target.suffix != ".svg"}
    for path in linked:
        if not files.get_file_from_path(page_of(path)):
            code = f"# {path.name}\n\n```{LANGUAGES.get(path.suffix, 'text')} title={str(path)!r}\n"
            text = f"---\nsearch:\n  exclude: true\n---\n{code}{(ROOT / path).read_text(encoding='utf-8')}\n```\n"
            files.append(File.generated(config, page_of(path), content=text))


def targets(file: File) -> Iterator[PurePosixPath]:
    """Yield the files that a page links to, relative to the repository."""
    for link, _ in LINK.findall(file.content_string):
        if path := in_repository(file, link):
            yield path


def in_repository(file: File, link: str) -> PurePosixPath | None:
    """Return the file of a relative link, relative to the repository; None if there is no such file."""
    folder = ROOT if file.src_uri in TOP else ROOT / "docs"
    path = Path(os.path.normpath((folder / file.src_uri).parent / link))
    return PurePosixPath(path.relative_to(ROOT)) if path.is_file() and path.is_relative_to(ROOT) else None


def page_of(path: PurePosixPath) -> str:
    """Return the page, or picture, of the site that stands for a file of the repository."""
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    return {"README.md": "index.md"}.get(str(path), str(path) if str(path) in TOP else f"source/{path}.md")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the pages of the site."""
    here = PurePosixPath(page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        path = in_repository(page.file, link[1])
        return f"]({os.path.relpath(page_of(path), here)}{link[2]})" if path else link[0]

    return LINK.sub(rewrite, markdown)


class Docstrings(griffe.Extension):
    """Show doctests as code, help texts of settings as docstrings, and no constructor that programs never call.

    A dataclass has no constructor in its source, so its fields are shown. Errors and `PrefixCache` keep theirs.
    """

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Drop the constructor of a class whose objects are made by a method of another one."""
        if cls.name != "PrefixCache" and not cls.path.startswith("radixkv.errors"):
            cls.members.pop("__init__", None)

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence doctests and trees drawn with lines."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"(?:^ *(?:>>>|RadixKVError$).*\n?)(?:^ *\S.*\n?)*",
                lambda found: f"\n```pycon\n{found[0].rstrip()}\n```\n",
                obj.docstring.value,
                flags=re.MULTILINE,
            )

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **_: object) -> None:
        """Take default and docstring from `_setting(default, help)`, and the default from `parameter(default, ...)`."""
        attr.labels -= {"class-attribute", "instance-attribute"}
        call = getattr(node, "value", None)
        declared = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
        if declared in ("_setting", "_size"):
            attr.docstring = griffe.Docstring(str(ast.literal_eval(call.args[1])), parent=attr)
        if declared in ("_setting", "_size", "parameter"):
            attr.value = attr.value.arguments[0]
