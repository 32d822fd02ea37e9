"""Arrow arrays as numpy: bitmaps at any offset, nulls at any place."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.formats.schema import filled, valid_rows

TYPES = {pa.bool_(): st.booleans(), pa.int32(): st.integers(-9, 9), pa.string(): st.sampled_from(["", "x"])}


@pytest.mark.parametrize("kind", TYPES, ids=str)
@given(data=st.data())
def test_slices_have_their_own_nulls_and_values(kind: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | TYPES[kind], max_size=40))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
    array, wanted = pa.array(values, kind)[start:stop], values[start:stop]
    assert valid_rows(array).tolist() == [value is not None for value in wanted]
    if kind != pa.string():
        assert filled(array, 1).tolist() == [1 if value is None else int(value) for value in wanted]


def test_without_values_or_rows() -> None:
    assert valid_rows(pa.nulls(3)).tolist() == [False] * 3
    assert valid_rows(pa.nulls(0)).tolist() == []
