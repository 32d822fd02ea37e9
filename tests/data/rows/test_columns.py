"""Columns as numpy arrays: codes of distinct values, and numbers of any Arrow type."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from reagent_lite.data.rows.columns import Column, per_distinct
from reagent_lite.data.rows.maps import in_order

ABSENT = -1


def coded(array: pa.Array, *, text: bool = False) -> tuple[list[int], list[object]]:
    """Returns (1000 + the number of each value, -7 for what is no number; the values that were decoded)."""
    asked: list[object] = []

    def decode(value: object) -> int:
        asked.append(value)
        return 1000 + int(value) if isinstance(value, int | float) and value == value else -7

    return per_distinct(Column("action", array, text), decode, ABSENT).tolist(), asked


@pytest.mark.parametrize("kind", [pa.float64(), pa.int64(), pa.int8(), pa.uint64()], ids=str)
def test_each_value_is_decoded_once_and_null_is_absent(kind: pa.DataType) -> None:
    assert coded(pa.array([9, 3, None, 0, 3], kind).slice(1)) == ([1003, ABSENT, 1000, 1003], [3, 0])
    assert coded(pa.array([None, None], kind)) == ([ABSENT, ABSENT], [])
    assert coded(pa.array([], kind)) == ([], [])


def test_texts_are_parsed_and_strings_are_not() -> None:
    assert coded(pa.array(["3", '"a"', None]), text=True)[0] == [1003, -7, ABSENT]
    assert coded(pa.array(["3", "a"]))[1] == ["3", "a"]
    assert coded(pa.array([float("nan"), 1.0]))[0] == [-7, 1001]


def test_columns_in_another_order() -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    assert in_order(values, ("x", "y"), ("y", "z", "x"), absent=0).tolist() == [[2, 0, 1], [4, 0, 3]]
    assert in_order(values, (5, 9), (5, 9), absent=0) is values
    assert in_order(values[:0], (5, 9), (9,), absent=0).shape == (0, 1)
