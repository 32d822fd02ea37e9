"""Effective numbers of episodes by hand; intervals are tested where they are used, in evaluation."""

from dataclasses import replace

import pytest
import torch

from reagent_lite.rl.likelihood import Alternatives, Contributions, intervals


def contributions(total: list[float], size: list[float], **changes: torch.Tensor) -> Contributions:
    values, sizes = torch.tensor([total, size], dtype=torch.float64)
    return Contributions(total=values, size=sizes, weight=torch.ones_like(sizes), outcome=values / sizes, **changes)  # type: ignore[arg-type]


def test_informative_episodes_of_unequal_sizes() -> None:
    """Mean 1.5 / 6, deviations 0.75, -0.5 and -0.25: 0.875^2 / 0.3828125."""
    assert contributions([1.0, 0.0, 0.5], [1, 2, 3]).informative == pytest.approx(2.0, abs=1e-12)


def test_a_prediction_is_no_information() -> None:
    """Rewards 1, 0, 0, 0, half of which a model predicts: as if the one event were all, 0.75^2 / (0.75^4 + 3 / 256)."""
    episodes = contributions([1.0, -2.0, 1.0, -1.0], [1, 1, 1, 1], earned=torch.tensor([1.0, 0, 0, 0]).double())
    assert episodes.informative == pytest.approx(0.75**2 / (0.75**4 + 3 * 0.25**4), abs=1e-12)


def test_alternatives_by_hand() -> None:
    """The policy needs 0.5, 1, 0 and 1 of them; the log has them with probability 0.1, 0, 0 and 0.25."""
    alternatives = Alternatives.of(*torch.tensor([[0.5, 0, 1, 0], [0.9, 1, 1, 0.75]], dtype=torch.float64))
    assert alternatives.weight.tolist() == pytest.approx([4, 4, 0, 4])  # at most as many as there are rows
    assert sorted(alternatives.hardly_tried.tolist()) == [0, 1, 3]
    assert [alternatives.largest(share) is None for share in (0.0, 0.6, 0.625)] == [False, False, True]


def test_what_was_never_tried_may_be_better() -> None:
    """Of 1,000 rows 10 have weight 0, whose other action is logged with probability 0.002 and was never tried.

    8 of the 10 earn 0, like 800 of all rows: with all of the weight there, the policy gains at most 0.008.
    """
    weight = torch.ones(1000, dtype=torch.float64)
    weight[:10] = 0.0
    outcome = (torch.arange(1000) % 10 < 2).double()
    ones = torch.ones_like(weight)
    evaluated = Contributions(total=weight * outcome, size=ones, weight=weight, outcome=outcome)
    logged = Contributions(total=outcome, size=ones, weight=ones, outcome=outcome)
    alternatives = Alternatives.of(weight, torch.where(weight > 0, 1.0, 0.998))
    low, high = intervals([(replace(evaluated, alternatives=alternatives), logged)], 0.95)[0]
    before = intervals([(evaluated, logged)], 0.95)[0]
    assert before[1] <= 0
    assert low < -0.002
    assert 0.008 < high < 0.03


def test_a_constant_added_to_all_rewards_moves_the_value_alone() -> None:
    """Weights whose mean is not 1, episodes of one to three rows."""
    generator = torch.Generator().manual_seed(3)
    weight, outcome = torch.rand(2, 60, generator=generator, dtype=torch.float64)
    weight = 4 * weight.square()
    size = 1.0 + torch.arange(60).double() % 3

    def measured(constant: float) -> tuple[list[tuple[float, float]], float]:
        earned = outcome + constant
        ones = torch.ones_like(weight)
        evaluated = Contributions(total=size * weight * earned, size=size, weight=weight, outcome=earned)
        logged = Contributions(total=size * earned, size=size, weight=ones, outcome=earned)
        return intervals([(evaluated, None), (evaluated, logged)], 0.95), evaluated.informative

    (value, difference), informative = measured(0.0)
    (moved, same), as_informative = measured(100.0)
    assert moved == pytest.approx([end + 100 for end in value], abs=1e-7)
    assert same == pytest.approx(difference, abs=1e-7)
    assert as_informative == pytest.approx(informative, rel=1e-9)


def test_rounding_is_not_a_difference() -> None:
    """All weights are 1 or 0, and rows with weight 0 earn 0: what remains of the difference is rounding."""
    weight = torch.ones(300, dtype=torch.float64)
    weight[:3] = 0.0
    outcome = torch.where(weight > 0, 0.1 + 0.2 * (torch.arange(300) % 3), 0.0)
    ones = torch.ones_like(weight)
    evaluated = Contributions(total=weight * outcome + 1e-17, size=ones, weight=weight, outcome=outcome)
    logged = Contributions(total=outcome, size=ones, weight=ones, outcome=outcome)
    low, high = intervals([(evaluated, logged)], 0.95)[0]
    assert not low > 0
    assert not high < 0


def test_rewards_that_hardly_differ_beside_their_mean() -> None:
    """A constant in all rewards moves the interval by it, as the mean weight is 1; here by a million deviations."""
    generator = torch.Generator().manual_seed(0)
    weight = 2 * torch.rand(500, generator=generator, dtype=torch.float64)
    reward = 1e-3 * torch.randn(500, generator=generator, dtype=torch.float64)
    ones = torch.ones_like(weight)
    ends = []
    for constant in (0.0, 1_000.0):
        outcome = reward + constant
        evaluated = Contributions(total=weight * outcome, size=ones, weight=weight, outcome=outcome)
        ends.append([end - constant for end in intervals([(evaluated, None)], 0.95)[0]])
    (low, high), moved = ends
    # the number of informative episodes counts deviations from the unweighted estimate, which differ
    assert moved == pytest.approx([low, high], abs=0.02 * (high - low))
    assert 1e-4 < high - low < 4e-4
