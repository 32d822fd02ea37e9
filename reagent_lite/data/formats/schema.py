"""Arrow types of logs: merging the types of several blocks, and arrays as numpy."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.errors import DataError, Problem, first_line, join_names
from reagent_lite.item_table import ItemTable

TEXT_METADATA = {b"reagent_lite": b"json"}
"""Marks a string column whose values are JSON texts, since they have no common Arrow type."""

VALUES = pa.struct({"number": pa.float32(), "text": pa.string()})
"""Values of maps in which some features are numbers and others strings; the unused member is null."""
INTEGER_OR_TIME = "an integer or a time such as 2026-01-31T10:00:00"
"""Words for a sequence number, in errors."""


def is_text(field: pa.Field) -> bool:
    """Whether a column holds JSON texts instead of values of one Arrow type."""
    return bool(field.metadata == TEXT_METADATA and pa.types.is_string(field.type))


def merge_fields(before: dict[str, pa.Field], more: dict[str, pa.Field]) -> dict[str, pa.Field]:
    """Returns the columns of both with types that hold all values; columns without a common type become text."""
    return before | {
        name: _merge_field(before[name], field) if name in before else field for name, field in more.items()
    }


def _merge_field(first: pa.Field, other: pa.Field) -> pa.Field:
    if not is_text(first) and not is_text(other):
        try:
            schemas = [pa.schema([(first.name, field.type)]) for field in (first, other)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0)
        except pa.ArrowException:
            pass
    return pa.field(first.name, pa.string(), metadata=TEXT_METADATA)


def conform(table: pa.Table, fields: dict[str, pa.Field]) -> pa.Table:
    """Returns a table with the columns of `merge_fields`: null if it lacks one, JSON texts if types are mixed.

    Raises:
        DataError: a column with fractions elsewhere has an integer that float64 does not hold.
    """
    for number, column in enumerate(table.schema):
        if is_text(fields[column.name]) and not is_text(column):
            values = table.column(number).to_pylist(maps_as_pydicts="lossy")
            texts = [None if value is None else json.dumps(_drop_nulls(value)) for value in values]
            table = table.set_column(number, fields[column.name], pa.array(texts, pa.string()))
    whole = pa.schema(list(fields.values()))
    if table.schema == whole:
        return table
    try:
        return pa.concat_tables([whole.empty_table(), table], promote_options="permissive")
    except pa.ArrowInvalid as error:
        names = join_names(field.name for field in table.schema if field.type != whole.field(field.name).type)
        expected = "integers below 2^53, as other rows have fractions there"
        todo = "Write ids as strings in all rows"
        raise DataError(Problem(f"column {names}", expected, first_line(error), todo)) from error


def _drop_nulls(value: Any) -> Any:
    """Returns a value without the nulls of its objects: Arrow gives each object the keys of all."""
    if isinstance(value, dict):
        return {str(key): _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def in_one_piece(chunks: pa.ChunkedArray) -> pa.Array:
    """Returns a table's column as one array."""
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def valid_rows(array: pa.Array) -> NDArray[np.bool_]:
    """Returns [n], whether each value is not null."""
    if array.null_count == 0:
        return np.ones(len(array), bool)
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def fill_nulls(array: pa.Array, value: float) -> NDArray[Any]:
    """Returns the values of a primitive array with `value` where it is null; booleans as uint8."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values: NDArray[Any] = (array.fill_null(value) if array.null_count else array).to_numpy()
    return values


def find_distinct(array: pa.Array) -> tuple[pa.Array, NDArray[np.int32]]:
    """Returns (the distinct values of an array [n], without null; [n] the index of each value among them, -1 for null).

    Distinct values are in the order in which they first occur.
    """
    encoded = array.dictionary_encode()
    return encoded.dictionary, fill_nulls(encoded.indices, -1)


def take_or_null(values: pa.Array, indices: NDArray[np.integer[Any]]) -> pa.Array:
    """Returns the values at indices [n], null where an index is negative."""
    return values.take(pa.array(indices, mask=indices < 0))


def split_pairs(array: pa.Array) -> tuple[pa.Array, pa.Array, NDArray[np.int64]]:
    """Returns the keys and values of an array of maps, or of lists of structs (key, value), and each pair's row."""
    offsets = to_numpy(array.offsets).astype(np.int64)
    span = slice(int(offsets[0]), int(offsets[-1]))
    row = np.repeat(np.arange(len(array)), np.diff(offsets))
    if pa.types.is_map(array.type):
        return array.keys[span], array.items[span], row
    pairs = array.values[span]
    return pc.struct_field(pairs, "key"), pc.struct_field(pairs, "value"), row


def to_numpy(array: pa.Array) -> NDArray[Any]:
    """Returns the values of a primitive array, 0 where it is null; booleans as uint8."""
    return fill_nulls(array, 0)


def microseconds_of(text: str) -> int | None:
    """Returns the microseconds since 1970 of an ISO 8601 date or time, UTC if it has no zone; None for other text."""
    if "-" not in text:
        return None
    try:
        return _since_1970(datetime.fromisoformat(text))
    except ValueError:
        return None


def _since_1970(time: datetime) -> int:
    return (time.replace(tzinfo=time.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


FIRST_TIME = _since_1970(datetime.min)
LAST_TIME = _since_1970(datetime.max)
"""Microseconds since 1970 of the first and the last time that a text can have, in the years 1 and 9999."""


def item_values(rows: pa.Table | pa.RecordBatch, items: ItemTable | None) -> int:
    """Returns the largest number of features that the items of rows' lists have; 0 without an item table."""
    if items is None:
        return 0
    chunks = [chunk for column in rows.columns for chunk in getattr(column, "chunks", [column])]
    lists = [chunk.values for chunk in chunks if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)]
    # counts all values of the lists' arrays: their offsets may be damaged
    listed = sum(len(values) for values in lists if not pa.types.is_nested(values.type))
    return len(items.feature_ids) * (listed + (len(items) * rows.num_rows if items.all_possible else 0))
