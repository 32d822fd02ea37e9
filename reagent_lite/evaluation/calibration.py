"""Calibration of estimated propensities: how often choices of about the same probability were taken."""

from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import number, percent

_EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
_BINS = len(_EDGES) - 1
_FEWEST = 5.0  # least variance of a group's count: with less, the count is far from normal
_LEVEL = 0.99  # confidence of all groups together
_TOLERANCE = 0.1
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationGroup:
    """Choices of about the same estimated probability.

    Attributes:
        action: name of the action; "" for candidates.
        low, high: range of the estimated probability.
        expected: sum of the estimated probabilities.
        observed: how often the choice was taken.
        z: (observed - expected) / standard deviation.
    """

    action: str
    low: float
    high: float
    expected: float
    observed: float
    z: float

    def __str__(self) -> str:
        choice = f"action {self.action!r}" if self.action else "candidates"
        return (
            f"{choice} of estimated probability {self.low:g} to {self.high:g}: {number(self.observed)} logged, "
            f"{number(self.expected)} expected, z = {self.z:.1f}"
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
            f"propensities are estimated; calibrated in {counted(len(self.groups), 'group')} of choices (largest z = "
            f"{worst.z:.1f}), which would show deviations of {percent(self.resolution)}"
        )


class Tally:
    """Counts by action and estimated probability.

    Args:
        names: names of the actions; empty for candidates, which are counted together.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names or ("",)
        self._rows = torch.zeros(1, dtype=torch.float64)
        self._sums = torch.zeros(len(self._names) * _BINS, 3, dtype=torch.float64)

    def add(self, probability: Tensor, mask: Tensor, action: Tensor) -> None:
        """Adds rows with their estimated probabilities [n, K], choices [n, K] and logged choice [n]."""
        logged = torch.zeros_like(probability).scatter_(1, action.unsqueeze(1), 1.0)
        free = mask & (mask.sum(1, keepdim=True) > 1)
        bin_index = torch.bucketize(probability, probability.new_tensor(_EDGES[1:-1]))
        if len(self._names) > 1:
            bin_index = bin_index + torch.arange(probability.shape[1]) * _BINS
        values = torch.stack((probability, logged, probability * (1 - probability)), 2)
        self._sums.index_add_(0, bin_index[free], values[free])
        self._rows += len(action)

    def calibration(self, group: Group) -> Calibration:
        """Returns the calibration on the rows of all ranks; every rank calls it."""
        rows = float(group.all_reduce(self._rows))
        sums = group.all_reduce(self._sums).view(len(self._names), _BINS, 3).tolist()
        groups = tuple(
            CalibrationGroup(
                action=name,
                low=_EDGES[bin_index],
                high=_EDGES[bin_index + 1],
                expected=expected,
                observed=observed,
                z=(observed - expected) / variance**0.5,
            )
            for name, bins in zip(self._names, sums, strict=True)
            for bin_index, (expected, observed, variance) in enumerate(bins)
            if variance >= _FEWEST
        )
        critical = NormalDist().inv_cdf(1 - (1 - _LEVEL) / 2 / max(len(groups), 1))
        variances = [variance for bins in sums for _, _, variance in bins if variance >= _FEWEST]
        expected = sum(part.expected for part in groups)
        wrong = any(abs(part.z) > critical and abs(part.observed / part.expected - 1) > _TOLERANCE for part in groups)
        return Calibration(
            rows=round(rows),
            groups=groups,
            calibrated=bool(groups) and not wrong,
            resolution=critical * sum(variance**0.5 for variance in variances) / expected if groups else float("inf"),
        )
