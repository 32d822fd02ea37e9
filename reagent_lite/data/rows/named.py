"""Maps {name: number} of a block, feature maps and metrics, as dense numpy arrays, with the faults found on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.schema import any_true, filled, to_numpy, valid_rows
from reagent_lite.data.rows.columns import Column, Faults, Mask, is_list, is_number, numbers, per_distinct, short


@dataclass(frozen=True, slots=True)
class Named:
    """Numbers by name, dense: a feature map or metrics.

    Attributes:
        names: of the columns, each once.
        values: [n, names] float32, NaN where absent.
        present: [n] whether the row has a map at all.
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]
    present: Mask


def named_numbers(
    column: Column, faults: Faults, *, rows: NDArray[np.int64] | None = None, nan_is_absent: bool = True
) -> Named:
    """Returns the maps {name: number} of a column; infinite values and other things than numbers are faults.

    Args:
        column: [m] struct, map, list of key-value structs, or JSON text; features of rows or of candidates.
        faults: of the block.
        rows: [m] the block's row of each value, where it is not the value's own number.
        nan_is_absent: whether a NaN counts as absent; else it is a fault. Null is absent either way.
    """
    reading = _NamedReading(column, faults, np.arange(len(column.array)) if rows is None else rows, nan_is_absent)
    array = column.array
    if column.text:
        found = reading.of_text()
    elif pa.types.is_null(array.type):
        found = Named((), np.empty((len(array), 0), np.float32), np.zeros(len(array), bool))
    elif pa.types.is_struct(array.type):
        found = reading.of_struct()
    elif pa.types.is_map(array.type) or (is_list(array.type) and _is_pair(array.type.value_type)):
        found = reading.of_pairs()
    else:
        reading.fault(column.present, "an object {id: number}", column.value)
        found = Named((), np.empty((len(array), 0), np.float32), column.present)
    infinite = np.isinf(found.values)
    if infinite.any():
        column_of_first = infinite.argmax(axis=1)
        names, values = found.names, found.values

        def got(at: int) -> str:
            return f"{values[at, column_of_first[at]]} for {names[column_of_first[at]]!r} as float32"

        reading.fault(any_true(infinite), "finite numbers", got)
    return found


def _is_pair(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.num_fields == 2)


@dataclass(frozen=True, slots=True)
class _NamedReading:
    column: Column
    faults: Faults
    rows: NDArray[np.int64]
    nan_is_absent: bool

    def fault(self, values: Mask, expected: str, got: Callable[[int], object]) -> None:
        """Records faults of values of the column as faults of the block's rows."""
        at = np.flatnonzero(values)
        where: dict[int, int] = {int(row): int(one) for one, row in zip(at[::-1], self.rows[at][::-1], strict=True)}
        rows = np.zeros(self.faults.block.table.num_rows, bool)
        rows[self.rows[at]] = True
        self.faults.add(rows, f"{expected} in {self.column.name}", lambda row: got(where[row]))

    def of_struct(self) -> Named:
        array = self.column.array
        values = np.empty((len(array), array.type.num_fields), np.float32)
        for index, (child, one) in enumerate(zip(array.flatten(), array.type, strict=True)):
            values[:, index] = self._floats(child, one.name)
        names = tuple(one.name for one in array.type)
        if len(set(names)) < len(names):
            self.fault(np.ones(len(array), bool), "each id once", lambda _: f"a struct with fields {', '.join(names)}")
        return Named(names, values, self.column.present)

    def of_pairs(self) -> Named:
        array, present = self.column.array, self.column.present
        offsets = to_numpy(array.offsets).astype(np.int64)
        span = slice(int(offsets[0]), int(offsets[-1]))
        if pa.types.is_map(array.type):
            keys, items = array.keys[span], array.items[span]
        else:
            keys, items = array.values[span].flatten()
        row = np.repeat(np.arange(len(array)), np.diff(offsets))
        encoded = keys.dictionary_encode()
        names = tuple(str(name) for name in encoded.dictionary.to_pylist())
        inner = _NamedReading(
            Column(self.column.name, items, text=False), self.faults, self.rows[row], self.nan_is_absent
        )
        numbers_of_items = inner._floats(items, "")
        values = np.full((len(array), len(names)), np.nan, np.float32)
        kept = present[row]
        places = row[kept], to_numpy(encoded.indices)[kept]
        values[places] = numbers_of_items[kept]
        once = np.zeros(values.shape, bool)
        once[places] = True
        twice = once.sum(axis=1) < np.bincount(places[0], minlength=len(array))
        self.fault(twice, "each id once", self.column.value)
        return Named(names, values, present)

    def of_text(self) -> Named:
        maps: list[dict[str, object]] = []

        def decode(value: object) -> int:
            good = isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values())
            maps.append(value if good and isinstance(value, dict) else {})
            return len(maps) - 1 if good else -2

        codes = per_distinct(self.column, decode, -1)
        self.fault(codes == -2, "an object {id: number}", self.column.value)
        names = tuple(dict.fromkeys(name for one in maps for name in one))
        rows = [[one.get(name) for name in names] for one in maps]
        table = np.array([*rows, [None] * len(names)], np.float64).reshape(len(maps) + 1, len(names))
        with np.errstate(over="ignore"):
            values = table.astype(np.float32)[np.where(codes < 0, len(maps), codes)]
        return Named(names, values, self.column.present)

    def _floats(self, array: pa.Array, name: str) -> NDArray[np.float32]:
        """[n] float32 of a number array, NaN where null."""
        label = f"a number for {name!r}" if name else "numbers"
        if pa.types.is_null(array.type):
            return np.full(len(array), np.nan, np.float32)
        if not is_number(array.type):
            self.fault(valid_rows(array), label, lambda at: short(json.dumps(array[at].as_py(), default=str)))
            return np.full(len(array), np.nan, np.float32)
        if pa.types.is_boolean(array.type) or pa.types.is_decimal(array.type):
            array = pa.array(numbers(array), mask=~valid_rows(array))
        if not self.nan_is_absent and pa.types.is_floating(array.type):
            self.fault(valid_rows(array) & np.isnan(filled(array, np.nan)), label, lambda at: "NaN")
        return filled(pc.cast(array, pa.float32(), safe=False), np.nan)
