"""Confidence sequences: intervals that hold at every moment at once, however often they are looked at; numpy only.

Betting, for values Z_1, Z_2, ... in known ranges (Waudby-Smith & Ramdas 2024, Estimating means of bounded random
variables by betting). Against each difference d two players bet, one that the mean of Z lies above d, one that it lies
below:

    above: prod_i (1 + f (Z_i - d) / (d - lowest_i))          below: prod_i (1 + f (d - Z_i) / (highest_i - d))

If d is the mean, neither capital grows in expectation, so that it ever exceeds 1 / a with probability a at most (Ville
1939). A capital is the mean over FRACTIONS f (their diversified Kelly bets): effects of any size between differ by a
factor of two at most from a fraction that would have been chosen for them, and the mean falls as d rises, so that the
differences which are not refuted are an interval.

Without a range: the asymptotic sequence of Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas (2024, Time-uniform central
limit theory and asymptotic confidence sequences), which holds for many values of finite variance.

Both add values one after the other: the same values in other portions give the same bits.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FRACTIONS: Final = 0.5 ** np.arange(1.0, 13.0)
"""Shares of the largest possible bet; an effect so small that it needs a smaller one needs over ten million values."""
LEAST_INFORMATIVE: Final = 100.0
"""Effective number of values, (sum z^2)^2 / sum z^4, below which an asymptotic sequence makes no statement."""
_LARGEST_SHARE = 0.999  # of the width of a range: the largest difference that is tested
_SMALLEST_SHARE = 1e-4
_STEPS = 100  # between the smallest and the largest difference on each side, 9.6 % from one to the next
_AT_ONCE = 2**18  # numbers in memory while values are added


def grow(capitals: Floats, gains: Floats) -> Floats:
    """Returns [n, J, ...], the capitals after each of n bets, for capitals [J, ...] and gains [n, ...] >= -1.

    A gain is the earning of the largest possible bet, per unit of it; player j bets the share FRACTIONS[j].
    """
    shares = FRACTIONS.reshape(-1, *(1,) * (gains.ndim - 1))
    factors = 1 + shares * gains[:, None]
    with np.errstate(over="ignore", under="ignore"):  # beyond 1e308 a capital stays infinite
        factors[0] *= capitals
        return np.asarray(np.multiply.accumulate(factors, axis=0))


def difference_grid(width: float, points: Iterable[float] = ()) -> Floats:
    """Returns [D] differences of means of values in a range of this width, in ascending order.

    Args:
        width: largest minus smallest possible value.
        points: differences that decisions need exactly, in addition to 0.
    """
    steps = width * np.geomspace(_SMALLEST_SHARE, _LARGEST_SHARE, _STEPS)
    exact = [point for point in points if abs(point) <= width * _LARGEST_SHARE]
    return np.unique([0.0, *steps, *-steps, *exact])


class BettingSequence:
    """Confidence sequence of the mean of values with known ranges.

    Args:
        level: probability that the interval ever misses the mean; half of it on each side.
        differences: [D] ascending.
        batch: shape of sequences that are computed side by side.

    Attributes:
        differences: [D], see above.
        capitals: [2, J, *batch, D] of players above and below.
        highest: [2, *batch, D] largest mean capital so far.
    """

    def __init__(self, level: float, differences: Floats, batch: tuple[int, ...] = ()) -> None:
        self.differences = differences
        self.capitals = np.ones((2, len(FRACTIONS), *batch, len(differences)))
        self.highest = np.ones((2, *batch, len(differences)))
        self._enough = 2 / level

    def add(self, values: Floats, lowest: Floats, highest: Floats) -> None:
        """Adds values, [n, *batch] in [lowest, highest], which may depend on earlier values only.

        Every tested difference lies between lowest and highest.
        """
        size = max(1, _AT_ONCE // self.capitals[0].size)
        for start in range(0, len(values), size):
            value, low, high = (part[start : start + size, ..., None] for part in (values, lowest, highest))
            gains = (
                (value - self.differences) / (self.differences - low),
                (self.differences - value) / (high - self.differences),
            )
            for side, gain in enumerate(gains):
                capitals = grow(self.capitals[side], gain)
                self.capitals[side] = capitals[-1]
                with np.errstate(over="ignore", under="ignore"):
                    self.highest[side] = np.maximum(self.highest[side], capitals.mean(1).max(0))

    @property
    def lower(self) -> Floats:
        """[*batch] largest difference that the mean exceeds; -inf if none is known."""
        return self._last_refuted(self.highest[0], self.differences)

    @property
    def upper(self) -> Floats:
        """[*batch] smallest difference that the mean is below; inf if none is known."""
        return -self._last_refuted(self.highest[1][..., ::-1], -self.differences[::-1])

    def _last_refuted(self, highest: Floats, differences: Floats) -> Floats:
        """Returns the end of the refuted differences, which come first."""
        count = np.logical_and.accumulate(highest >= self._enough, axis=-1).sum(-1)
        return np.asarray(np.where(count > 0, differences[count - 1], -np.inf))

    def values_until_told(self, mean: float, variance: float) -> float:
        """Returns about how many values tell a mean from 0, at the growth of the best bet on it."""
        return 2 * math.log(self._enough * len(FRACTIONS)) * variance / mean**2


class AsymptoticSequence:
    """Confidence sequence of the mean of values without a known range.

    Args:
        level: probability that the interval ever misses the mean, for many values.
        tightest_at: number of values at which the interval is tightest for its level.
        batch: shape of sequences that are computed side by side.

    Attributes:
        count: number of values.
        sums: [3, *batch] of the values, their squares and their fourth powers.
        lower, upper: [*batch] ends of the interval; infinite without a statement.
    """

    def __init__(self, level: float, tightest_at: float = 10_000.0, batch: tuple[int, ...] = ()) -> None:
        self._level = level
        self._rho2 = (-2 * math.log(level) + math.log(1 - 2 * math.log(level))) / tightest_at
        self.count = 0
        self.sums = np.zeros((3, *batch))
        self.lower = np.full(batch, -np.inf)
        self.upper = np.full(batch, np.inf)

    def add(self, values: Floats) -> None:
        """Adds values, [n, *batch]."""
        if not len(values):
            return
        powers = np.stack([values, values**2, values**4], 1)
        powers[0] += self.sums
        sums = np.add.accumulate(powers, axis=0)
        count = np.arange(self.count + 1.0, self.count + len(values) + 1).reshape(-1, *(1,) * (values.ndim - 1))
        self.count += len(values)
        self.sums = sums[-1]
        mean = sums[:, 0] / count
        variance = np.maximum(sums[:, 1] / count - mean**2, 0)
        grows = count * self._rho2 + 1
        half = np.sqrt(variance * 2 * grows / (count**2 * self._rho2) * np.log(np.sqrt(grows) / self._level))
        is_enough = sums[:, 1] ** 2 >= LEAST_INFORMATIVE * sums[:, 2]
        half = np.where(is_enough & (sums[:, 2] > 0), half, np.inf)
        self.lower = np.maximum(self.lower, (mean - half).max(0))
        self.upper = np.minimum(self.upper, (mean + half).min(0))

    def values_until_told(self, mean: float, variance: float) -> float:
        """Returns about how many values tell a mean from 0."""
        count = 1.0
        for _ in range(60):
            grows = count * self._rho2 + 1
            count = 2 * grows / (count * self._rho2) * math.log(math.sqrt(grows) / self._level) * variance / mean**2
        return count


def ratio_capitals(capitals: Floats, is_new: NDArray[Any], share: Floats) -> Floats:
    """Returns [n, 2, J], the capitals against units being divided as they were drawn, after each of n units.

    An anytime-valid test of the sample ratio by the same bets: of the share's two sides, one bets on more units of
    the new policy than drawn, one on fewer. See Lindon & Malek (2022) for multinomial counts.

    Args:
        capitals: [2, J] so far; ones at first.
        is_new: [n] whether the new policy has the unit.
        share: [n] probability with which it was given it, in (0, 1).
    """
    excess = (is_new - share) / share  # the gain of the largest bet on more, whose loss is at most 1
    shortage = (share - is_new) / (1 - share)
    return np.stack([grow(capitals[0], excess), grow(capitals[1], shortage)], 1)
