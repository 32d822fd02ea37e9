"""Logs in one form: the columns of a block as the types that a log's writer takes, whatever they came as.

    mdp_id, ds                            string
    sequence_number                       int64
    state_features, next_state_features   map<int64, float>
    metrics                               map<string, float>
    action, next_action                   string (names), int64 (indices) or map<int64, float>
    possible_actions, ...                 list of strings, of 0 and 1 as int8, or of map<int64, float>
    reward, propensity, ...               float or double, as they came
    terminal, truncated                   bool

Numbers in maps are float32, as training reads them. What training refuses of a single value is refused here too.
Further columns are carried along as they are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import is_text, merge_fields, valid_rows
from reagent_lite.data.rows.columns import (
    Column,
    column_of,
    flags,
    in_one_piece,
    integers,
    list_array,
    numbers,
    per_distinct,
    pieces,
    texts,
)
from reagent_lite.data.rows.contract import NONE, WRONG, finite
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.named import features, metrics
from reagent_lite.data.rows.table import map_array
from reagent_lite.errors import DataError, Problem

_NAME, _NUMBER, _MAP = 0, 1, 2
_WORDS = ("a name", "an index", "a map")


def settled(block: Block) -> pa.Table:
    """Returns the columns of a block as the types above; columns no log has stay as they are.

    Raises:
        DataError: naming the lines of values that are none of a log, or of actions of several kinds.
    """
    faults = Faults(block)
    columns = {name: _settled(column_of(block, name), faults) for name in block.table.column_names}
    faults.require_none()
    return pa.table(columns)


def _settled(column: Column, faults: Faults) -> pa.Array:
    name, array = column.name, column.array
    if pa.types.is_null(array.type):
        return array
    if name in ("mdp_id", "ds"):
        return texts(column, faults)
    if name == "sequence_number":
        values, present = integers(column, faults)
        return pa.array(values, mask=~present)
    if name in ("state_features", "next_state_features"):
        return map_array(*features(column, faults))
    if name == "metrics":
        named = metrics(column, faults)
        return map_array(named, named.present)
    if name in ("action", "next_action"):
        return _actions(column, faults)
    if name in ("possible_actions", "possible_next_actions"):
        return _lists(column, faults)
    if name in ("reward", "propensity", "action_probability", "time_diff"):
        kind = pa.float32() if pa.types.is_float32(array.type) else pa.float64()
        return pa.array(finite(column, faults), mask=~column.present).cast(kind)
    if name in ("terminal", "truncated"):
        return pa.array(flags(column, faults) == 1, mask=~column.present)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _actions(column: Column, faults: Faults) -> pa.Array:
    """Returns actions as names, indices or maps: all of one kind."""
    kind = _one_kind(column, faults)
    if kind == _NAME:
        return texts(column, faults)
    if kind == _MAP:
        return map_array(*features(column, faults))
    values, present = integers(column, faults)
    return pa.array(values, mask=~present)


def _lists(column: Column, faults: Faults) -> pa.Array:
    lengths, elements = pieces(column, faults, "a list")
    if not len(elements.array):
        return list_array(pa.nulls(0), lengths, column.present)
    kind = _one_kind(elements, faults)
    if kind == _NAME:
        values = texts(elements, faults)
    elif kind == _MAP:
        values = map_array(*features(elements, faults))
    else:
        flag = numbers(elements, faults)
        wrong = (flag != 0) & (flag != 1)
        elements.fault(faults, wrong, f"0 or 1 per action, names, or maps in {column.name}")
        values = pa.array((flag == 1).astype(np.int8))
    return list_array(values, lengths, column.present)


def _one_kind(column: Column, faults: Faults) -> int:
    """Returns what all values of a column are: names, numbers or maps; others than the first are faults."""

    def kind_of(value: object) -> int:
        if isinstance(value, int | float):
            return _NUMBER
        return _NAME if isinstance(value, str) else _MAP if isinstance(value, dict) else WRONG

    kinds = per_distinct(column, kind_of, NONE)
    found = kinds[kinds >= 0]
    first = int(found[0]) if len(found) else _NAME
    wrong = (kinds != NONE) & (kinds != first)
    column.fault(faults, wrong, f"{_WORDS[first]} as before in {column.name}", todo="Write actions of one kind")
    return first


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
            raise DataError(
                Problem(
                    where,
                    f"{known[name].type} in {name}, as in the rows before",
                    str(more[name].type),
                    "Write its values as of one kind",
                )
            )
    return fields


def conformed(table: pa.Table, fields: dict[str, pa.Field]) -> pa.Table:
    """Returns a settled table with the columns `merged` gives: others' types, and nulls for columns it lacks."""
    columns = {}
    for name, one in fields.items():
        index = table.schema.get_field_index(name)
        array = pa.nulls(table.num_rows) if index < 0 else in_one_piece(table.column(index))
        columns[name] = _conformed(array, one.type)
    return pa.table(columns, pa.schema(list(fields.values())))


def _conformed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type):
        # nothing but empty lists
        return list_array(pa.array([], kind.value_type), np.zeros(len(array), np.int64), valid_rows(array))
    return pc.cast(array, kind)
