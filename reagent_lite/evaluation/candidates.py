"""What a policy chooses where choices are candidates without names: by their features, beside what the log chose.

pages and raw features, chunk by chunk ─► tally, summed over ranks ─► document
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.matrices import in_order
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.interval import finite
from reagent_lite.evaluation.page import EvaluationPage

_BINS = 10  # of propensities
_EXACT = 16  # candidates, up to which every number is counted by itself
_CHUNK_VALUES = 1 << 20  # 8 MB of float64, a few times
_LENGTHS = (*range(1, _EXACT + 1), *(_EXACT << power for power in range(1, 17)))  # the most of each count

Chunks = Callable[[], Iterable[tuple[EvaluationPage, Tensor]]]
"""Rows of a page with the raw features of their candidates [N, K, F], NaN where absent; the same in every call."""


def candidate_choices(
    page: EvaluationPage,
    copy: TrainingCopy,
    numbers: NDArray[np.int64],
    ids: Sequence[int],
    group: Group,
    *,
    propensities_known: bool,
) -> dict[str, Any]:
    """Returns `tally` over the rows of all ranks; every rank calls it.

    Args:
        page: this rank's scored rows.
        copy: where they are from.
        numbers: [N] row numbers in the copy, in the page's order.
        ids: features of candidates, the same on every rank.
        group: the ranks.
        propensities_known: whether all rows of the log have a propensity.
    """
    size = max(_CHUNK_VALUES // max(page.mask.shape[1] * len(ids), 1), 1)

    def chunks() -> Iterable[tuple[EvaluationPage, Tensor]]:
        for start in range(0, len(page), size):
            rows = torch.arange(start, min(start + size, len(page)))
            features = candidate_features(copy, numbers[start : start + size], ids, page.mask.shape[1])
            yield page.rows(rows), torch.from_numpy(features)

    found = tally(chunks, ids, group, propensities_known=propensities_known)
    copy.release()
    return found


def tally(chunks: Chunks, ids: Sequence[int], group: Group, *, propensities_known: bool) -> dict[str, Any]:
    """Returns what log and policy choose, counted over all ranks, as JSON types; what is undefined is null.

    Args:
        chunks: this rank's rows.
        ids: names of the F features.
        group: the ranks; every one calls it.
        propensities_known: whether the log has propensities, the same on every rank.
    """
    sums = torch.zeros(4, dtype=torch.float64)  # rows, same choice, propensity, probability of the policy
    bins = torch.zeros(3, _BINS, dtype=torch.float64)
    lengths = torch.zeros(len(_LENGTHS), dtype=torch.float64)
    moments = torch.zeros(2, 2, len(ids), dtype=torch.float64)  # of log and policy: weight, weighted sum
    for page, features in chunks():
        policy = page.model_propensities
        taken = page.of_taken(page.model_propensities)
        ones = torch.ones_like(taken)
        sums += torch.stack((ones, (policy.argmax(1) == page.action).double(), page.propensity, taken)).sum(1)
        place = ((page.propensity * _BINS - 1e-6).ceil().long() - 1).clamp(0, _BINS - 1)  # float32 has no 0.1
        bins.index_add_(1, place, torch.stack((ones, page.propensity, taken)))
        counted = torch.bucketize(page.mask.sum(1).clamp(max=_LENGTHS[-1]), torch.tensor(_LENGTHS))
        lengths.index_add_(0, counted, ones)
        weights, values = _weighted(page, features)
        moments += torch.stack((weights.sum((1, 2)), (weights * values).sum((1, 2))), 1)
    weight, total = group.sum(moments).unbind(1)
    mean = total / weight
    squares = torch.zeros_like(mean)
    for page, features in chunks():  # a second time: sums of squares would leave nothing of a small spread
        weights, values = _weighted(page, features)
        squares += (weights * (values - mean.nan_to_num(0.0)[:, None, None]).square()).sum((1, 2))
    stddev = (group.sum(squares) / weight).sqrt()
    rows, same, propensity, probability = group.sum(sums).tolist()
    return {
        "rows": int(rows),
        "same": _ratio(same, rows),
        "propensity": _ratio(propensity, rows) if propensities_known else None,
        "probability": _ratio(probability, rows),
        "by_propensity": _by_propensity(group.sum(bins), rows) if propensities_known else [],
        "candidates": {_length(k): count / rows for k, count in enumerate(group.sum(lengths).tolist()) if count},
        "features": {
            str(name): {"logged": logged, "policy": policy, "difference": _difference(logged, policy)}
            for name, logged, policy in zip(ids, *map(_figures, mean, stddev), strict=True)
        },
    }


def _weighted(page: EvaluationPage, features: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights [2, N, K, F] of features, by the log's choice and by the policy's, and values [N, K, F]."""
    chosen = torch.zeros_like(page.model_propensities).scatter_(1, page.action.unsqueeze(1), 1.0)
    present = ~features.isnan() & page.mask.unsqueeze(2)
    weights = torch.stack((chosen, page.model_propensities)).unsqueeze(3) * present
    return weights, features.double().masked_fill(~present, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _length(place: int) -> str:
    most = _LENGTHS[place]
    return str(most) if place < _EXACT else f"{_LENGTHS[place - 1] + 1} to {most}"


def _by_propensity(bins: Tensor, rows: float) -> list[dict[str, float]]:
    return [
        {
            "low": place / _BINS,
            "high": (place + 1) / _BINS,
            "rows": count / rows,
            "propensity": propensity / count,
            "policy": probability / count,
        }
        for place, (count, propensity, probability) in enumerate(bins.t().tolist())
        if count
    ]


def _figures(mean: Tensor, stddev: Tensor) -> list[dict[str, float | None]]:
    pairs = zip(mean.tolist(), stddev.tolist(), strict=True)
    return [{"mean": finite(one), "stddev": finite(other)} for one, other in pairs]


def _difference(one: dict[str, float | None], other: dict[str, float | None]) -> float | None:
    """Returns the standardized difference of means, (other - one) / sqrt of the mean variance. Austin (2009)."""
    mean = one["mean"]
    stddev = one["stddev"]
    other_mean = other["mean"]
    other_stddev = other["stddev"]
    if mean is None or other_mean is None or stddev is None or other_stddev is None:
        return None
    scale = math.sqrt((stddev**2 + other_stddev**2) / 2)
    return (other_mean - mean) / scale if scale > 0 else None


def candidate_features(
    copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], num_choices: int
) -> NDArray[np.float32]:
    """Returns raw features of the rows' candidates, [n, K, F]; NaN where absent and behind a list's end."""
    lists = np.asarray(copy.actions_list[numbers])
    starts = copy.list_offsets[lists]
    stops = copy.list_offsets[lists + 1]
    places = starts[:, None] + np.arange(num_choices)
    within = places < stops[:, None]
    features = np.full((len(numbers), num_choices, len(ids)), np.nan, np.float32)
    features[within] = in_order(np.asarray(copy.candidates[places[within]]), copy.action_ids, ids, absent=np.nan)
    return features
