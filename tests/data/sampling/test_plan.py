"""The read plan as a pure function: nothing twice, nothing lost, the same for every world size and every layout."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.sampling.plan import ReadPlan, apportion

Rows = list[tuple[int, int]]


def read(plan: ReadPlan, step: int, rank: int) -> list[Rows]:
    """Returns the rows a rank reads in each minibatch of a step, as (shard, row), by the permutations."""
    order = plan.permutation(step // plan.steps_per_epoch, plan.reads[rank])
    return [[(plan.reads[rank], int(row)) for row in order[start:stop]] for start, stop in plan.parts(step, rank)]


def test_seven_rows_by_hand() -> None:
    plan = ReadPlan(shards=(7,), minibatch=3, epochs=2)
    assert [plan.rows_of_step(step) for step in range(6)] == [3, 3, 1, 3, 3, 1]
    assert [plan.rows_before(step) for step in range(7)] == [0, 3, 6, 0, 3, 6, 0]
    assert (plan.steps_per_epoch, plan.num_steps, plan.parts(1, 0), plan.parts(5, 0)) == (3, 6, [(3, 6)], [(6, 7)])


def test_ranks_of_one_shard_by_hand() -> None:
    plan = ReadPlan(shards=(16,), minibatch=8, epochs=1, reads=(0, 0, 0))
    assert [plan.parts(1, rank) for rank in range(3)] == [[(8, 10)], [(10, 13)], [(13, 16)]]
    alone = ReadPlan(shards=(1,), minibatch=8, epochs=1, reads=(0, 0))  # one of two has nothing
    assert sorted(alone.parts(0, 0) + alone.parts(0, 1)) == [(0, 0), (0, 1)]


# rows of 4 come at 1/8, 3/8, 5/8, 7/8 of the way, rows of 2 at 1/4 and 3/4: a b a a b a


@pytest.mark.parametrize(
    ("shards", "count", "expected"),
    [
        *(
            ((4, 2), count, expected)
            for count, expected in enumerate([[0, 0], [1, 0], [1, 1], [2, 1], [3, 1], [3, 2], [4, 2]])
        ),
        ((1, 1, 1), 2, [1, 1, 0]),  # equally far on the way: by number
        ((5,), 3, [3]),
        ((0, 0), 0, [0, 0]),
        ((10**12, 3 * 10**12), 4 * 10**11, [10**11, 3 * 10**11]),
    ],
)
def test_apportioned_by_hand(shards: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert apportion(shards, count) == expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_apportioned_is_the_order_of_rows_on_the_way(shards: list[int]) -> None:
    ways = sorted(((2 * j + 1) / (2 * rows), shard) for shard, rows in enumerate(shards) for j in range(rows))
    for count in range(len(ways) + 1):
        by_shard = Counter(shard for _, shard in ways[:count])
        assert apportion(tuple(shards), count) == [by_shard[shard] for shard in range(len(shards))]


CLUSTERS = (
    st.lists(st.integers(0, 25), min_size=1, max_size=4)
    .filter(any)
    .flatmap(
        lambda shards: st.builds(
            ReadPlan,
            shards=st.just(tuple(shards)),
            minibatch=st.integers(1, 20),
            epochs=st.just(2),
            seed=st.integers(0, 5),
            reads=st.tuples(*(st.integers(1, 3) for _ in shards)).map(
                lambda processes: tuple(shard for shard, count in enumerate(processes) for _ in range(count))
            ),
            minibatches_per_step=st.integers(1, 4),
        )
    )
)
"""Plans of clusters: shards of any sizes, each on a node of one to three processes."""


@given(CLUSTERS)
def test_every_row_comes_once_an_epoch_however_many_ranks_there_are(plan: ReadPlan) -> None:
    """One process a shard reads what several do, and of each shard its share of the rows so far."""
    alone = replace(plan, reads=tuple(range(len(plan.shards))))
    assert plan.num_steps == alone.num_steps == 2 * plan.steps_per_epoch
    seen: Rows = []
    for step in range(plan.num_steps):
        minibatches, whole = (
            [
                sorted(itertools.chain(*ranks))
                for ranks in zip(*(read(some, step, rank) for rank in range(len(some.reads))), strict=True)
            ]
            for some in (plan, alone)
        )
        assert minibatches == whole
        rows = [row for minibatch in minibatches for row in minibatch]
        before = plan.rows_before(step)
        assert len(rows) == plan.rows_of_step(step) == alone.rows_of_step(step) > 0
        assert len(seen) - (step >= plan.steps_per_epoch) * sum(plan.shards) == before
        assert [alone.parts(step, shard)[-1][1] for shard in alone.reads] == apportion(plan.shards, before + len(rows))
        seen += rows
    assert sorted(seen) == sorted(2 * [(shard, row) for shard, rows in enumerate(plan.shards) for row in range(rows)])


def test_order_changes_by_epoch_seed_and_shard_only() -> None:
    plan = ReadPlan(shards=(100, 100), minibatch=10, epochs=2)
    other = ReadPlan(shards=(5, 0, 100), minibatch=7, epochs=9, reads=(0, 1, 2))
    orders = [plan.permutation(0), plan.permutation(1), plan.permutation(0, 1), replace(plan, seed=1).permutation(0)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert np.array_equal(plan.permutation(1, 1), other.permutation(1, 2))  # by the shard's place among those with rows


@pytest.mark.parametrize("rows", [1, 1000])
def test_permutations_are_four_bytes_a_row_and_numpys_own(rows: int) -> None:
    """The order of a run on one machine has been default_rng([seed, epoch]) from the start, and stays it."""
    order = ReadPlan(shards=(rows,), minibatch=1, epochs=1, seed=3).permutation(2)
    assert (order.dtype, order.tolist()) == (np.int32, np.random.default_rng([3, 2]).permutation(rows).tolist())


def test_a_plan_is_told_from_another_by_its_json() -> None:
    plan = ReadPlan(shards=(3, 1), minibatch=4, epochs=2, reads=(0, 1))
    tree = {
        "shards": [3, 1], "minibatch": 4, "epochs": 2, "seed": 0, "reads": [0, 1], "minibatches_per_step": 1,
    }  # fmt: skip
    assert plan.as_json() == json.loads(json.dumps(plan.as_json())) == tree != replace(plan, reads=(0, 0)).as_json()
