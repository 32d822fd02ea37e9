"""Settled tables as text: JSON lines, and CSV whose maps and lists are JSON in cells; numbers read back as they are."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from reagent_lite.data.formats.schema import filled, to_numpy, valid_rows
from reagent_lite.data.writing.tables import column_of_table
from reagent_lite.errors import DataError, Problem


def json_lines_of(table: pa.Table) -> memoryview:
    """Returns the rows of a settled table as JSON objects, a line each; what is null is said to be."""
    pieces: list[Any] = []
    for index, name in enumerate(table.column_names):
        pieces += [("," if pieces else "{") + json.dumps(name) + ":", _or_null(_texts(column_of_table(table, index)))]
    lines = pc.binary_join_element_wise(*pieces, "}\n", "")
    _, offsets, text = lines.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[lines.offset, lines.offset + len(lines)]]
    return memoryview(text)[int(first) : int(last)]


def csv_header(names: list[str]) -> bytes:
    """Returns the first line of a CSV file."""
    return _csv(pa.table({name: pa.array([], pa.string()) for name in names}), header=True)


def csv_records(table: pa.Table) -> bytes:
    """Returns the rows of a settled table as CSV; what is null is an empty cell.

    Raises:
        DataError: an empty string, which would be read as none; a name that starts like a map.
    """
    columns = {}
    for index, name in enumerate(table.column_names):
        array = column_of_table(table, index)
        kind = array.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            _require_strings(name, array)
        elif pa.types.is_nested(kind) or not (pa.types.is_primitive(kind) or pa.types.is_null(kind)):
            array = _texts(array)
        columns[name] = array
    return _csv(pa.table(columns), header=False)


def _csv(table: pa.Table, *, header: bool) -> bytes:
    stream = pa.BufferOutputStream()
    pa.csv.write_csv(table, stream, pa.csv.WriteOptions(include_header=header))
    data: bytes = stream.getvalue().to_pybytes()
    return data


def _require_strings(name: str, array: pa.Array) -> None:
    distinct = array.unique().drop_null().to_pylist()
    if "" in distinct and name != "next_action":  # there "" is none
        raise DataError(Problem(f"column {name}", "strings that CSV can hold", "an empty one, which CSV reads as none",
                                "Name it, or choose another format"))  # fmt: skip
    if name in ("action", "next_action") and any(one.lstrip().startswith("{") for one in distinct):
        raise DataError(Problem(f"column {name}", "names that CSV can hold", "one that starts with { as maps do",
                                "Rename it, or choose another format"))  # fmt: skip


def _or_null(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, "null")


def _texts(array: pa.Array) -> pa.Array:
    """Returns the values as JSON texts, null where they are null."""
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return pa.nulls(len(array), pa.string())
    if types.is_boolean(kind) or types.is_integer(kind):
        return array.cast(pa.string())
    if types.is_float32(kind) or types.is_float64(kind):
        return _numbers(array)
    if types.is_map(kind):
        start, stop = _span(array)
        keys, items = _quoted(array.keys[start:stop].cast(pa.string())), _or_null(_texts(array.items[start:stop]))
        return _joined("{", pc.binary_join_element_wise(keys, items, ":"), array, "}")
    if types.is_list(kind) or types.is_large_list(kind):
        start, stop = _span(array)
        return _joined("[", _or_null(_texts(array.values[start:stop])), array, "]")
    if types.is_string(kind) or types.is_large_string(kind):
        return _quoted(array)
    values = (None if value is None else json.dumps(value, default=str) for value in array.to_pylist())
    return pa.array(values, pa.string())


def _numbers(array: pa.Array) -> pa.Array:
    values = filled(array, np.nan)
    if np.isinf(values).any():
        raise DataError(Problem("a column that is copied as it is", "numbers that JSON has", "infinity"))
    texts = array.cast(pa.string())  # the shortest text that reads back as the same number
    negative_zero = np.signbit(values) & (values == 0)
    if negative_zero.any():  # "-0" would be read as an integer, without its sign
        texts = pc.if_else(pa.array(negative_zero), "-0.0", texts)
    return (
        pc.if_else(pa.array(np.isnan(values)), pa.scalar(None, pa.string()), texts) if np.isnan(values).any() else texts
    )


def _quoted(strings: pa.Array) -> pa.Array:
    encoded = strings.dictionary_encode()
    distinct = pa.array(
        [None if one is None else json.dumps(one) for one in encoded.dictionary.to_pylist()], pa.string()
    )
    return distinct.take(encoded.indices)


def _span(array: pa.Array) -> tuple[int, int]:
    offsets = to_numpy(array.offsets)
    return int(offsets[0]), int(offsets[-1])


def _joined(opening: str, elements: pa.Array, array: pa.Array, closing: str) -> pa.Array:
    """Returns texts of lists whose elements are texts; `array` says how many each has and which are null."""
    offsets = to_numpy(array.offsets).astype(np.int64)
    starts = offsets - offsets[0]
    listed = pa.ListArray.from_arrays(
        pa.array(starts.astype(np.int32), pa.int32(), mask=np.append(~valid_rows(array), False)), elements
    )
    return pc.binary_join_element_wise(opening, pc.binary_join(listed, ","), closing, "")
