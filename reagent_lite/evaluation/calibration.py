"""Calibration of estimated propensities: how often choices were taken, compared with their probabilities.

Choices are counted by action and estimated probability, and by action and quantile of each feature and of the predicted
reward: a logger that is curved in a feature, and was fitted by a straight line, deviates between some of its quantiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.interval import number, percent

_EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
_BINS = len(_EDGES) - 1
QUANTILES = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
"""Levels between which rows are counted: between the steps that a logging policy may have (curvature.py)."""
_SLICES = len(QUANTILES) + 1
_FEWEST = 5.0  # least variance of a group's count: with less, the count is far from normal
_LEVEL = 0.99  # confidence of all groups by probability together, and of all by quantile
_TOLERANCE = 0.1
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationGroup:
    """Choices of about the same estimated probability, or of rows that are alike.

    Attributes:
        action: name of the action; "" for candidates.
        rows: what the choices have in common, in words.
        expected: sum of the estimated probabilities.
        observed: how often the choice was taken.
        z: (observed - expected) / standard deviation.
    """

    action: str
    rows: str
    expected: float
    observed: float
    z: float

    def __str__(self) -> str:
        choice = f"action {self.action!r}" if self.action else "candidates"
        return (
            f"{choice} {self.rows}: {number(self.observed)} logged, {number(self.expected)} expected, z = {self.z:.1f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Estimated probabilities compared with logged choices, on rows that they were not fitted to.

    Attributes:
        rows: number of rows.
        groups: choices by action and estimated probability, except the rarest.
        calibrated: whether no group deviates both significantly and by more than a tenth; false without groups.
        resolution: smallest relative deviation of a group that is significant, averaged over logged choices.
    """

    rows: int
    groups: tuple[CalibrationGroup, ...] = field(repr=False)
    calibrated: bool
    resolution: float

    @property
    def largest(self) -> tuple[CalibrationGroup, ...]:
        """The groups that deviate most, at most 20."""
        return tuple(sorted(self.groups, key=lambda group: -abs(group.z))[:_SHOWN])

    def __str__(self) -> str:
        if not self.groups:
            return "propensities are estimated, and too few rows have a choice to check their calibration"
        (worst, *_) = self.largest
        if not self.calibrated:
            return f"propensities are estimated and not calibrated ({worst})"
        return (
            f"propensities are estimated; calibrated in {pluralize(len(self.groups), 'group')} of choices (largest z = "
            f"{worst.z:.1f}), which would show deviations of {percent(self.resolution)}"
        )


class Tally:
    """Counts by action and estimated probability, and by action and quantile of some columns.

    Args:
        names: names of the actions; empty for candidates, which are counted together.
        columns: names of the columns.
    """

    def __init__(self, names: tuple[str, ...], columns: tuple[str, ...] = ()) -> None:
        self._names = names or ("",)
        self._rows = torch.zeros(1, dtype=torch.float64)
        self._groups = [f"of estimated probability {low:g} to {high:g}" for low, high in pairwise(_EDGES)]
        levels = [0.0, *(100 * QUANTILES).tolist(), 100.0]
        words = [f"between the {low:g} % and the {high:g} % quantile" for low, high in pairwise(levels)]
        self._groups += [f"{part} of {column}" for column in columns for part in words]
        self._sums = torch.zeros(len(self._groups), len(self._names), 3, dtype=torch.float64)

    def add(self, probability: Tensor, mask: Tensor, action: Tensor, between: Tensor, weight: Tensor) -> None:
        """Adds rows.

        Args:
            probability: [n, K] estimated probabilities.
            mask: [n, K] choices.
            action: [n] logged choice.
            between: [n, 1 or K, C] between which quantiles the columns of a row or choice are, from 0.
            weight: [n] relative sample weights.
        """
        logged = torch.zeros_like(probability).scatter_(1, action.unsqueeze(1), 1.0)
        free = mask & (mask.sum(1, keepdim=True) > 1)
        counts = free * weight.unsqueeze(1)
        variance = probability * (1 - probability) * counts
        values = torch.stack((probability, logged, variance), 2) * counts.unsqueeze(2)
        bin_index = torch.bucketize(probability, probability.new_tensor(_EDGES[1:-1]))
        self._add(self._sums[:_BINS], bin_index, values)
        for index, column in enumerate(between.unbind(2)):
            first = _BINS + index * _SLICES
            self._add(self._sums[first : first + _SLICES], column.expand_as(mask), values)
        self._rows += len(action)

    def _add(self, sums: Tensor, group: Tensor, values: Tensor) -> None:
        if len(self._names) > 1:
            group = group * len(self._names) + torch.arange(group.shape[1])
        sums.view(-1, 3).index_add_(0, group.flatten(), values.flatten(0, 1))

    def calibration(self, ranks: Group) -> Calibration:
        """Returns the calibration on the rows of all ranks; every rank calls it."""
        rows = float(ranks.all_reduce(self._rows))
        sums = ranks.all_reduce(self._sums).transpose(0, 1).tolist()
        by_probability, by_quantile = (
            tuple(
                CalibrationGroup(
                    action=name,
                    rows=words,
                    expected=expected,
                    observed=observed,
                    z=(observed - expected) / variance**0.5,
                )
                for name, of_action in zip(self._names, sums, strict=True)
                for words, (expected, observed, variance) in list(zip(self._groups, of_action, strict=True))[part]
                if variance >= _FEWEST
            )
            for part in (slice(_BINS), slice(_BINS, None))
        )
        variances = [variance for of_action in sums for _, _, variance in of_action[:_BINS] if variance >= _FEWEST]
        expected = sum(group.expected for group in by_probability)
        deviation = _critical(by_probability) * sum(variance**0.5 for variance in variances)
        return Calibration(
            rows=round(rows),
            groups=by_probability + by_quantile,
            calibrated=bool(by_probability) and not _deviates(by_probability) and not _deviates(by_quantile),
            resolution=deviation / expected if by_probability else float("inf"),
        )


def _critical(groups: Sequence[CalibrationGroup]) -> float:
    """Returns the largest |z| that chance explains among these groups."""
    return NormalDist().inv_cdf(1 - (1 - _LEVEL) / 2 / max(len(groups), 1))


def _deviates(groups: Sequence[CalibrationGroup]) -> bool:
    critical = _critical(groups)
    return any(abs(group.z) > critical and abs(group.observed / group.expected - 1) > _TOLERANCE for group in groups)
