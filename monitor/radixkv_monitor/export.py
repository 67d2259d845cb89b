"""What a view shows, as rows for other programs: JSON and CSV. Knows tables and files; knows no screen."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Named rows; every row has the same keys. Values are str, int, float, bool, None, or lists of those."""

    name: str
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        """A JSON array of objects."""
        return json.dumps([dict(row) for row in self.rows], indent=2)

    def to_csv(self) -> str:
        """A header and a line per row; lists become their values, separated by blanks. Empty if there are no rows."""
        out = io.StringIO()
        if self.rows:
            writer = csv.DictWriter(out, fieldnames=list(self.rows[0]))
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in self.rows)
        return out.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
