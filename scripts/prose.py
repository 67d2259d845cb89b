"""Count the words that plain technical English does without, in docstrings, comments, pages and names of tests.

    python scripts/prose.py             rates per 1,000 words, and the sentences of files over a limit
    python scripts/prose.py --files     the counts of each file, highest first

Code is not a person: it holds, records and returns. A sentence names its nouns instead of circumscribing them, and
repeats a noun in place of "that of". Code spans, quoted text, URLs and fenced code do not count. All files together
keep the limits, and no file has more than four times a limit. `tests/test_prose.py` calls `problems`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parent.parent
SOURCES = ("radixkv", "kernels/radixkv_kernels", "monitor/radixkv_monitor", "traces/radixkv_traces")
PAGES = ("docs/*.md", "docs/tutorials/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PER_FILE = 4  # a file may have up to this many times the rate of the whole


@dataclass(frozen=True)
class Kind:
    """A group of words, and how many of them 1,000 words may have; any file may have `few`.

    `names` is the limit for the names of tests, by default the same.
    """

    pattern: re.Pattern[str]
    limit: float
    few: int = 0
    names: float | None = None


def words(*alternatives: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(alternatives)})\b", re.IGNORECASE)


GAP = r"[\s#]+"  # also from one line to the next, in a comment, too
KINDS = {
    "people": Kind(words("who", "whom", "whoever", "nobody", "somebody", "everybody", "anybody"), 0.4),
    "what": Kind(words("what", "whatever"), 1.5, names=11.2),
    "speech": Kind(words("knows?", "tells?", "told", "hears?", "heard", "gives? way", "gave way"), 1.0, names=2.6),
    "place": Kind(words("behind", "beside", "anew", "but for", "so many"), 0.3),
    "reference": Kind(words(rf"that{GAP}of", rf"those{GAP}of", rf"of{GAP}which", rf"as{GAP}that"), 0.3, few=3),
    "formula": Kind(re.compile(r"^[ \t#]*(?:Knows|Does not know)\b", re.MULTILINE), 0.0),
}
LEFT_OUT = re.compile(r"`[^`]*`|\"[^\"\n]*\"|https?://\S+")
NAME = re.compile(r"\s*(?:async )?def (test_\w+)")
FENCED = re.compile(r"```.*?```", re.DOTALL)


class Hit(NamedTuple):
    """One word that a limit counts, with its line and its sentence."""

    line: int
    word: str
    sentence: str

    def __str__(self) -> str:
        return f'"{self.word}": {self.sentence}'


@dataclass
class Prose:
    """The prose of one file: its number of words, and by kind the hits."""

    words: int = 0
    hits: dict[str, list[Hit]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add(self, text: str, line: int) -> None:
        """Count a passage that begins in this line."""
        plain = LEFT_OUT.sub(_blank, text)
        self.words += len(plain.split())
        for name, kind in KINDS.items():
            for match in kind.pattern.finditer(plain):
                at = match.start() + len(match[0]) - len(match[0].lstrip())
                word = " ".join(match[0].split())
                self.hits[name].append(Hit(line + plain.count("\n", 0, at), word, _sentence(text, at)))


def _blank(match: re.Match[str]) -> str:
    """As long as the match, and with its line ends."""
    return re.sub(r"[^\n]", " ", match[0])


def _sentence(text: str, at: int) -> str:
    start = max(text.rfind(end, 0, at) + len(end) if end in text[:at] else 0 for end in (". ", ".\n", "\n\n", "| "))
    stops = [found for end in (". ", ".\n", "\n\n", " |") if (found := text.find(end, at)) >= 0]
    return " ".join(text[start : min(stops, default=len(text)) + 1].split())


def passages(path: Path) -> Iterator[tuple[str, int]]:
    """Each docstring, block of comments or page, with its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield FENCED.sub(_blank, text), 1
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else None
            if isinstance(value, str):
                yield value, node.body[0].lineno
    block, begin, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield block, begin
                block, begin = "", token.start[0]
            block, last = f"{block}\n{token.string}" if block else token.string, token.start[0]
    yield block, begin


def read(path: Path) -> Prose:
    """The prose of a file."""
    found = Prose()
    for text, line in passages(path):
        found.add(text, line)
    return found


def read_all(top: Path = TOP) -> dict[str, Prose]:
    """By path, all packages and pages."""
    paths = [path for source in SOURCES for path in sorted((top / source).rglob("*.py"))]
    paths += [path for page in PAGES for path in sorted(top.glob(page))]
    return {str(path.relative_to(top)): read(path) for path in paths}


def read_names(top: Path = TOP) -> Prose:
    """The names of all tests, each a sentence; a hit has its line."""
    found = Prose()
    for path in sorted((top / "tests").rglob("*.py")):
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := NAME.match(text):
                found.add(match[1].replace("_", " "), line)
    return found


def problems_of_names(names: Prose) -> list[str]:
    """Return one line for each name with a hit of a kind that is over its limit."""
    limits = {name: kind.limit if kind.names is None else kind.names for name, kind in KINDS.items()}
    return [
        f"line {hit.line}: {name}: {hit}"
        for name, hits in names.hits.items()
        if 1000 * len(hits) > limits[name] * names.words
        for hit in hits
    ]


def rates(files: dict[str, Prose]) -> dict[str, float]:
    """By kind, hits per 1,000 words over all files."""
    total = sum(found.words for found in files.values())
    return {kind: 1000 * sum(len(found.hits[kind]) for found in files.values()) / max(total, 1) for kind in KINDS}


def problems(files: dict[str, Prose]) -> list[str]:
    """Return one line for each hit in a file over a limit, and for each kind that is over its limit in all files."""
    found = [
        f"{path}:{hit.line}: {name}: {hit}"
        for path, prose in files.items()
        for name, hits in prose.hits.items()
        if len(hits) > max(KINDS[name].few, PER_FILE * KINDS[name].limit * prose.words / 1000)
        for hit in hits
    ]
    for name, rate in rates(files).items():
        if rate > KINDS[name].limit:
            found += [f"all files together: {name}: {rate:.2f} in 1,000 words, {KINDS[name].limit:.2f} at most"]
            found += [f"{path}:{hit.line}: {hit}" for path in files for hit in files[path].hits[name]]
    return list(dict.fromkeys(found))


def main() -> int:
    """Print rates and problems; 1 if there are problems."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    arguments.add_argument("--files", action="store_true", help="print the counts of each file, highest first")
    options, files = arguments.parse_args(), read_all()
    for kind, rate in rates(files).items():
        print(f"{kind:8} {rate:6.2f} in 1,000 words, {KINDS[kind].limit:.1f} at most")
    if options.files:
        for path, prose in sorted(files.items(), key=lambda item: -sum(map(len, item[1].hits.values()))):
            counts = ", ".join(f"{kind} {len(hits)}" for kind, hits in prose.hits.items() if hits)
            print(f"{path}: {prose.words} words, {counts or '-'}")
    found = problems(files) + problems_of_names(read_names())
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
