"""Tables of one log, whose columns may come late or with narrower types: one type for each column of the whole log."""

from __future__ import annotations

import pyarrow as pa

from reagent_lite.data.formats.schema import conformed, in_one_piece, is_text, merge_fields
from reagent_lite.data.rows.table import FEATURES, by_name
from reagent_lite.errors import DataError, Problem


def merged(known: dict[str, pa.Field], table: pa.Table, where: str) -> dict[str, pa.Field]:
    """Returns the columns of typed tables that hold the values of all seen so far.

    Args:
        known: of the tables before.
        table: the next, as `typed_table` gives it.
        where: names its first row in errors.

    Raises:
        DataError: a column whose values here and before have no type in common.
    """
    more = {one.name: one for one in table.schema}
    for name in known.keys() & more.keys():
        if _has_names(known[name].type) != _has_names(more[name].type):  # features by id here, by name there
            known, more = ({**one, name: pa.field(name, _by_name(one[name].type))} for one in (known, more))
    fields = merge_fields(known, more)
    for name, one in fields.items():
        if is_text(one) and name in more:
            expected, todo = f"{known[name].type} in {name}, as in the rows before", "Write its values as of one kind"
            raise DataError(Problem(where, expected, str(more[name].type), todo))
    return fields


def with_types(table: pa.Table, fields: dict[str, pa.Field]) -> pa.Table:
    """Returns a typed table with the columns `merged` gives: others' types, and nulls for columns it lacks."""
    for number, one in enumerate(table.schema):
        if one.type != fields[one.name].type and _has_names(fields[one.name].type):
            table = table.set_column(number, one.name, by_name(in_one_piece(table.column(number)), {}))
    return conformed(table, fields)


def _by_name(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_by_name(kind.value_type))
    return pa.map_(pa.string(), FEATURES.item_type) if kind == FEATURES else kind


def _has_names(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_names(kind.value_type)
    return bool(pa.types.is_map(kind) and pa.types.is_string(kind.key_type))
