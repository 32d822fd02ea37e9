"""Dense features and metrics of a block."""

from __future__ import annotations

import numpy as np

from reagent_lite.data.rows.maps import in_order


def test_columns_in_another_order() -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    assert in_order(values, ("x", "y"), ("y", "z", "x"), absent=0).tolist() == [[2, 0, 1], [4, 0, 3]]
    assert in_order(values, (5, 9), (5, 9), absent=0) is values
    assert in_order(values[:0], (5, 9), (9,), absent=0).shape == (0, 1)
