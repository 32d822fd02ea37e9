"""The read plan as a pure function: nothing twice, nothing lost, the same for every world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.plan import ReadPlan


def test_seven_rows_by_hand() -> None:
    plan = ReadPlan(rows=7, minibatch=3, epochs=2)
    assert (plan.steps_per_epoch, plan.num_steps) == (3, 6)
    assert [plan.rows_of_step(step) for step in range(6)] == [3, 3, 1, 3, 3, 1]
    assert plan.parts(1, 0) == [(3, 6)]
    assert plan.parts(5, 0) == [(6, 7)]


def test_shares_of_three_to_one() -> None:
    plan = ReadPlan(rows=16, minibatch=8, epochs=1, shares=(3, 1))
    assert plan.parts(1, 0) == [(8, 14)]
    assert plan.parts(1, 1) == [(14, 16)]


def test_a_rank_may_have_nothing() -> None:
    plan = ReadPlan(rows=1, minibatch=8, epochs=1, shares=(1, 1))
    assert sorted(plan.parts(0, 0) + plan.parts(0, 1)) == [(0, 0), (0, 1)]


@given(
    rows=st.integers(1, 60), minibatch=st.integers(1, 20), per_step=st.integers(1, 4),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)  # fmt: skip
def test_union_over_ranks_is_every_row_once(rows: int, minibatch: int, per_step: int, shares: list[int]) -> None:
    plan = ReadPlan(rows=rows, minibatch=minibatch, epochs=1, shares=tuple(shares), minibatches_per_step=per_step)
    seen = []
    for step in range(plan.steps_per_epoch):
        parts = [part for rank in range(len(shares)) for part in plan.parts(step, rank)]
        in_step = sorted(i for start, stop in parts for i in range(start, stop))
        first = step * plan.rows_per_step
        assert in_step == list(range(first, first + plan.rows_of_step(step)))
        seen += in_step
    assert seen == list(range(rows))


def test_order_changes_by_epoch_and_seed_only() -> None:
    one, two = ReadPlan(rows=100, minibatch=10, epochs=2), ReadPlan(rows=100, minibatch=7, epochs=9, shares=(1, 1))
    assert sorted(one.permutation(0)) == list(range(100))
    assert np.array_equal(one.permutation(1), two.permutation(1))
    assert not np.array_equal(one.permutation(0), one.permutation(1))
    assert not np.array_equal(one.permutation(0), ReadPlan(rows=100, minibatch=10, epochs=2, seed=1).permutation(0))


@pytest.mark.parametrize("rows", [1, 1000])
def test_permutations_are_four_bytes_a_row_and_numpys_own(rows: int) -> None:
    found = ReadPlan(rows=rows, minibatch=1, epochs=1, seed=3).permutation(2)
    assert found.dtype == np.int32
    assert np.array_equal(found, np.random.default_rng([3, 2]).permutation(rows))
