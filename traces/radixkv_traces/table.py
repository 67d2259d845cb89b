"""A table of text, its columns as wide as what is in them. Knows no more than that."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Lines without a newline at the end; the columns in `left` begin at the left, all others end at the right.

    >>> print(table(("name", "n"), [("one", "1"), ("ten", "10")]))
    name   n
    one    1
    ten   10
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (columns, *rows)
    )
