"""What DuckDB is asked of blocks of JSON lines: json_transform to the types of known columns, bound once per thread."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from reagent_lite.data.formats.schema import is_text

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAP = "MAP(VARCHAR,FLOAT)"
# [m] 17 294 lines of 485 bytes: 16.7 ms by 512 lines, 18.9 ms by DuckDB's own 2048, whose documents leave the cache.
STEP_ROWS = 512
_LINES = pa.schema([("line", pa.string())])
_NONE = pa.Table.from_batches([], _LINES)  # `empty_table` would import pandas


class UnsureError(Exception):
    """The result may differ from what the text says."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a log's columns: their types by name, and the names of those with many and mostly absent ids."""

    fields: dict[str, pa.Field]
    sparse: frozenset[str]


class Query:
    """A query of one thread, for blocks with one set of columns; lines go in, columns come out."""

    def __init__(self, known: Known) -> None:
        self.known, self._source = known, _Source()
        types = {name: _wanted(one, name in known.sparse) for name, one in known.fields.items()}
        wanted = json.dumps(types).replace("'", "''")
        cursor = _database(os.getpid()).cursor()
        self._relation = cursor.from_arrow(self._source).project(f"json_transform(line, '{wanted}')")

    def run(self, lines: pa.StringArray) -> dict[str, pa.Array]:
        """Returns the known columns of JSON lines; null where a line has none, or a value of another type.

        Raises:
            UnsureError: a line without an object, or other columns.
            duckdb.Error: a line that is no JSON.
        """
        batches = pa.table([lines], _LINES).to_batches(STEP_ROWS)
        self._source.lines = pa.Table.from_batches(batches, _LINES)
        try:
            result = self._relation.to_arrow_table(len(lines))
        finally:
            self._source.lines = _NONE
        column = result.column(0)
        rows = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        if len(rows) != len(lines) or rows.null_count or [child.name for child in rows.type] != list(self.known.fields):
            raise UnsureError
        return dict(zip(self.known.fields, (storage(child) for child in rows.flatten()), strict=True))


class _Source:
    """The lines that a query reads next; [m] to make the query anew for each block takes 0.8 ms more."""

    def __init__(self) -> None:
        self.lines = _NONE

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.lines.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return _LINES.__arrow_c_schema__()


def storage(array: pa.Array) -> pa.Array:
    """Returns an array of one of Arrow's own types; JSON texts come as an extension of strings."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _wanted(one: pa.Field, sparse: bool) -> str | list[object] | dict[str, object]:
    """DuckDB's name for a column's type: JSON where strings are in it; numbers are float32 inside lists and objects."""
    if is_json(one) or pa.types.is_string(one.type):
        return "JSON"
    if sparse:
        return [MAP] if pa.types.is_list(one.type) else MAP
    numbers = _numbers(one.type)
    # BIGINT would round 1.5 to 2 without a word.
    return "DOUBLE" if numbers == "FLOAT" else numbers


def is_json(one: pa.Field) -> bool:
    """Whether the column comes back as text: it has no common type, or strings deeper inside."""
    nested = not pa.types.is_string(one.type) and _has(one.type, pa.types.is_string)
    return is_text(one) or nested or has_no_leaf(one.type)


def _numbers(kind: pa.DataType) -> str | list[object] | dict[str, object]:
    if has_no_leaf(kind):
        return "JSON"
    if pa.types.is_struct(kind):
        return {child.name: _numbers(child.type) for child in kind}
    return [_numbers(kind.value_type)] if pa.types.is_list(kind) else "FLOAT"


def _has(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    if pa.types.is_struct(kind):
        return any(_has(child.type, test) for child in kind)
    return _has(kind.value_type, test) if pa.types.is_list(kind) else bool(test(kind))


def has_no_leaf(kind: pa.DataType) -> bool:
    """Whether no value of this type has been seen yet: only null, {} or []."""
    if pa.types.is_list(kind):
        return has_no_leaf(kind.value_type)
    return bool(pa.types.is_null(kind) or (pa.types.is_struct(kind) and kind.num_fields == 0))


@functools.lru_cache(maxsize=1)
def _database(_process: int) -> DuckDBPyConnection:
    """One sealed in-memory database per process, without threads of its own."""
    import duckdb

    return duckdb.connect(":memory:", config=_SEALED)


_SEALED: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "lock_configuration": True,
}
