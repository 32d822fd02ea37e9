"""Rows as the bytes of a file: JSON lines, Parquet, Arrow IPC, CSV.

Numbers in text read back as the same numbers. To add a format, see format_table.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from reagent_lite.config.column_names import kind_of_column
from reagent_lite.data.formats.schema import VALUES, find_distinct, take_or_null
from reagent_lite.errors import DataError, Problem


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become the bytes of a file.

    Attributes:
        encode: encodes a table; called in threads.
        opened: given the stream and the first encoded table, returns an object whose `write` takes all encoded tables.
        cells: whether values become cells of text, as in CSV.
        own_columns: whether each row may have columns of its own, as in JSON lines.
    """

    encode: Callable[[pa.Table], Any]
    opened: Callable[[IO[bytes], Any], AbstractContextManager[Any]]
    cells: bool = False
    own_columns: bool = False


def json_lines(table: pa.Table) -> memoryview:
    """Returns the rows as JSON objects, one a line; a column that is null in a row is null there."""
    pieces: list[Any] = []
    for name, column in _columns(table).items():
        pieces += [("," if pieces else "{") + json.dumps(name) + ":", _or_null(_texts(column))]
    lines = pc.binary_join_element_wise(*pieces, "}\n", "")
    _, offsets, text = lines.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[lines.offset, lines.offset + len(lines)]]
    return memoryview(text)[int(first) : int(last)]


def csv_cells(table: pa.Table) -> pa.Table:
    """Returns the columns as CSV can hold them: maps and lists as JSON.

    Raises:
        DataError: an empty string, which would be read as absent, or the name of an action that starts like a map.
    """
    columns = _columns(table)
    for name, column in columns.items():
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            _require_strings(name, column)
        elif not (pa.types.is_primitive(column.type) or pa.types.is_null(column.type)):
            columns[name] = _texts(column)
    return pa.table(columns)


def _columns(table: pa.Table) -> dict[str, pa.Array]:
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return {name: _as_lists(array) if _is_image(name, array) else array for name, array in columns.items()}


def _is_image(name: str, array: pa.Array) -> bool:
    return kind_of_column(name) == "features" and bool(pa.types.is_fixed_size_binary(array.type))


def _as_lists(images: pa.Array) -> pa.Array:
    """Returns images of bytes as lists of integers, null where they are null."""
    numbers = pc.fill_null(images, bytes(images.type.byte_width)).cast(pa.binary())
    pixels = pa.array(np.frombuffer(b"".join(numbers.to_pylist()), np.uint8))
    offsets = pa.array(np.arange(len(images) + 1, dtype=np.int32) * images.type.byte_width)
    return pa.ListArray.from_arrays(offsets, pixels, mask=images.is_null())


def _require_strings(name: str, array: pa.Array) -> None:
    distinct = array.unique().drop_null().to_pylist()
    todo = "Choose another format, or another name for it"
    if "" in distinct and name != "next_action":  # where "" means none
        got = "an empty one, which CSV reads as none"
        raise DataError(Problem(f"column {name}", "strings that CSV can hold", got, todo))
    if kind_of_column(name) == "action" and any(name_of_action.lstrip().startswith("{") for name_of_action in distinct):
        got = "one that starts with { as maps do"
        raise DataError(Problem(f"column {name}", "names that CSV can hold", got, todo))


def _or_null(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, "null")


def _texts(array: pa.Array) -> pa.Array:
    """Returns the values as JSON texts, null where they are null."""
    types = pa.types
    kind = array.type
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind):
        return array.cast(pa.string())
    if types.is_float32(kind) or types.is_float64(kind):
        return _numbers(array)
    if types.is_string(kind) or types.is_large_string(kind):
        return _by_distinct(array)
    if kind == VALUES:
        return pc.coalesce(_texts(pc.struct_field(array, "number")), _texts(pc.struct_field(array, "text")))
    if types.is_map(kind):
        part = slice(array.offsets[0].as_py(), array.offsets[-1].as_py())
        keys = _by_distinct(array.keys[part].cast(pa.string()))
        items = _or_null(_texts(array.items[part]))
        return _join_texts("{", array, pc.binary_join_element_wise(keys, items, ":"), "}")
    if types.is_list(kind):
        part = slice(array.offsets[0].as_py(), array.offsets[-1].as_py())
        return _join_texts("[", array, _or_null(_texts(array.values[part])), "]")
    return pa.array(
        [None if value is None else json.dumps(value, default=str) for value in array.to_pylist()], pa.string()
    )


def _numbers(array: pa.Array) -> pa.Array:
    """Returns the shortest strings that read back as the same numbers, null for NaN."""
    if pc.any(pc.is_inf(array)).as_py():
        raise DataError(Problem("a column that is copied as it is", "numbers that JSON has", "infinity"))
    texts = pc.if_else(pc.is_nan(array), None, array.cast(pa.string()))
    # "-0" would be read as an integer, without its sign
    return pc.if_else(pc.equal(texts, "-0"), "-0.0", texts)


def _by_distinct(strings: pa.Array) -> pa.Array:
    """Returns strings as JSON texts; each distinct one is encoded once."""
    distinct, codes = find_distinct(strings)
    return take_or_null(pa.array(map(json.dumps, distinct.to_pylist()), pa.string()), codes)


def _join_texts(opening: str, array: pa.Array, elements: pa.Array, closing: str) -> pa.Array:
    """Returns the strings of lists or maps, whose elements are strings, null where `array` is."""
    offsets = pc.subtract(array.offsets, array.offsets[0])
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets, elements), ",")
    return pc.binary_join_element_wise(opening, pc.if_else(array.is_valid(), texts, None), closing, "")


def _json_lines(compress: Callable[[memoryview], Any]) -> Encoding:
    """Blocks are compressed one by one, which readers of gzip and Zstandard take as one file."""
    return Encoding(lambda table: compress(json_lines(table)), lambda stream, _: nullcontext(stream), own_columns=True)


def _arrow(writer: Callable[..., Any], **options: Any) -> Encoding:
    """A row group (Parquet) or record batch (IPC) for each table."""
    return Encoding(lambda table: table, lambda stream, first: writer(stream, first.schema, **options))


JSON_LINES_ENCODINGS = {
    ".jsonl": _json_lines(bytes),
    ".jsonl.gz": _json_lines(lambda text: gzip.compress(text, 4, mtime=0)),  # no time: the same log has the same bytes
    ".jsonl.zst": _json_lines(lambda text: pa.Codec("zstd").compress(text, asbytes=True)),
}
PARQUET_ENCODINGS = {".parquet": _arrow(pa.parquet.ParquetWriter, compression="zstd")}
IPC_ENCODINGS = {".arrow": _arrow(pa.ipc.new_file, options=pa.ipc.IpcWriteOptions(compression="zstd"))}
CSV_ENCODINGS = {
    ".csv": Encoding(csv_cells, lambda stream, first: pa.csv.CSVWriter(stream, first.schema), cells=True),
}
