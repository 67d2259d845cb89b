"""Docstrings, comments and pages keep the limits of `scripts/prose.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
prose: Any = importlib.import_module("prose")

SOURCE = '''"""Hold the blocks.

Whoever waits holds `what` it had, says "nobody".
"""

# A comment of
# two lines, somebody's.
LINK = "https://example.com/who"


def tell(who):
    """
    Return the count. It knows
    nothing else."""
    return "what"  # behind
'''


def test_all_prose_keeps_the_limits() -> None:
    found = prose.problems(prose.read_all())
    assert not found, "\n".join(["rewrite these sentences (STYLE.md, English):", *found[:60]])


def test_hits_have_the_line_and_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    found = prose.read(path)
    assert found.hits == {
        "people": [
            (3, 'Whoever waits holds `what` it had, says "nobody".'),
            (7, "# A comment of # two lines, somebody's."),
        ],
        "what": [],
        "speech": [(13, "It knows nothing else.")],
        "place": [(15, "# behind")],
        "formula": [],
    }


def test_fenced_code_spans_quotes_and_links_of_a_page_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text('```python\nwho = 1\n```\nSay `who` and "who", https://who.org/who,\nwho.\n\nKnows: it.\n')
    found = prose.read(path)
    assert [line for line, _ in found.hits["people"]] == [5]
    assert [line for line, _ in found.hits["formula"]] == [7]
    assert found.words == 6


def test_a_file_and_all_files_together_keep_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("One line.\n\nTwo of it, who knows.\n" + "word " * 3000)
    mixed = prose.read(path)
    assert not prose.problems({"page.md": mixed})
    path.write_text("One line.\n\nTwo of it, who waits.\n")
    short = prose.read(path)
    assert prose.problems({"page.md": mixed, "short.md": short}) == [
        "short.md:3: people: Two of it, who waits.",
        "all files together: people: 0.66 in 1,000 words, 0.40 at most",
        "page.md:3: Two of it, who knows.",
        "short.md:3: Two of it, who waits.",
    ]
