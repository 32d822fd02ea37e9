"""Parts against the whole, and the sample against sorting everything."""

import math
from functools import reduce
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.features.summary import ColumnSummary, FeatureSummary, Merge
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.feature_ids import id_of


@given(
    st.lists(
        st.lists((st.floats(-100, 100, width=32) | st.just(nan) | st.just(-1337.1337)), max_size=8),
        min_size=1,
        max_size=5,
    )
)
def test_parts_merge_to_the_whole(parts: list[list[float]]) -> None:
    summaries = [FeatureSummary.of(np.array(part, np.float32), 4) for part in parts]
    merged = reduce(lambda first, other: first.merge(other, 4), summaries)
    whole = np.array([x for part in parts for x in part if not math.isnan(x) and x > -1000], np.float64)
    distinct = tuple(sorted(set(whole.tolist())))
    assert (merged.moments.count, merged.low, merged.high, merged.whole, merged.distinct) == (
        len(whole), min(distinct, default=math.inf), max(distinct, default=-math.inf),
        all(x == int(x) for x in distinct), distinct if len(distinct) <= 4 else None,
    )  # fmt: skip
    assert len(whole) < 2 or [merged.moments.mean, merged.moments.stddev] == pytest.approx(
        [whole.mean(), whole.std(ddof=1)], rel=1e-9, abs=1e-9
    )


IDS = (0, 1, 3, id_of("age"))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(IDS)), max_size=9), max_size=8),
    st.integers(1, 12),
    st.integers(0, 8),
)
def test_the_least_hashes_stay_and_of_equals_the_first(
    blocks: list[list[tuple[int, int]]], size: int, cut: int
) -> None:
    """Rows are (hash, feature id); each row's value is its number, by which the sample is compared.

    The blocks after `cut` are those of another machine.
    """
    rows = [row for block in blocks for row in block]
    numbers = iter(range(len(rows)))
    merges = [Merge(size, 4), Merge(size, 4)]
    for index, block in enumerate(blocks):
        ids = tuple(dict.fromkeys(feature_id for _, feature_id in block))
        values = [[next(numbers) if each == own else nan for each in ids] for _, own in block]
        matrix = FeatureMatrix(ids, np.array(values, np.float32).reshape(len(block), len(ids)))
        merges[index >= cut].add(ColumnSummary.of(matrix, np.array([row_hash for row_hash, _ in block], np.uint64), 4))
    sent = merges[1].summary()
    returned = ColumnSummary.from_bytes(sent.to_bytes())
    names = {str(feature_id) for block in blocks[cut:] for _, feature_id in block}
    assert (returned.rows, returned.features, {*map(str, returned.features)}) == (
        sent.rows, sent.features, names,
    )  # fmt: skip
    merges[0].add(returned)
    merged = merges[0].summary()
    expected = sorted(range(len(rows)), key=lambda number: rows[number][0])[:size]
    assert (merged.rows, sorted(merged.hashes.tolist())) == (len(rows), [rows[number][0] for number in expected])
    assert [merged.sample_values(feature_id).tolist() for feature_id in IDS] == [
        sorted(number for number in expected if rows[number][1] == feature_id) for feature_id in IDS
    ]


def test_a_sample_of_sparse_rows_takes_the_memory_of_their_values() -> None:
    """400 rows with one of 400 features each are 640 kB as a matrix."""
    merge = Merge(400, 4)
    for first in range(0, 400, 50):
        values = np.full((50, 400), np.nan, np.float32)
        values[np.arange(50), first + np.arange(50)] = np.arange(50)
        hashes = np.arange(first, first + 50, dtype=np.uint64)
        merge.add(ColumnSummary.of(FeatureMatrix(tuple(range(400)), values), hashes, 4))
    summary = merge.summary()
    assert sum(matrix.values.nbytes for matrix in summary.sample) == 4 * 50 * 50 * 8
    assert (summary.sample_values(73).tolist(), len(summary.hashes), len(summary.features)) == ([23.0], 400, 400)
