"""Logs in one form: the columns of a block as the types that a log's writer takes, whatever they came as.

    mdp_id, ds                            string
    sequence_number                       int64
    state_features, next_state_features   map<int32, float>
    metrics                               map<string, float>
    action, next_action                   string (names), int64 (indices) or map<int32, float>
    possible_actions, ...                 list of strings, of 0 and 1 as int8, or of map<int32, float>
    reward, propensity, ...               float or double, as they came
    terminal, truncated                   bool

Numbers in maps are float32, as training reads them. What training refuses of a single value is refused here too.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import filled, from_indices, is_text, merge_fields, valid_rows
from reagent_lite.data.rows.columns import (
    Column,
    Faults,
    Mask,
    column_of,
    flags,
    integers,
    is_number,
    is_string,
    numbers,
    pieces,
    scalar,
    strings,
)
from reagent_lite.data.rows.named import Named, named_numbers
from reagent_lite.errors import DataError, Problem

FEATURES = pa.map_(pa.int32(), pa.float32())
METRICS = pa.map_(pa.string(), pa.float32())
_STATES = ("state_features", "next_state_features")
_ACTIONS = ("action", "next_action")
_LISTS = ("possible_actions", "possible_next_actions")
_NUMBERS = ("reward", "propensity", "action_probability", "time_diff")
_FLAGS = ("terminal", "truncated")


def settled(block: Block) -> pa.Table:
    """Returns the columns of a block as the types above; columns no log has stay as they are.

    Raises:
        DataError: naming the lines of values that are none of a log, or of actions of several kinds.
    """
    faults = Faults(block)
    columns = {}
    for name in block.table.column_names:
        column = column_of(block, name)
        if pa.types.is_null(column.array.type):
            columns[name] = column.array
        else:
            columns[name] = _by_distinct(block, column) if column.text else _settled(column, faults)
    if faults.count:
        raise DataError(faults.first())
    return pa.table(columns)


def _by_distinct(block: Block, column: Column) -> pa.Array:
    """Returns a column of JSON texts, each distinct one settled once; few are in a column that has no better type."""
    encoded = column.array.dictionary_encode()
    indices = filled(encoded.indices, -1)
    distinct, first = np.unique(indices[indices >= 0], return_index=True)
    rows = np.flatnonzero(indices >= 0)[first]
    field = block.table.schema.field(column.name)
    texts = pa.table([encoded.dictionary.take(from_indices(distinct.astype(np.int64)))], pa.schema([field]))
    part = Block(file=block.file, file_number=block.file_number, table=texts, lines=block.lines[rows])
    faults = Faults(part)
    settled_texts = _settled(column_of(part, column.name), faults)
    if faults.count:
        raise DataError(faults.first())
    at = np.searchsorted(distinct, indices)
    return settled_texts.take(pa.array(at, mask=indices < 0))


def _settled(column: Column, faults: Faults) -> pa.Array:
    if column.name in _STATES:
        return _feature_maps(column, faults)
    if column.name == "metrics":
        named = named_numbers(column, faults, nan_is_absent=False)
        return _maps(named, pa.array(named.names, pa.string()), METRICS)
    if column.name in _ACTIONS:
        return _taken(column, faults)
    if column.name in _LISTS:
        return _possible(column, faults)
    if column.name in _NUMBERS:
        return _numbers(column, faults)
    if column.name in _FLAGS:
        return pa.array(flags(column, faults) == 1, mask=~column.present)
    if column.name == "sequence_number":
        return pa.array(integers(column, faults), mask=~column.present)
    if column.name in ("mdp_id", "ds"):
        return _strings(column, faults)
    return _other(column)


def _strings(column: Column, faults: Faults) -> pa.Array:
    indices, distinct = strings(column, faults)
    return distinct.take(pa.array(indices, mask=indices < 0))


def _numbers(column: Column, faults: Faults) -> pa.Array:
    values = scalar(column, faults, "a number")
    faults.add(column.present & ~np.isfinite(values), f"a finite number in {column.name}", lambda row: values[row])
    kind = pa.float32() if pa.types.is_float32(column.array.type) else pa.float64()
    return pa.array(values, mask=~column.present).cast(kind)


def _other(column: Column) -> pa.Array:
    array = column.array
    if pa.types.is_dictionary(array.type):
        return array.cast(array.type.value_type)
    return array


def _feature_maps(column: Column, faults: Faults, rows: NDArray[np.int64] | None = None) -> pa.Array:
    named = named_numbers(column, faults, rows=rows)
    ids = []
    for index, name in enumerate(named.names):
        having = np.flatnonzero(~np.isnan(named.values[:, index]))
        if not (name.removeprefix("-").isdecimal() and str(int(name)) == name and abs(int(name)) < 1 << 31):
            at = int(having[0]) if len(having) else 0
            raise faults.refuse(at if rows is None else int(rows[at]), "integers as feature ids", repr(name))
        ids.append(int(name))
    return _maps(named, pa.array(ids, pa.int32()), FEATURES)


def _maps(named: Named, keys: pa.Array, kind: pa.MapType) -> pa.Array:
    """Returns the maps of dense values: null where there is none, what is NaN left out."""
    there = ~np.isnan(named.values) & named.present[:, None]
    offsets = _offsets(there.sum(1), named.present)
    row_keys = keys.take(from_indices(np.nonzero(there)[1].astype(np.int64)))
    maps = pa.MapArray.from_arrays(offsets, row_keys, pa.array(named.values[there], pa.float32()))
    return maps.cast(kind) if maps.type != kind else maps


def _offsets(lengths: NDArray[Any], present: Mask) -> pa.Array:
    """Returns offsets of lists; a null one makes a null list."""
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.array(ends, pa.int32(), mask=np.append(~present, False))


def _taken(column: Column, faults: Faults) -> pa.Array:
    """Returns actions as names, indices or maps: all of one kind."""
    array = column.array
    if column.text:
        kind = _kind_of_texts(column, faults)
        if kind is dict:
            return _feature_maps(column, faults)
        return _strings(column, faults) if kind is str else _indices(column, faults)
    if is_string(array.type):
        return _strings(column, faults)
    return _indices(column, faults) if is_number(array.type) else _feature_maps(column, faults)


def _indices(column: Column, faults: Faults) -> pa.Array:
    return pa.array(integers(column, faults), mask=~column.present)


def _kind_of_texts(column: Column, faults: Faults, rows: NDArray[np.int64] | None = None) -> type:
    """Returns str, int or dict: what all JSON texts of a column are."""
    found: type | None = None
    seen: set[str] = set()
    for at, text in enumerate(column.array.to_pylist()):
        if text is None or text in seen:
            continue
        seen.add(text)
        value = json.loads(text)
        kind = int if isinstance(value, float) else type(value)
        if kind not in (str, int, dict) or kind is not (found or kind):
            row = at if rows is None else int(rows[at])
            words = {str: "a name", int: "an index", dict: "a map"}
            expected = f"{words[found]} as before in {column.name}" if found else f"an action in {column.name}"
            raise faults.refuse(row, expected, text[:60], "Write actions of one kind")
        found = kind
    return found or str


def _possible(column: Column, faults: Faults) -> pa.Array:
    taken = pieces(column, faults, "a list")
    elements = Column(column.name, taken.elements, taken.text)
    kind = taken.elements.type
    if not len(taken.elements):
        values = pa.nulls(0)
    elif taken.text:
        kinds = _kind_of_texts(elements, faults, taken.rows)
        if kinds is str:
            values = pa.array([json.loads(text) for text in taken.elements.to_pylist()], pa.string())
        elif kinds is dict:
            values = _feature_maps(elements, faults, taken.rows)
        else:
            values = _zero_or_one(np.array([float(text) for text in taken.elements.to_pylist()]), column, taken.rows,
                                  faults)  # fmt: skip
    elif is_string(kind):
        values = taken.elements.cast(pa.string())
    elif is_number(kind):
        values = _zero_or_one(numbers(taken.elements), column, taken.rows, faults)
    else:
        values = _feature_maps(elements, faults, taken.rows)
    return pa.ListArray.from_arrays(_offsets(taken.lengths, column.present), values)


def _zero_or_one(values: NDArray[np.float64], column: Column, rows: NDArray[np.int64], faults: Faults) -> pa.Array:
    wrong = np.zeros(len(column.array), bool)
    wrong[rows[(values != 0) & (values != 1)]] = True
    faults.add(wrong, f"0 or 1 per action, names, or maps in {column.name}", column.value)
    return pa.array((values == 1).astype(np.int8))


def merged(known: dict[str, pa.Field], table: pa.Table, where: str) -> dict[str, pa.Field]:
    """Returns the columns of settled tables that hold the values of all seen so far.

    Args:
        known: of the tables before.
        table: the next, as `settled` gives it.
        where: names its first row in errors.

    Raises:
        DataError: a column whose values here and before have no type in common.
    """
    more = {one.name: one for one in table.schema}
    fields = merge_fields(known, more)
    for name, one in fields.items():
        if is_text(one) and name in more:
            raise DataError(Problem(where, f"{known[name].type} in {name}, as in the rows before", str(more[name].type),
                                    "Write its values as of one kind"))  # fmt: skip
    return fields


def conformed(table: pa.Table, fields: dict[str, pa.Field]) -> pa.Table:
    """Returns a settled table with the columns `merged` gives: others' types, and nulls for columns it lacks."""
    columns = {}
    for name, one in fields.items():
        index = table.schema.get_field_index(name)
        array = pa.nulls(table.num_rows) if index < 0 else column_of_table(table, index)
        columns[name] = _conformed(array, one.type)
    return pa.table(columns, pa.schema(list(fields.values())))


def column_of_table(table: pa.Table, index: int) -> pa.Array:
    """Returns a column of a table in one piece."""
    array = table.column(index).combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _conformed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type):
        # nothing but empty lists
        empty = np.zeros(len(array), np.int64)
        return pa.ListArray.from_arrays(_offsets(empty, valid_rows(array)), pa.array([], kind.value_type))
    return pc.cast(array, kind)
