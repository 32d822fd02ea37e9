"""The order of a copy's rows, by hand and against Python's own sorting."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.copy.build import find_order


def test_rows_of_two_blocks_by_hand() -> None:
    # slots 0 and 1 are of the first block's ids, 2 and 3 of the second's; "a" is in both, one row has none
    order = find_order(
        np.array([0, 1, -1, 2, 3, 2]),
        [pa.array(["b", "a"]), pa.array(["a", "c"])],
        np.array([7, 5, 1, 4, 0, 5]),
    )
    # a: rows 3 (4), 1 (5), 5 (5, the same again); b: row 0; c: row 4; then the row without mdp_id
    assert order.rows.tolist() == [3, 1, 5, 0, 4, 2]
    assert order.episode.tolist() == [0, 0, 0, 1, 2, 3]
    assert order.sequence.tolist() == [4, 5, 5, 7, 0, 1]
    assert (order.duplicates, order.num_episodes, order.alone.tolist()) == (1, 4, [2])
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in (b"a", b"b", b"c"))
    assert order.episode_hashes()[:3].tolist() == np.frombuffer(digests, "<u8").tolist()


def test_without_sequence_numbers_the_order_is_the_files() -> None:
    order = find_order(np.array([1, 0, 1]), [pa.array(["a", "b"])], None)
    assert order.rows.tolist() == [0, 1, 2]
    assert order.episode.tolist() == [1, 0, 1]
    assert order.sequence.tolist() == [0, 1, 2]


@pytest.mark.parametrize("large", [1, 2**61, 2**63 - 1])  # 2^62 values times 4 episodes are beyond 64 bits
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-2, 2)), min_size=1, max_size=30))
def test_the_order_is_that_of_sorting_by_both(large: int, rows: list[tuple[int, int]]) -> None:
    slots = np.array([slot for slot, _ in rows])
    sequence = np.array([max(-(2**63), min(2**63 - 1, place * large)) for _, place in rows])
    order = find_order(slots, [pa.array(["a", "b", "c", "d"])], sequence)
    alone = iter(range(4, 4 + len(rows)))
    episode = [slot if slot >= 0 else next(alone) for slot, _ in rows]
    if (slots < 0).all():
        assert order.rows.tolist() == list(range(len(rows)))
    else:
        assert order.rows.tolist() == sorted(range(len(rows)), key=lambda row: (episode[row], int(sequence[row])))
    assert order.episode.tolist() == [episode[row] for row in order.rows]
    assert order.sequence.tolist() == sequence[order.rows].tolist()
