"""Confidence sequences by hand, beside a slow oracle in plain Python, and how often they miss."""

import math
from itertools import pairwise

import numpy as np
import pytest

from reagent_lite.rl.sequences import (
    FRACTIONS,
    AsymptoticSequence,
    BettingSequence,
    difference_grid,
    grow,
    ratio_capitals,
)


def slow_bounds(
    values: list[float], lowest: list[float], highest: list[float], differences: list[float], level: float
) -> tuple[float, float]:
    """Returns the interval by loops over differences, fractions and values."""

    def is_refuted(d: float, side: int) -> bool:
        capitals = [1.0] * len(FRACTIONS)
        for value, low, high in zip(values, lowest, highest, strict=True):
            gain = (value - d) / (d - low) if side == 0 else (d - value) / (high - d)
            capitals = [c * (1 + f * gain) for c, f in zip(capitals, FRACTIONS, strict=True)]
            if math.fsum(capitals) / len(capitals) >= 2 / level:
                return True
        return False

    lower, upper = -math.inf, math.inf
    for d in differences:
        if not is_refuted(d, 0):
            break
        lower = d
    for d in reversed(differences):
        if not is_refuted(d, 1):
            break
        upper = d
    return lower, upper


def test_capitals_by_hand() -> None:
    # values in [-1, 2] against d = 0: above gains Z / 1, below -Z / 2; players bet 1/2, 1/4, ...
    sequence = BettingSequence(0.05, np.array([0.0]))
    sequence.add(np.array([2.0, -1.0]), np.full(2, -1.0), np.full(2, 2.0))
    above, below = sequence.capitals[..., 0]
    assert above[:2].tolist() == [2 * 0.5, 1.5 * 0.75]
    assert below[:2].tolist() == [0.5 * 1.25, 0.75 * 1.125]
    # after the first value the mean of 1 + 2 f over 12 fractions, whose sum is 1 - 2^-12
    assert sequence.highest[0, 0] == pytest.approx(1 + 2 * (1 - 2**-12) / 12, abs=1e-15)
    assert (sequence.lower, sequence.upper) == (-math.inf, math.inf)


def test_a_difference_is_refuted_by_enough_capital() -> None:
    # five values of 1 in [-1, 1]: capital of player j is (1 + f)^5, their mean 2.27: the level 0.9 asks for 2 / 0.9
    sequence = BettingSequence(0.9, np.array([-0.5, 0.0, 0.5]))
    sequence.add(np.ones(5), -np.ones(5), np.ones(5))
    assert float(sequence.lower) == -0.5
    assert np.mean((1 + FRACTIONS) ** 5) < 2 / 0.9 < np.mean((1 + 3 * FRACTIONS) ** 5)
    assert float(sequence.upper) == math.inf


@pytest.mark.parametrize("seed", range(4))
def test_bounds_equal_those_of_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lowest, highest = -1 - rng.random(60), 1 + 3 * rng.random(60)
    mean = (-0.9, -0.3, 0.3, 0.9)[seed]
    values = np.clip(mean + 0.3 * rng.standard_normal(60), lowest, highest)
    differences = difference_grid(1.0, [0.0123])
    sequence = BettingSequence(0.1, differences)
    sequence.add(values, lowest, highest)
    expected = slow_bounds(values.tolist(), lowest.tolist(), highest.tolist(), differences.tolist(), 0.1)
    assert (float(sequence.lower), float(sequence.upper)) == expected
    assert expected[0] > -math.inf if mean > 0 else expected[1] < math.inf


def test_portions_give_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(-1, 2, (500, 3))
    lowest, highest = np.full((500, 3), -1.0), np.full((500, 3), 2.0)
    whole, parts = (BettingSequence(0.05, difference_grid(1.0), (3,)) for _ in range(2))
    asymptotic, asymptotic_parts = AsymptoticSequence(0.05, batch=(3,)), AsymptoticSequence(0.05, batch=(3,))
    whole.add(values, lowest, highest)
    asymptotic.add(values)
    for start, end in pairwise([0, 1, 2, 10, 10, 77, 499, 500]):
        parts.add(values[start:end], lowest[start:end], highest[start:end])
        asymptotic_parts.add(values[start:end])
    assert np.array_equal(whole.capitals, parts.capitals)
    assert np.array_equal(whole.highest, parts.highest)
    assert np.array_equal(asymptotic.sums, asymptotic_parts.sums)
    assert np.array_equal(asymptotic.lower, asymptotic_parts.lower)


def test_sequences_side_by_side_are_those_of_each() -> None:
    rng = np.random.default_rng(2)
    values = rng.uniform(-1, 1, (40, 2))
    both = BettingSequence(0.2, difference_grid(1.0), (2,))
    both.add(values, np.full((40, 2), -1.5), np.full((40, 2), 1.5))
    for column in range(2):
        alone = BettingSequence(0.2, difference_grid(1.0))
        alone.add(values[:, column], np.full(40, -1.5), np.full(40, 1.5))
        assert np.array_equal(both.capitals[:, :, column], alone.capitals)
        assert both.lower[column] == alone.lower


def test_a_grid_has_zero_and_limits_and_stay_inside() -> None:
    differences = difference_grid(50.0, [0.002, -0.002, 70.0])
    assert np.isin([0.0, 0.002, -0.002], differences).all()
    assert differences.min() > -50
    assert differences.max() < 50
    assert (np.diff(differences) > 0).all()


def test_capital_that_overflows_stays_refuted() -> None:
    with np.errstate(all="raise"):
        capitals = grow(np.ones(len(FRACTIONS)), np.concatenate([np.ones(5000), -np.ones(10)]))
    assert capitals[-1, 0] == math.inf
    assert not np.isnan(capitals).any()


def test_the_asymptotic_interval_by_hand() -> None:
    # 100 values of 1 and 100 of -1 have mean 0, variance 1; level 0.05, tightest at 200
    sequence = AsymptoticSequence(0.05, tightest_at=200)
    sequence.add(np.tile([1.0, -1.0], 100))
    rho2 = (2 * math.log(20) + math.log(1 + 2 * math.log(20))) / 200

    def half(n: int) -> float:
        variance = 1 - (n % 2 / n) ** 2
        return math.sqrt(2 * variance * (n * rho2 + 1) / (n**2 * rho2) * math.log(math.sqrt(n * rho2 + 1) / 0.05))

    assert float(sequence.upper) == pytest.approx(half(200), rel=1e-12)
    assert half(200) == pytest.approx(0.2146, abs=1e-4)
    assert float(sequence.lower) == pytest.approx(1 / 199 - half(199), rel=1e-12)  # the intersection of all so far


def test_few_informative_values_make_no_statement() -> None:
    sequence = AsymptoticSequence(0.05)
    sequence.add(np.repeat([1.0, 0.0], [50, 10_000]))  # effective number 50
    assert (sequence.lower, sequence.upper) == (-math.inf, math.inf)
    sequence.add(np.zeros(0))
    assert sequence.count == 10_050


def test_the_mean_is_missed_rarely_at_any_of_many_looks() -> None:
    """Skewed values, as weights at a share of a tenth have them; 400 runs, 2000 looks each."""
    rng = np.random.default_rng(3)
    values = np.where(rng.random((2000, 400)) < 0.1, 9.0, -1.0)  # mean 0 in [-1, 9]
    betting = BettingSequence(0.1, np.array([-1e-9, 0.0, 1e-9]), (400,))
    betting.add(values, np.full_like(values, -1.1), np.full_like(values, 10.0))
    asymptotic = AsymptoticSequence(0.1, tightest_at=1000, batch=(400,))
    asymptotic.add(values)
    for sequence in (betting, asymptotic):
        missed = (sequence.lower >= 0) | (sequence.upper <= 0)
        assert missed.mean() <= 0.1 + 3 * math.sqrt(0.09 / 400)


def test_a_wrong_sample_ratio_is_seen_and_a_right_one_is_not() -> None:
    rng = np.random.default_rng(4)
    share = np.repeat([0.02, 0.1, 0.5], 3000)
    start = np.ones((2, len(FRACTIONS)))
    right = ratio_capitals(start, rng.random(9000) < share, share).mean(-1)
    wrong = ratio_capitals(start, rng.random(9000) < 0.8 * share, share).mean(-1)
    assert right.max() < 1000 < wrong.max()
    # one unit, given to the new policy with probability 1/4: more than drawn earns 3 f, fewer loses f
    first = ratio_capitals(start, np.array([True]), np.array([0.25]))[0]
    assert first[:, 0].tolist() == [2.5, 0.5]
