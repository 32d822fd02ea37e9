"""Distinct values of a column, and columns made of them."""

import numpy as np
import pyarrow as pa

from reagent_lite.data.formats.schema import find_distinct, take_or_null


def test_values_are_found_once_and_put_back_where_they_were() -> None:
    values, indices = find_distinct(pa.array(["b", None, "a", "b"]))
    assert values.to_pylist() == ["b", "a"]
    assert indices.tolist() == [0, -1, 1, 0]
    assert take_or_null(pa.array([1, 2]), indices).to_pylist() == [1, None, 2, 1]
    assert take_or_null(pa.array([], pa.string()), np.array([-1])).to_pylist() == [None]
