"""Tables of one log, whose columns may come late or with narrower types: one type for each column of the whole log."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.schema import is_text, merge_fields, valid_rows
from reagent_lite.data.rows.columns import in_one_piece
from reagent_lite.data.rows.table import list_array
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
    """Returns a typed table with the columns `merged` gives: others' types, and nulls for columns it lacks."""
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
