"""Frames of pandas and polars, and Arrow tables, where a function takes the path of a log."""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import pyarrow as pa

from reagent_lite.errors import DataError, Problem, first_line
from reagent_lite.files import appearing_file, user_cache


class Frame(Protocol):
    """What pandas, polars and Arrow give their rows by."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Returns the rows as Arrow's C stream."""
        ...


Log = str | os.PathLike[str] | Frame


def path_of(log: Log) -> str:
    """Returns the path of a log; a frame becomes an Arrow file in the user's cache, named by its content.

    Raises:
        DataError: neither a path nor a frame, or columns that Arrow has no type for.
    """
    if isinstance(log, str | os.PathLike):
        return os.fspath(log)
    try:
        table = pa.table(log)
    except (TypeError, pa.ArrowException) as error:
        expected = "a path, or a frame of pandas, polars or Arrow"
        raise DataError(Problem("data", expected, first_line(error))) from error
    digest = hashlib.sha256()
    with pa.PythonFile(_Hash(digest), "w") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    file = user_cache() / "frames" / f"{digest.hexdigest()[:32]}.arrow"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing_file(file) as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    return str(file)


class _Hash:
    """A stream that keeps nothing but the hash of what is written to it."""

    closed = False

    def __init__(self, digest: hashlib._Hash) -> None:
        self._digest = digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
