"""Read the rows of a Parquet file as objects, like the lines of a JSON file.

Published sets of conversations, such as LMSYS-Chat-1M and WildChat, are Parquet files. pyarrow reads them; it is the
extra `parquet` and is imported only here.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import IO, Any

from radixkv.errors import InvalidInput
from radixkv_traces.records import Line, TraceError

MAGIC = b"PAR1"
_BATCH = 64  # rows that are decoded at a time: a conversation may have a megabyte


def rows(file: IO[bytes], name: str) -> Iterator[Line]:
    """Yield the rows in file order; the number of a line is its row's, from 1. It takes the memory of a row group.

    Dates become texts as in ISO 8601. Raises InvalidInput without pyarrow, and TraceError for a damaged file and for
    one that cannot be read from its end, such as a pipe.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InvalidInput(f"{name} is a Parquet file: pip install 'radixkv[parquet]' adds its reader") from None
    if not file.seekable():
        raise TraceError(name, 1, None, "Parquet is read from its end: name the file instead of piping it")
    number = 0
    try:
        file.seek(0)
        for batch in ParquetFile(file).iter_batches(_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield Line(name, number, _plain(row))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TraceError(name, number + 1, None, f"the Parquet file is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value
