"""Prioritised draws: frequencies, importance weights and the bookkeeping of priorities against plain arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sim.replay.rings import plain_step, ring_of

from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.sim.replay.sampling import Priorities, importance_weights


def filled_ring(slots: int, envs: int, writes: int, **given: Any) -> ReplayRing:
    ring = ring_of(num_envs=envs, slots=slots, prioritized=True, alpha=0.5, **given)
    for _ in range(writes):
        ring.write(plain_step(envs))
    return ring


def filled(value: Any) -> Priorities:
    priorities = Priorities(len(value), torch.device("cpu"))
    priorities.value.copy_(torch.as_tensor(value))
    priorities.refresh()
    return priorities


def saved_priority(ring: ReplayRing) -> list[float]:
    return ring.state_dict()["priority"].flatten().tolist()  # type: ignore[no-any-return]


def test_importance_weights_by_hand() -> None:
    # p 1, 4, 0, 2: 1/P is 7 (1, 1/4, -, 1/2); over the largest: 1, 1/4, -, 1/2; 3 rows count
    rarity = filled([1.0, 4, 0, 2]).rarity(torch.arange(4), 2)
    assert rarity.tolist() == [7 / 2, 7 / 8, 0, 7 / 4]  # two draws find the first row 2/7 times
    for beta, factors in ((1.0, [1, 1 / 4, 0, 1 / 2]), (0.5, [1, 0.5, 0, 0.5**0.5]), (0.0, [1, 1, 0, 1]),
                          (torch.tensor([1.0]), [1, 1 / 4, 0, 1 / 2])):  # fmt: skip
        torch.testing.assert_close(importance_weights(rarity, rarity.amax(), beta), torch.tensor(factors) / 3)
    assert importance_weights(torch.zeros(3), torch.tensor(0.0), 0.5).tolist() == [0, 0, 0]


def test_rows_are_drawn_in_proportion_to_their_priorities() -> None:
    ring = filled_ring(25, 4, 25)
    errors = torch.linspace(0, 4, 100) ** 2
    ring.update_priorities(torch.arange(100), errors)
    counts = torch.bincount(torch.cat([ring.sample(100).index for _ in range(500)]), minlength=100).numpy()
    p = (errors.numpy().astype(np.float64) + 1e-6) ** 0.5
    expected = 50_000 * p / p.sum()
    often = expected >= 5
    assert chisquare(counts[often], expected[often] / expected[often].sum() * counts[often].sum()).pvalue > 1e-3
    assert counts[~often].sum() < 5 * (~often).sum()


def test_rows_weigh_on_two_ranks_as_in_one_process() -> None:
    # p 2, 4, 1, 1 and 2, 2, 2, 2: each draws in proportion to p as one process with all rows would; the first draws one
    # row of each quarter of the sum 8, so one of p 1, the rarest of both
    p = torch.tensor([[2.0, 4, 1, 1], [2.0, 2, 2, 2]])
    ranks = [filled(of_rank) for of_rank in p]
    rows = torch.stack([rank.draw(torch.linspace(0.1, 0.9, 4).double()) for rank in ranks])
    rarity = torch.stack([rank.rarity(row, 4) for rank, row in zip(ranks, rows, strict=True)])
    weights = torch.stack([importance_weights(of_rank, rarity.amax(), 0.5) for of_rank in rarity])
    torch.testing.assert_close(weights, p.gather(1, rows) ** -0.5 / 4)


@pytest.mark.parametrize(
    ("slots", "envs", "written", "steps"),
    [
        # new rows get the largest priority so far once they are complete; p = (error + 1e-6)^0.5
        (6, 2, 3, [
            ([0], [1.0], 0, [1, 1, 1, 1, 0, 0]),  # slots 0 and 1 are complete, 2 waits
            ([1], [9.0], 1, [1, 3, 1, 1, 3, 3, 0, 0]),
            # the largest stays; 7 writes into 6 slots: slot 0 was overwritten and waits; slots 2 to 5 came in with 3
            ([1, 0], [0.0, 4.0], 3, [0, 0, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3]),
        ]),
        # rows overwritten since they were drawn are not updated
        (4, 1, 4, [
            ([3, 1], [100.0, 4.0], 0, [1, 2, 1, 0]),  # slot 3 waits
            ([1], [4.0], 1, [0, 2, 1, 2]),  # slot 0 waits, slot 3 gets the largest, which is not 10
        ]),
    ],
)  # fmt: skip
def test_priorities_by_hand(slots: int, envs: int, written: int, steps: list[tuple[Any, Any, int, Any]]) -> None:
    ring = filled_ring(slots, envs, written, n_step=2)
    for index, errors, writes, expected in steps:
        ring.update_priorities(torch.tensor(index), torch.tensor(errors))
        for _ in range(writes):
            ring.write(plain_step(envs))
        assert saved_priority(ring) == pytest.approx(expected)


@pytest.mark.parametrize(("slots", "envs"), [(3, 1), (3, 32), (4, 100)])
def test_sums_of_blocks_follow_every_change(slots: int, envs: int) -> None:
    """Rows never drawn too rarely or too often, however slots and blocks overlap."""
    ring = filled_ring(slots, envs, 0, n_step=2)
    rng = np.random.default_rng(slots * envs)
    for _ in range(2 * slots + 3):
        ring.write(plain_step(envs))
        index = np.unique(rng.integers(0, slots * envs, 17))
        ring.update_priorities(torch.from_numpy(index), torch.from_numpy(rng.exponential(1.0, len(index))).float())
        blocks = ring._priorities._blocks.double().sum(1)
        assert ring._priorities._sums.tolist() == blocks.tolist()
        assert sum(saved_priority(ring)) == pytest.approx(float(blocks.sum()))


def test_many_rows_are_looked_up_as_in_extended_precision() -> None:
    """The row of each target is that of a long double cumulative sum over all rows."""
    rng = np.random.default_rng(5)
    value = (rng.pareto(1.5, 200_003) * (rng.random(200_003) < 0.7)).astype(np.float32)
    shares = torch.from_numpy(rng.random(4096))
    drawn = filled(value).draw(shares).numpy()
    exact = np.cumsum(value.astype(np.longdouble))
    assert (
        drawn == np.searchsorted(exact, (np.arange(4096) + shares.numpy()) / 4096 * exact[-1], side="right")
    ).mean() > 0.9999
    assert (value[drawn] > 0).all()


@pytest.mark.parametrize("before", [0, 1, 31, 32])
@pytest.mark.parametrize("after", [0, 50])
def test_shares_on_an_edge_give_a_row_that_may_be_drawn(before: int, after: int) -> None:
    """Priorities 1, 0, 3 between rows of 0: the first covers [0, 1/4), the last the rest, the end included."""
    priorities = filled([0.0] * before + [1, 0, 3] + [0.0] * after)
    assert (
        priorities.rows_at(torch.tensor([0, 0.2499, 0.25, 0.2501, 1 - 2**-53, 1.0], dtype=torch.float64)) - before
    ).tolist() == [0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(3))
def test_shares_where_rounding_makes_blocks_and_rows_disagree(seed: int) -> None:
    """Magnitudes so far apart that sums round: at the edge of any row no row of 0 is found."""
    rng = np.random.default_rng(seed)
    value = (np.exp(6 * rng.normal(size=3200)) * (rng.random(3200) < 0.3)).astype(np.float32)
    value[::32] = value[31::32] = 0  # what a target that rounds out of its block would find
    priorities = filled(value)
    edges = np.cumsum(value.astype(np.float64))
    edges /= edges[-1]
    for near in (edges, np.nextafter(edges, 0), np.nextafter(edges, 1)):
        assert (value[priorities.rows_at(torch.from_numpy(near)).numpy()] > 0).all()
