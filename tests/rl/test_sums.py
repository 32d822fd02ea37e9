"""Sums over groups of episodes of unequal length: the same as over one padded table, and by hand."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.tables import TWO_EPISODES, random_table, some, table
from torch import Tensor

from reagent_lite.rl import sums
from reagent_lite.rl.bootstrap import Resamples
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED
from reagent_lite.rl.sums import EpisodeSums, EpisodeTable

EVERY = (*ESTIMATORS.values(), *LOGGED)
LENGTHS = [1, 1, 1, 2, 3, 3, 8, 9, 15, 40]
COUNTS = torch.cat(list(Resamples(num_episodes=len(LENGTHS), num_resamples=50, seed=1).blocks()))


def estimates(groups: list[EpisodeTable], blocks: list[Tensor]) -> dict[str, Tensor]:
    return EpisodeSums.of([group] for group in groups).estimates(blocks, EVERY)[0]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("spread", [0.3, 8.0])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("cuts", [(4,), (1, 2, 6, 9)])
def test_groups_of_episodes_change_nothing(cuts: tuple[int, ...], zeros: float, spread: float):
    # spread 8 over 40 steps: weights from e^-100 to e^100 beside each other, and in other groups than the largest
    e = random_table(LENGTHS, seed=len(cuts), spread=spread, zeros=zeros)
    groups = [some(e, slice(a, b)) for a, b in itertools.pairwise((0, *cuts, len(LENGTHS)))]
    assert_same(estimates(groups, [COUNTS]), estimates([e], [COUNTS]), 1e-9)


def test_blocks_of_samples_and_samples_that_are_worked_on_one_by_one_change_nothing(monkeypatch: pytest.MonkeyPatch):
    e = random_table(LENGTHS, seed=0, spread=0.3)
    together = estimates([e], [COUNTS])
    assert_same(estimates([e], list(COUNTS.split(7))), together, 1e-12)
    monkeypatch.setattr(sums, "_NUMBERS_AT_ONCE", 1)
    assert_same(estimates([e], [COUNTS]), together, 1e-12)


def test_two_groups_by_hand():
    log = EpisodeSums.of([[some(TWO_EPISODES, slice(1, 2))], [some(TWO_EPISODES, slice(1))]])
    assert float(log.estimates([torch.ones(1, 2)], EVERY)[0]["mean_reward"][0]) == pytest.approx((1 + 4 + 2) / 3)
    # B first, as the groups are: rho over the largest; and (2 + 3)^2 / (4 + 9), (1 + 3)^2 / (1 + 9)
    assert torch.cat((log.relative_weights(0), log.relative_weights(1))).tolist() == pytest.approx([1, 2 / 3, 1, 1 / 3])
    assert log.effective_episodes().tolist() == pytest.approx([25 / 13, 16 / 10])
    assert log.per_episode("discounted_reward", 0).tolist() == pytest.approx([2, 1 + 0.5 * 4])


def test_outcomes_share_weights_and_nothing_else():
    first = random_table(LENGTHS, seed=3, spread=0.3)
    second = replace(random_table(LENGTHS, seed=4), weight=first.weight)
    groups = [[some(e, which) for e in (first, second)] for which in (slice(5), slice(5, 10))]
    for together, e in zip(EpisodeSums.of(groups).estimates([COUNTS], EVERY), (first, second), strict=True):
        assert_same(together, estimates([e], [COUNTS]), 1e-9)


def test_weights_beyond_float64_keep_their_ratios_across_groups():
    # rho 4^2000 in one group, 2 4^2000 in the other, and a short episode of weight 4 that no longer counts
    def constant(steps: int, first: float) -> EpisodeTable:
        return table([steps], 1.0, weight=[[first] + [4.0] * (steps - 1)], reward=[[first] * steps])

    log = EpisodeSums.of([[constant(1, 4.0)], [constant(2000, 4.0)], [constant(2000, 8.0)]])
    assert log.relative_weights(1999).tolist() == pytest.approx([0, 0.5, 1])
    cwpdis = log.estimates([torch.ones(1, 3)], EVERY)[0]["Weighted_Per_Decision_Importance_Sampling"]
    # step t: (4^{t+1} 4 + 2 4^{t+1} 8) / (4 + 4^{t+1} + 2 4^{t+1}), and at t = 0 the short one's reward of 4 too
    first = (4 * 4.0 + 2 * 4 * 8.0 + 4 * 4.0) / 16
    assert float(cwpdis[0]) == pytest.approx(first + sum(20 / (3 + 4.0**-t) for t in range(1, 2000)))


@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_units_are_drawn_with_all_of_their_episodes(zeros: float) -> None:
    e = random_table(LENGTHS, seed=3, spread=0.3, zeros=zeros)
    groups = [some(e, slice(a, b)) for a, b in itertools.pairwise((0, 3, 6, len(LENGTHS)))]
    unit = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 1, 1])
    counts = torch.cat(list(Resamples(num_episodes=4, num_resamples=50, seed=1).blocks()))
    whole = EpisodeSums.of([group] for group in groups)
    (drawn,) = whole.estimates([counts], EVERY, whole.join(unit, 4))
    assert_same(drawn, estimates(groups, [counts[:, unit]]), 1e-9)
