"""Columns as numpy arrays: codes of distinct values, whichever way they are found."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from reagent_lite.data.rows.columns import Column, per_distinct
from reagent_lite.data.rows.named import in_order

ABSENT = -1


def coded(array: pa.Array, *, text: bool = False) -> tuple[list[int], list[object]]:
    """Returns (1000 + the number of each value, -7 for what is no number; the values that were decoded)."""
    asked: list[object] = []

    def decode(value: object) -> int:
        asked.append(value)
        return 1000 + int(value) if isinstance(value, int | float) and value == value else -7

    codes = per_distinct(Column("action", array, text), decode, ABSENT, np.int32)
    assert codes.dtype == np.int32
    return codes.tolist(), asked


@pytest.mark.parametrize("kind", [pa.float64(), pa.int64(), pa.int8(), pa.uint64()], ids=str)
def test_small_integers_are_decoded_once_each(kind: pa.DataType) -> None:
    codes, asked = coded(pa.array([3, 0, 3, 100, 0], kind))
    assert codes == [1003, 1000, 1003, 1100, 1000]
    assert asked == [0, 3, 100]


def test_null_is_absent_and_not_decoded() -> None:
    assert coded(pa.array([1, None, 1], pa.float64())) == ([1001, ABSENT, 1001], [1])
    assert coded(pa.array([None, None], pa.float64())) == ([ABSENT, ABSENT], [])
    assert coded(pa.array([], pa.float64())) == ([], [])


@pytest.mark.parametrize(
    "values", [[1.0, 256.0], [1.0, -1.0], [2.5, 2.0], [1e300, 255.0, 0.0], [2.0**53, 0.0]], ids=str
)
def test_other_numbers_are_told_from_small_integers(values: list[float]) -> None:
    """Modulo 256 some of them are the same: 256 is 0, and -1 is 255."""
    asked: list[object] = []

    def decode(value: object) -> int:
        asked.append(value)
        return len(asked) - 1

    codes = per_distinct(Column("action", pa.array(values * 2, pa.float64()), text=False), decode, ABSENT)
    assert [asked[code] for code in codes.tolist()] == values * 2
    assert len(asked) == len(values)


def test_nan_is_no_small_integer() -> None:
    assert coded(pa.array([float("nan"), None, 1.0], pa.float64()))[0] == [-7, ABSENT, 1001]


def test_a_slice_of_an_array_has_its_own_values() -> None:
    assert coded(pa.array([9, 1, None, 2], pa.int64()).slice(1)) == ([1001, ABSENT, 1002], [1, 2])


def test_texts_are_parsed_and_strings_are_not() -> None:
    assert coded(pa.array(["3", '"a"', None]), text=True)[0] == [1003, -7, ABSENT]
    assert coded(pa.array(["3", "a"]))[1] == ["3", "a"]


def test_columns_in_another_order() -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    assert in_order(values, ("x", "y"), ("y", "z", "x"), absent=0).tolist() == [[2, 0, 1], [4, 0, 3]]
    assert in_order(values, (5, 9), (5, 9), absent=0) is values
    assert in_order(values[:0], (5, 9), (9,), absent=0).shape == (0, 1)
