"""Docstrings, comments and pages keep the limits of `scripts/prose.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

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
    found = prose.problems(prose.read_all(), prose.allowed())
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


@pytest.mark.parametrize(("before", "after"), [(5.0, 2.0), (1.0, 1.0)])
def test_an_allowance_only_falls(tmp_path: Path, before: float, after: float) -> None:
    path = tmp_path / "page.md"
    path.write_text("who " * 2)
    files = {"page.md": prose.read(path), "new.md": prose.read(path)}
    begin = prose.lowered(files, None)
    assert begin == {"total": {"people": 1000.0}, "page.md": {"people": 2.0}, "new.md": {"people": 2.0}}
    allowances = prose.lowered(files, {"page.md": {"people": before}, "gone.md": {"people": 3.0}})
    assert allowances == {"page.md": {"people": after}}


def test_a_file_above_its_allowance_and_a_total_above_its_limit_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.md"
    path.write_text("One line.\n\nTwo of it, who knows.\n")
    files = {"page.md": prose.read(path)}
    assert not prose.problems(files, prose.lowered(files, None))
    monkeypatch.setattr(prose, "ALL_FILES", True)
    found = prose.problems(files, {"page.md": {"speech": 1.0}, "total": {"speech": 1000.0}})
    assert found == [
        "page.md:3: people: Two of it, who knows.",
        "all files together: people: 142.86 in 1,000 words, 0.40 at most",
    ]
