"""Columns of a block as numpy arrays: numbers, flags, strings, codes and lists; records their faults.

Writers of logs choose among several Arrow types for the same values, and a column whose values have no common type is
read as JSON texts. `parse_column` returns one kind of array for both. Distinct texts are decoded in Python, once; the
work on rows is vectorized.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.column_names import ColumnKind, kind_of_column
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.csv import typed_cells
from reagent_lite.data.formats.schema import (
    FIRST_TIME,
    INTEGER_OR_TIME,
    LAST_TIME,
    fill_nulls,
    find_distinct,
    in_one_piece,
    is_text,
    microseconds_of,
    take_or_null,
    to_numpy,
    valid_rows,
)
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.matrices import Mask
from reagent_lite.errors import DataError, Problem, pluralize

NONE = -1
WRONG = -2
"""Codes of an absent or unknown value, and of an invalid value."""
INTEGERS = "integers"
TIMES = "times"
CUT = "parts of a microsecond"
"""Kinds of sequence numbers; CUT: times that were finer than a microsecond."""
_WHOLE_ID = r"^\s*(?:-?(0)|(-?[1-9][0-9]*))(?:\.0+)?\s*$"
"""A number that is an integer, without leading zeros; spaces may be around it, and pandas writes the id 7 as 7.0 if a
column has gaps."""
_BELOW_MICROSECONDS = re.compile(r"[.,]\d{6}0*[1-9]")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a block in one piece, or the elements of its lists.

    Attributes:
        name: the name of the column.
        array: [n] values.
        text: whether the values are JSON texts.
        rows: [n] the block's row of each value; None if value i belongs to row i.
    """

    name: str
    array: pa.Array
    text: bool = False
    rows: NDArray[np.int64] | None = None

    @property
    def present(self) -> Mask:
        """[n] whether there is a value."""
        return valid_rows(self.array)

    @property
    def nested(self) -> bool:
        """Whether the values are lists or objects."""
        return bool(pa.types.is_nested(self.array.type))

    def value(self, index: int) -> str:
        """Returns a value as JSON, for errors; keys that a struct has only for other rows are left out."""
        try:
            value = self.array[index].as_py()
            text = value if self.text and value is not None else _as_json(value)
        except (ArithmeticError, ValueError, pa.ArrowException):
            # Python has no such value: a time after the year 9999, an object with a key twice
            text = " ".join(self.array[index : index + 1].to_string(skip_new_lines=True)[1:-1].split())
        return text if len(text) <= 60 else text[:57] + "..."

    def fault(
        self,
        faults: Faults,
        values: Mask,
        expected: str,
        got: Callable[[int], object] | None = None,
        todo: str = "",
        rule: str = "unreadable",
    ) -> None:
        """Records a fault of the row of every value that is true in `values` [n]; see Faults.add."""
        got = got or self.value
        if self.rows is None:
            faults.add(values, expected, got, todo, rule)
        elif values.any():
            backwards = np.flatnonzero(values)[::-1]  # so that the first value of a row stays
            first: dict[int, int] = dict(zip(self.rows[backwards].tolist(), backwards.tolist(), strict=True))
            rows = np.zeros(len(faults.kind), bool)
            rows[self.rows[backwards]] = True
            faults.add(rows, expected, lambda row: got(first[row]), todo, rule)


def _as_json(value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(element, tuple) for element in value):
        return f"[{', '.join(_as_json(element) for element in value)}]"
    if isinstance(value, list | dict):  # a map is a list of pairs, a struct a dict
        pairs = value if isinstance(value, list) else [pair for pair in value.items() if pair[1] is not None]
        return f"{{{', '.join(f'{json.dumps(str(name))}: {_as_json(inner)}' for name, inner in pairs)}}}"
    return json.dumps(value, default=str)


def column_of(block: Block, name: str) -> Column:
    """Returns a column of the block; if the block lacks it, a column of nulls.

    In a column of maps or lists, strings are parsed as JSON, which is how databases export maps and lists. An empty
    mdp_id is null, as in CSV, and a string that is a whole number is the number's: 7.0 is 7, 007 is another id. Rewards
    and flags that are yes and no are 1 and 0.
    """
    index = block.table.schema.get_field_index(name)
    if index < 0:
        return Column(name, pa.nulls(block.table.num_rows))
    column = Column(name, in_one_piece(block.table.column(index)), text=is_text(block.table.schema.field(index)))
    if name == "mdp_id" and is_string(column.array.type):
        empty = pc.equal(column.array, '""' if column.text else "")
        return replace(column, array=pc.if_else(empty, None, whole_ids(column)))
    kind = kind_of_column(name)
    if name == "reward" or kind == "flag":
        return _with_answers(column)
    holds_json = kind in ("features", "metrics", "actions") or (kind == "action" and _first(column).startswith("{"))
    return of_cells(column, kind) if holds_json else column


def whole_ids(column: Column) -> pa.Array:
    """Returns a column of ids with those strings that are whole numbers in one spelling, "7" for " 7.0"."""
    if not is_string(column.array.type):
        return column.array
    quote = '"' if column.text else ""
    return pc.replace_substring_regex(
        column.array, _WHOLE_ID.replace("^", f"^{quote}").replace("$", f"{quote}$"), rf"{quote}\1\2{quote}"
    )


def _first(column: Column) -> str:
    """Returns the first value of a column of strings; "" for any other column, and for one without a value."""
    if not is_string(column.array.type) or column.array.null_count == len(column.array):
        return ""
    return str(column.array[int(column.present.argmax())])


def holds_maps(column: Column) -> bool | None:
    """Returns whether the values of a column are maps, such as features of actions; None if there is no value."""
    if not column.present.any():
        return None
    return column.nested or (column.text and _first(column).startswith("{"))


def of_cells(column: Column, kind: ColumnKind) -> Column:
    """Returns a column of strings as values of a kind, see `typed_cells`; a column of another type stays as it is."""
    if column.text or not is_string(column.array.type):
        return column
    field, array = typed_cells(column.name, column.array.cast(pa.string()), kind)
    return Column(column.name, array, is_text(field))


def is_number(kind: pa.DataType) -> bool:
    """Whether values of the type are numbers; true and false count as 1 and 0."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def is_string(kind: pa.DataType) -> bool:
    """Whether values of the type are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of the type are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


ANSWERS = {
    **dict.fromkeys(("yes", "y", "true", "t", "on", "ja", "j", "oui", "si", "sí", "sì", "sim", "да", "tak"), 1.0),
    **dict.fromkeys(("no", "n", "false", "f", "off", "nein", "non", "não", "nao", "нет", "nie"), 0.0),
}
"""Strings that are rewards and flags, in any case of letters."""


def _with_answers(column: Column) -> Column:
    """Returns a column of rewards or flags with 1 for yes and 0 for no, if all of its values are such texts."""
    if column.text or not is_string(column.array.type):
        return column
    distinct, codes = find_distinct(column.array)
    numbers = [ANSWERS.get(text.strip().lower()) for text in distinct.to_pylist()]
    if None in numbers:
        return column
    return replace(column, array=take_or_null(pa.array(numbers, pa.float64()), codes))


def parse_column(
    column: Column,
    faults: Faults,
    expected: str,
    fits: Callable[[pa.DataType], bool],
    parsed: tuple[pa.DataType, Callable[[Any], Any]],
    todo: str = "",
) -> pa.Array:
    """Returns the values of a column as an array whose type fits; other values are faults, and null.

    Args:
        column: a column of any type.
        faults: the faults of the block.
        expected: the expected values in words, without the column's name.
        fits: returns whether the caller reads an Arrow type.
        parsed: (type for JSON texts, function that converts a parsed value and returns None for an invalid one).
        todo: advice.
    """
    kind, convert = parsed
    if column.text:
        distinct, codes = find_distinct(column.array)
        values = [convert(json.loads(text)) for text in distinct.to_pylist()]
        wrong = np.array([*(value is None for value in values), False])
        column.fault(faults, wrong[codes], f"{expected} in {column.name}", todo=todo)
        return take_or_null(pa.array(values, kind), codes)
    if pa.types.is_null(column.array.type) or fits(column.array.type):
        return column.array
    column.fault(faults, column.present, f"{expected} in {column.name}", todo=todo)
    return pa.nulls(len(column.array))


def float_of(value: object) -> float | None:
    """Returns a value parsed from JSON as a float; None if it is not a number.

    True and false are 1 and 0, and integers beyond float64 are infinite.
    """
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def float64(array: pa.Array) -> NDArray[np.float64]:
    """Returns an array of numbers as [n] float64, NaN where null."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return fill_nulls(pc.cast(array, pa.float64(), safe=False), np.nan)


def numbers(
    column: Column,
    faults: Faults,
    expected: str = "a number",
    todo: str = "Write numbers as 1234.5, and absent ones as null or nothing",
) -> NDArray[np.float64]:
    """Returns a column of numbers as [n] float64, NaN where null; other values are faults."""
    return float64(parse_column(column, faults, expected, is_number, (pa.float64(), float_of), todo))


def integers(
    column: Column, faults: Faults, expected: str = "an integer", array: pa.Array | None = None
) -> tuple[NDArray[np.int64], Mask]:
    """Returns a column of integers as ([n] int64, [n] whether there is one); NaN counts as null.

    Other values are faults, including floats that may be rounded (from 2^53 on, as float32 from 2^24 on) and values
    beyond ±2^62, whose differences may not fit into int64. `array` has the integers if the column itself has values of
    another type.
    """
    array = column.array if array is None else array
    if pa.types.is_integer(array.type):
        values = fill_nulls(array, 0)
        present = valid_rows(array)
        far = (values >= 2**62) | (values <= -(2**62)) if values.dtype.itemsize == 8 else np.zeros(len(values), bool)
        wrong = far
    else:
        values = numbers(column, faults, expected, "")
        present = ~np.isnan(values)
        far = np.abs(values) >= 2.0**62
        rounded = present & (np.abs(values) >= _ROUNDED_FROM.get(array.type, 2.0**53))
        todo = "A float of this size may be a rounded integer: write it as an integer or a string"
        column.fault(faults, rounded & ~far, f"{expected} in {column.name}", todo=todo)
        wrong = present & ((values != np.floor(values)) | rounded)
    column.fault(faults, far, f"an integer within ±2^62 in {column.name}", rule=f"{column.name}_far")
    column.fault(faults, wrong, f"{expected} in {column.name}")
    return np.where(wrong | ~present, 0, values).astype(np.int64), present & ~wrong


_ROUNDED_FROM = {pa.float16(): 2.0**11, pa.float32(): 2.0**24}
"""Smallest integers that short floats may have rounded."""


def sequence_numbers(column: Column, faults: Faults) -> tuple[NDArray[np.int64], Mask]:
    """Returns `integers` of a column of integers or times; times, also ISO 8601 strings, are microseconds since 1970.

    Records in `faults.orders` which kinds of sequence numbers the column has, see `require_one_order`.
    """
    array = column.array
    times = np.zeros(len(array), bool)
    cut = times
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        times = column.present
        array, cut = _microseconds(array)
    elif is_string(array.type):
        distinct, index = find_distinct(array)
        texts = distinct.to_pylist()
        parsed = [json.loads(text) for text in texts] if column.text else texts
        times = np.array([*(isinstance(value, str) for value in parsed), False])[index]
        cut = times & np.array([*(bool(_BELOW_MICROSECONDS.search(text)) for text in texts), False])[index]
        array = take_or_null(pa.array(map(_order_of, parsed), pa.int64()), index)
    if array is not column.array:
        column.fault(faults, column.present & ~valid_rows(array), f"{INTEGER_OR_TIME} in {column.name}")
    values, present = integers(column, faults, INTEGER_OR_TIME, array)
    for order, rows in ((INTEGERS, present & ~times), (TIMES, present & times), (CUT, present & cut)):
        if rows.any():
            faults.orders.setdefault(order, faults.block.where(int(rows.argmax())))
    return values, present


def _order_of(value: object) -> int | None:
    if isinstance(value, str):
        return microseconds_of(value)
    if isinstance(value, int):
        return max(-(2**62), min(int(value), 2**62))  # the bounds themselves are faults
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else None


def _microseconds(array: pa.Array) -> tuple[pa.Array, Mask]:
    """Returns ([n] int64 of timestamps or dates, null outside the years 1 to 9999; [n] whether nanoseconds are cut)."""
    kind = array.type
    unit = "day" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit
    ticks = fill_nulls(array.cast(pa.int32() if unit == "day" else pa.int64()), 0).astype(np.int64)
    cut = np.zeros(len(array), bool)
    if unit == "ns":
        cut = ticks % 1000 != 0
        ticks = ticks // 1000
    size = {"day": 86_400 * 10**6, "s": 10**6, "ms": 10**3}.get(unit, 1)
    outside = (ticks < FIRST_TIME // size) | (ticks > LAST_TIME // size)
    return pa.array(np.where(outside, 0, ticks) * size, mask=outside | ~valid_rows(array)), cut


def require_one_order(orders: Mapping[str, str], duplicates: int) -> None:
    """Checks that the sequence numbers of a log are of one kind, and that rounding has not made two times equal.

    Args:
        orders: Faults.orders of all blocks.
        duplicates: number of rows with the mdp_id and sequence_number of another row.

    Raises:
        DataError: there are integers and times, or duplicates in a log whose times were cut to microseconds.
    """
    if INTEGERS in orders and TIMES in orders:
        expected = f"{INTEGERS} in sequence_number, as in {orders[INTEGERS]}"
        raise DataError(Problem(orders[TIMES], expected, "a time", "Write all of them as times, or all as integers"))
    if duplicates and CUT in orders:
        expected = "times of an episode that differ by a microsecond"
        got = f"{CUT}, and {pluralize(duplicates, 'row')} with the mdp_id and time of another"
        raise DataError(Problem(orders[CUT], expected, got, "Write sequence_number as integers"))


def flags(column: Column, faults: Faults) -> NDArray[np.float64]:
    """Returns [n] float64: 1 true, 0 false, NaN where null."""
    values = numbers(column, faults, "true or false", "")
    wrong = ~np.isnan(values) & (values != 0) & (values != 1)
    column.fault(faults, wrong, f"true or false in {column.name}")
    return np.where(wrong, np.nan, values)


def strings(
    column: Column,
    faults: Faults,
    expected: str = "a string or an integer",
    *,
    integers_too: bool = True,
) -> tuple[NDArray[np.int32], pa.Array]:
    """Returns ([n] indices of the distinct values, -1 where null; the distinct values).

    Integers become strings of their digits, or are faults without `integers_too`.
    """

    def text(value: object) -> str | None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        valid = isinstance(value, str) or (integers_too and isinstance(value, int) and not isinstance(value, bool))
        return str(value) if valid else None

    def fits(kind: pa.DataType) -> bool:
        return is_string(kind) or (integers_too and is_number(kind) and not pa.types.is_boolean(kind))

    array = parse_column(column, faults, expected, fits, (pa.string(), text))
    if pa.types.is_null(array.type):
        return np.full(len(array), -1, np.int32), pa.array([], pa.string())
    if not is_string(array.type) and not pa.types.is_integer(array.type):
        whole, present = integers(Column(column.name, array, rows=column.rows), faults, expected)
        array = pa.array(whole, mask=~present)
    distinct, codes = find_distinct(array)
    return codes, distinct.cast(pa.string())


def texts(
    column: Column, faults: Faults, expected: str = "a string or an integer", *, integers_too: bool = True
) -> pa.Array:
    """Returns [n] strings; see `strings`."""
    codes, distinct = strings(column, faults, expected, integers_too=integers_too)
    return take_or_null(distinct, codes)


def dates(column: Column, faults: Faults) -> pa.Array:
    """Returns ds as text: strings as they are; dates, and times at midnight, as 2026-01-31, like Hive and Spark.

    A time with a zone is taken in its zone.
    """
    array = column.array
    expected = "a date such as 2026-01-31"
    if pa.types.is_timestamp(array.type):
        try:
            local = array if array.type.tz is None else pc.local_timestamp(array)
        except pa.ArrowInvalid:
            column.fault(faults, column.present, f"a time zone that this machine knows in {column.name}")
            return pa.nulls(len(array), pa.string())
        days = local.cast(pa.date32(), safe=False)
        midnight = pc.equal(days.cast(local.type), local)
        faults.add(fill_nulls(midnight, 1) == 0, f"{expected} in {column.name}", column.value)
        return days.cast(pa.string())
    if pa.types.is_date(array.type):
        return array.cast(pa.date32()).cast(pa.string())
    return texts(column, faults, expected, integers_too=False)


def per_distinct(
    column: Column, decode: Callable[[object], int], absent: int, dtype: type[np.integer[Any]] = np.int64
) -> NDArray[Any]:
    """Returns [n] codes: `decode` of each value, called once per distinct value (texts parsed); `absent` where null."""
    array = column.array
    if not (is_number(array.type) or is_string(array.type)):
        # `decode` only looks at the type of other values: {} stands for all maps, [] for the rest
        inner = array.type.value_type if is_list(array.type) else array.type
        is_object = pa.types.is_struct(inner) or pa.types.is_map(array.type)
        return np.where(column.present, decode({} if is_object else []), absent).astype(dtype)
    distinct, index = find_distinct(array)
    values = distinct.to_pylist()
    parsed = [json.loads(value) for value in values] if column.text else values
    return np.array([*(decode(value) for value in parsed), absent], dtype)[index]


def pieces(column: Column, faults: Faults, expected: str) -> tuple[NDArray[np.int64], Column]:
    """Returns a column of lists as ([n] lengths, 0 where null; all elements in order).

    Values that are not lists are faults, and count as empty lists.
    """

    def dump_elements(value: object) -> list[str | None] | None:
        if not isinstance(value, list):
            return None
        return [None if element is None else json.dumps(element) for element in value]

    todo = """Write ["a", "b"] as json.dumps does; Python's own text of a list is not JSON"""
    todo = todo if is_string(column.array.type) and not column.text else ""
    array = parse_column(column, faults, expected, is_list, (pa.list_(pa.string()), dump_elements), todo)
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), Column(column.name, pa.nulls(0), rows=np.zeros(0, np.int64))
    present = valid_rows(array)
    offsets = to_numpy(array.offsets).astype(np.int64)
    elements = array.values[int(offsets[0]) : int(offsets[-1])]
    lengths = np.diff(offsets)
    if array.null_count and lengths[~present].any():
        kept = np.repeat(present, lengths)
        elements = elements.filter(pa.array(kept))
        lengths = np.where(present, lengths, 0)
    return lengths, Column(column.name, elements, column.text, np.repeat(np.arange(len(lengths)), lengths))
