"""A sample by hash against sorting everything."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.features.hash_sample import HashSample
from reagent_lite.data.rows.transitions import FeatureMatrix


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=9), max_size=8),
    st.integers(1, 12),
    st.booleans(),
)
def test_the_least_hashes_stay_and_of_equals_the_first(
    blocks: list[list[tuple[int, int]]], size: int, settled: bool
) -> None:
    """Rows are (hash, feature id); each row's value is its number, so the sample says which rows it has."""
    sample, rows = HashSample(size), []
    for block in blocks:
        if not block:
            continue
        ids = tuple(dict.fromkeys(one for _, one in block))
        values = np.full((len(block), len(ids)), np.nan, np.float32)
        for place, (_, one) in enumerate(block):
            values[place, ids.index(one)] = len(rows)
            rows.append(block[place])
        hashes = np.array([one for one, _ in block], np.uint64)
        cut = sample.wanted(hashes)
        sample.add(hashes[cut], FeatureMatrix(ids, values[cut]))
        if settled:
            sample.finish()
    found = sample.finish()
    expected = sorted(range(len(rows)), key=lambda number: rows[number][0])[:size]
    matrix = np.array([found.column(one) for one in range(4)])
    assert len(found) == len(expected)
    assert [rows[number][1] for number in expected] == [int(np.flatnonzero(~np.isnan(one))[0]) for one in matrix.T]
    assert expected == [int(one[~np.isnan(one)][0]) for one in matrix.T]
