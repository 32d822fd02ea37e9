"""What a policy chooses where choices are candidates without names: by their features, beside what the log chose.

pages and raw features ─► CandidateTally.add ─► summed over ranks ─► document
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.maps import in_order
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.page import EvaluationPage

_BINS = 10  # of propensities
_EXACT = 16  # candidates, up to which every number is counted by itself
_CHUNK_VALUES = 1 << 20  # 8 MB of float64, a few times
_LENGTHS = (*range(1, _EXACT + 1), *(_EXACT << power for power in range(1, 17)))  # the most of each count


@dataclass(frozen=True, slots=True)
class _Moments:
    """Weighted moments of F features: total weight, mean, and weighted sum of squared deviations, each [F]."""

    weight: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> "_Moments":
        """Takes values [B, K, F], NaN where absent, with weights [B, K]."""
        present = ~values.isnan()
        weights = weight.unsqueeze(2) * present
        filled = values.nan_to_num(0.0)
        total = weights.sum((0, 1))
        mean = (weights * filled).sum((0, 1)) / total.clamp(min=torch.finfo(total.dtype).tiny)
        return cls(total, mean, (weights * (filled - mean).square()).sum((0, 1)))

    def merged(self, other: "_Moments") -> "_Moments":
        """Returns the moments of both. Chan, Golub & LeVeque (1983)."""
        total = self.weight + other.weight
        share = other.weight / total.clamp(min=torch.finfo(total.dtype).tiny)
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart.square() * self.weight * share
        return _Moments(total, self.mean + apart * share, squares)

    def over(self, group: Group) -> "_Moments":
        """Returns the moments over all ranks; every rank calls it."""
        sums = group.sum(torch.stack((self.weight, self.weight * self.mean)))
        mean = sums[1] / sums[0].clamp(min=torch.finfo(sums.dtype).tiny)
        return _Moments(sums[0], mean, group.sum(self.squares + self.weight * (self.mean - mean).square()))

    @property
    def stddev(self) -> Tensor:
        """[F] of the weighted values, NaN where there is none."""
        return (self.squares / self.weight).sqrt()


class CandidateTally:
    """Counts choices among candidates, chunk by chunk, without holding them.

    Args:
        feature_ids: names of the F features.
    """

    def __init__(self, feature_ids: Sequence[int]) -> None:
        self._ids = tuple(feature_ids)
        nothing = torch.zeros(len(self._ids), dtype=torch.float64)
        self._logged = self._policy = _Moments(nothing, nothing, nothing)
        self._sums = torch.zeros(4, dtype=torch.float64)  # rows, same choice, propensity, probability of the policy
        self._bins = torch.zeros(3, _BINS, dtype=torch.float64)
        self._lengths = torch.zeros(len(_LENGTHS), dtype=torch.float64)

    def add(self, page: EvaluationPage, features: Tensor) -> None:
        """Takes rows of a page with the raw features of their candidates, [N, K, F], NaN where absent."""
        if not len(page):
            return
        policy, taken = page.model_propensities, page.of_taken(page.model_propensities)
        values = features.double().masked_fill(~page.mask.unsqueeze(2), torch.nan)
        chosen = torch.zeros_like(policy).scatter_(1, page.action.unsqueeze(1), 1.0)
        self._logged = self._logged.merged(_Moments.of(values, chosen))
        self._policy = self._policy.merged(_Moments.of(values, policy))
        same = (policy.argmax(1) == page.action).double()
        ones = torch.ones_like(taken)
        self._sums += torch.stack((ones, same, page.propensity, taken)).sum(1)
        place = ((page.propensity * _BINS - 1e-6).ceil().long() - 1).clamp(0, _BINS - 1)  # float32 has no 0.1
        self._bins.index_add_(1, place, torch.stack((ones, page.propensity, taken)))
        lengths = torch.bucketize(page.mask.sum(1).clamp(max=_LENGTHS[-1]), torch.tensor(_LENGTHS))
        self._lengths.index_add_(0, lengths, ones)

    def document(self, group: Group, *, propensities_known: bool) -> dict[str, Any]:
        """Returns what was counted by all ranks, as JSON types; every rank calls it, and what is undefined is null.

        Args:
            group: the ranks.
            propensities_known: whether the log has propensities, the same on every rank.
        """
        logged, policy = self._logged.over(group), self._policy.over(group)
        sums, bins, lengths = (group.sum(one.clone()) for one in (self._sums, self._bins, self._lengths))
        rows, same, propensity, probability = sums.tolist()
        return {
            "rows": int(rows),
            "same": _ratio(same, rows),
            "propensity": _ratio(propensity, rows) if propensities_known else None,
            "probability": _ratio(probability, rows),
            "by_propensity": _by_propensity(bins, rows) if propensities_known else [],
            "candidates": {_length(k): count / rows for k, count in enumerate(lengths.tolist()) if count},
            "features": {
                str(name): {"logged": one, "policy": other, "difference": _difference(one, other)}
                for name, one, other in zip(self._ids, _figures(logged), _figures(policy), strict=True)
            },
        }


def candidate_choices(
    page: EvaluationPage, copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], group: Group
) -> dict[str, Any]:
    """Returns CandidateTally's document over the rows of all ranks; every rank calls it.

    Args:
        page: this rank's scored rows.
        copy: where they are from.
        numbers: [N] row numbers in the copy, in the page's order.
        ids: features of candidates, the same on every rank.
        group: the ranks.
    """
    tally = CandidateTally(ids)
    for rows in _chunks(page, len(ids)):
        features = _features(copy, numbers[rows], ids, page.mask.shape[1])
        tally.add(page.rows(torch.arange(rows.start, rows.stop)), torch.from_numpy(features))
    absent = int(group.sum(torch.tensor([copy.counts.get("propensity_absent_rows", 0)])))
    copy.release()
    return tally.document(group, propensities_known=not absent)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _length(place: int) -> str:
    most = _LENGTHS[place]
    return str(most) if place < _EXACT else f"{_LENGTHS[place - 1] + 1} to {most}"


def _by_propensity(bins: Tensor, rows: float) -> list[dict[str, float]]:
    return [
        {"low": place / _BINS, "high": (place + 1) / _BINS, "rows": count / rows, "propensity": propensity / count,
         "policy": probability / count}
        for place, (count, propensity, probability) in enumerate(bins.t().tolist()) if count
    ]  # fmt: skip


def _figures(moments: _Moments) -> list[dict[str, float | None]]:
    seen = zip(moments.weight.tolist(), moments.mean.tolist(), moments.stddev.tolist(), strict=True)
    return [
        {"mean": mean, "stddev": stddev} if weight else {"mean": None, "stddev": None} for weight, mean, stddev in seen
    ]


def _difference(one: dict[str, float | None], other: dict[str, float | None]) -> float | None:
    """Returns the standardized difference of means, (other - one) / sqrt of the mean variance. Austin (2009)."""
    mean, stddev, other_mean, other_stddev = one["mean"], one["stddev"], other["mean"], other["stddev"]
    if mean is None or other_mean is None or stddev is None or other_stddev is None:
        return None
    scale = math.sqrt((stddev**2 + other_stddev**2) / 2)
    return (other_mean - mean) / scale if scale > 0 else None


def _chunks(page: EvaluationPage, num_features: int) -> Iterator[slice]:
    size = max(_CHUNK_VALUES // max(page.mask.shape[1] * num_features, 1), 1)
    for start in range(0, len(page), size):
        yield slice(start, min(start + size, len(page)))


def _features(
    copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], num_choices: int
) -> NDArray[np.float32]:
    """Returns raw features of the rows' candidates, [n, K, F]; NaN where absent and behind a list's end."""
    lists = np.asarray(copy.actions_list[numbers])
    starts, stops = copy.list_offsets[lists], copy.list_offsets[lists + 1]
    places = starts[:, None] + np.arange(num_choices)
    within = places < stops[:, None]
    features = np.full((len(numbers), num_choices, len(ids)), np.nan, np.float32)
    features[within] = in_order(np.asarray(copy.candidates[places[within]]), copy.action_ids, ids, absent=np.nan)
    return features
