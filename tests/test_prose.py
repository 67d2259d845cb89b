"""Docstrings, comments, pages and names of tests keep the limits of `scripts/prose.py`."""

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
    assert not found, "\n".join(["rewrite these sentences (CONTRIBUTING.md, Style):", *found[:60]])


def test_names_of_tests_keep_the_limits() -> None:
    found = prose.problems_of_names(prose.read_names())
    assert not found, "\n".join(["rename these tests (CONTRIBUTING.md, Style):", *found[:60]])


def test_the_names_of_tests_are_counted_as_sentences(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    source = "def test_who_waits_is_that_of_a_share(): ...\n\n\nclass Kind:\n    async def test_nobody(self): ...\n"
    (tmp_path / "tests" / "test_it.py").write_text(source + "def who(): ...\n")
    names = prose.read_names(tmp_path)
    assert (names.words, [hit.line for hit in names.hits["people"]]) == (10, [1, 5])
    assert len(prose.problems_of_names(names)) == 3


def test_hits_have_the_line_and_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    found = prose.read(path)
    assert found.hits == {
        "people": [
            (3, "Whoever", 'Whoever waits holds `what` it had, says "nobody".'),
            (7, "somebody", "# A comment of # two lines, somebody's."),
        ],
        "what": [],
        "speech": [(13, "knows", "It knows nothing else.")],
        "place": [(15, "behind", "# behind")],
        "reference": [],
        "formula": [],
    }


def test_fenced_code_spans_quotes_and_links_of_a_page_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text('```python\nwho = 1\n```\nSay `who` and "who", https://who.org/who,\nwho.\n\nKnows: it.\n')
    found = prose.read(path)
    assert [hit.line for hit in found.hits["people"]] == [5]
    assert [hit.line for hit in found.hits["formula"]] == [7]
    assert found.words == 6


def test_a_file_and_all_files_together_keep_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("One line.\n\nTwo of it, who knows.\n" + "word " * 3000)
    mixed = prose.read(path)
    assert not prose.problems({"page.md": mixed})
    path.write_text("One line.\n\nTwo of it, who waits.\n")
    short = prose.read(path)
    assert prose.problems({"page.md": mixed, "short.md": short}) == [
        'short.md:3: people: "who": Two of it, who waits.',
        "all files together: people: 0.66 in 1,000 words, 0.40 at most",
        'page.md:3: "who": Two of it, who knows.',
        'short.md:3: "who": Two of it, who waits.',
    ]


def test_a_noun_is_repeated_rather_than_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    text = "The size is that of a block, and the count that\nof a node, those of which are long, as that.\n"
    path.write_text(text + "word " * 14000)
    page = prose.read(path)
    assert [hit.word for hit in page.hits["reference"]] == ["that of", "that of", "those of", "as that"]
    path.write_text(text)
    assert len(prose.problems({"page.md": page})) == 0 < len(prose.problems({"page.md": prose.read(path)}))
