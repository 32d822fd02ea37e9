"""Choices among candidates, by features and by item, of a policy and of the log.

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
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists, in_order
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.interval import none_if_infinite
from reagent_lite.item_table import ItemTable
from reagent_lite.types import FeatureSpec

_BINS = 10  # of propensities
_EXACT = 16  # up to this number of candidates, each number is counted separately
_MOST_ITEMS = 200  # named in the document
_CHUNK_VALUES = 1 << 20  # 8 MB of float64, a few times
_LENGTHS = (*range(1, _EXACT + 1), *(_EXACT << power for power in range(1, 17)))  # largest number in each bin

Chunks = Callable[[], Iterable[tuple[EvaluationRows, Tensor]]]
"""Yields rows of a page with raw features of their candidates [N, K, F], NaN if absent; the same in every call."""


def candidate_choices(
    page: EvaluationRows,
    copy: TrainingCopy,
    numbers: NDArray[np.int64],
    features: Sequence[FeatureSpec],
    group: Group,
    *,
    propensities_known: bool,
    items: ItemTable | None = None,
) -> dict[str, Any]:
    """Returns `tally` over the rows of all ranks; every rank calls it.

    A category is described by a column for each level: 1 if the candidate has this level, 0 if it has another.

    Args:
        page: this rank's scored rows.
        copy: the training copy of these rows.
        numbers: [N] row numbers in the copy, in the page's order.
        features: specs of the candidates' features, the same on every rank.
        group: the ranks.
        propensities_known: whether all rows of the log have a propensity.
        items: the item table; None without one.
    """
    ids = [feature.feature_id for feature in features]
    names = [name for feature in features for name in _names(feature)]
    size = max(_CHUNK_VALUES // max(page.mask.shape[1] * len(names), 1), 1)

    def chunks() -> Iterable[tuple[EvaluationRows, Tensor]]:
        for start in range(0, len(page), size):
            rows = torch.arange(start, min(start + size, len(page)))
            raw = gather_candidate_features(copy, numbers[start : start + size], ids, page.mask.shape[1])
            yield page.rows(rows), _by_level(torch.from_numpy(raw), features)

    named = None if items is None else NamedItems(items, ids, features)
    document = tally(chunks, names, group, propensities_known=propensities_known, named=named)
    copy.release()
    return document


def _names(feature: FeatureSpec) -> list[str]:
    return [f"{feature.feature_id} = {level}" for level in feature.levels] or [str(feature.feature_id)]


def _by_level(raw: Tensor, features: Sequence[FeatureSpec]) -> Tensor:
    """Returns raw features [N, K, F] with a column for each level of categories, NaN where absent."""
    columns = []
    for column, feature in zip(raw.unbind(2), features, strict=True):
        if feature.levels:
            columns += [
                torch.where(column.isnan(), column, (column == code).to(column.dtype))
                for code in feature.possible_values
            ]
        else:
            columns.append(column)
    return torch.stack(columns, 2)


def tally(
    chunks: Chunks,
    ids: Sequence[int | str],
    group: Group,
    *,
    propensities_known: bool,
    named: "NamedItems | None" = None,
) -> dict[str, Any]:
    """Counts the choices of log and policy over all ranks and returns them as JSON types; undefined values are null.

    Args:
        chunks: this rank's rows.
        ids: names of the F features.
        group: the ranks; every rank calls it.
        propensities_known: whether the log has propensities, the same on every rank.
        named: counter of items; None without an item table.
    """
    sums = torch.zeros(4, dtype=torch.float64)  # rows, same choice, propensity, probability under the policy
    bins = torch.zeros(3, _BINS, dtype=torch.float64)
    lengths = torch.zeros(len(_LENGTHS), dtype=torch.float64)
    moments = torch.zeros(2, 2, len(ids), dtype=torch.float64)  # log and policy; weight and weighted sum
    for page, features in chunks():
        policy = page.model_propensities
        probability = page.at_logged(page.model_propensities)
        ones = torch.ones_like(probability)
        sums += torch.stack((ones, (policy.argmax(1) == page.action).double(), page.propensity, probability)).sum(1)
        bin_index = ((page.propensity * _BINS - 1e-6).ceil().long() - 1).clamp(0, _BINS - 1)  # float32 has no 0.1
        bins.index_add_(1, bin_index, torch.stack((ones, page.propensity, probability)))
        length_bin = torch.bucketize(page.mask.sum(1).clamp(max=_LENGTHS[-1]), torch.tensor(_LENGTHS))
        lengths.index_add_(0, length_bin, ones)
        if named is not None:
            named.add(page, features)
        weights, values = _weigh_features(page, features)
        moments += torch.stack((weights.sum((1, 2)), (weights * values).sum((1, 2))), 1)
    weight, total = group.all_reduce(moments).unbind(1)
    mean = total / weight
    squares = torch.zeros_like(mean)
    for page, features in chunks():  # a second pass: a sum of squares alone would lose a small spread to rounding
        weights, values = _weigh_features(page, features)
        squares += (weights * (values - mean.nan_to_num(0.0)[:, None, None]).square()).sum((1, 2))
    stddev = (group.all_reduce(squares) / weight).sqrt()
    rows, same, propensity, probability_sum = group.all_reduce(sums).tolist()
    return {
        **({} if named is None else named.shares(group)),
        "rows": int(rows),
        "same": _ratio(same, rows),
        "propensity": _ratio(propensity, rows) if propensities_known else None,
        "probability": _ratio(probability_sum, rows),
        "by_propensity": _by_propensity(group.all_reduce(bins), rows) if propensities_known else [],
        "candidates": {_length(k): count / rows for k, count in enumerate(group.all_reduce(lengths).tolist()) if count},
        "features": {
            str(name): _compare_means(means, stddevs)
            for name, means, stddevs in zip(ids, mean.T.tolist(), stddev.T.tolist(), strict=True)
        },
    }


class NamedItems:
    """Counts the choices of log and policy by item; items with the features of another are counted with the first."""

    def __init__(self, items: ItemTable, ids: Sequence[int], features: Sequence[FeatureSpec] = ()) -> None:
        self._items = items
        table = FeatureMatrix(items.feature_ids, items.values).align(tuple(ids))
        if features:
            table = _by_level(torch.from_numpy(table).unsqueeze(1), features).squeeze(1).numpy()
        self._table = table
        self._chosen = torch.zeros(2, len(items) + 1, dtype=torch.float64)  # log and policy; last column: no item

    def add(self, page: EvaluationRows, features: Tensor) -> None:
        """Adds rows of a page with features of their candidates [N, K, F], a result of `_by_level`."""
        rows, choices, _ = features.shape
        values = np.concatenate((self._table, features.numpy().reshape(rows * choices, -1)))
        columns = tuple(range(values.shape[1]))
        first = Lists(np.array([len(values)]), FeatureMatrix(columns, values)).first_equal[len(self._items) :]
        item = torch.from_numpy(np.minimum(first, len(self._items)).reshape(rows, choices))
        logged = item.gather(1, page.action.unsqueeze(1)).flatten()
        self._chosen[0].index_add_(0, logged, torch.ones(rows, dtype=torch.float64))
        self._chosen[1].index_add_(0, item.flatten(), page.model_propensities.double().flatten())

    def shares(self, group: Group) -> dict[str, Any]:
        """Returns shares over all ranks: `items`, the share of each of the most chosen, and `other_items`, the rest."""
        counts = group.all_reduce(self._chosen)
        shares = (counts / counts.sum(1, keepdim=True)).nan_to_num(0.0)
        order = shares[:, :-1].amax(0).argsort(descending=True, stable=True)[:_MOST_ITEMS].tolist()
        most = {self._items.ids[k]: _pair(shares[:, k]) for k in order if shares[:, k].any()}
        rest = 1 - torch.tensor([list(pair.values()) for pair in most.values()] or [[0.0, 0.0]]).double().sum(0)
        return {"items": most, "other_items": _pair(rest.clamp(min=0.0))}


def _pair(shares: Tensor) -> dict[str, float]:
    logged, policy = shares.tolist()
    return {"logged": logged, "policy": policy}


def _weigh_features(page: EvaluationRows, features: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights [2, N, K, F] of features, by the log's choice and by the policy's, and values [N, K, F]."""
    chosen = torch.zeros_like(page.model_propensities).scatter_(1, page.action.unsqueeze(1), 1.0)
    present = ~features.isnan() & page.mask.unsqueeze(2)
    weights = torch.stack((chosen, page.model_propensities)).unsqueeze(3) * present
    return weights, features.double().masked_fill(~present, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _length(bin_index: int) -> str:
    most = _LENGTHS[bin_index]
    return str(most) if bin_index < _EXACT else f"{_LENGTHS[bin_index - 1] + 1} to {most}"


def _by_propensity(bins: Tensor, rows: float) -> list[dict[str, float]]:
    return [
        {
            "low": bin_index / _BINS,
            "high": (bin_index + 1) / _BINS,
            "rows": count / rows,
            "propensity": propensity / count,
            "policy": probability / count,
        }
        for bin_index, (count, propensity, probability) in enumerate(bins.t().tolist())
        if count
    ]


def _compare_means(means: Sequence[float], stddevs: Sequence[float]) -> dict[str, Any]:
    """Returns means and standard deviations of log and policy, and the standardized difference of the means.

    The difference is (policy - logged) / sqrt(mean variance). Austin (2009).
    """
    logged, policy = (
        {"mean": none_if_infinite(mean), "stddev": none_if_infinite(stddev)}
        for mean, stddev in zip(means, stddevs, strict=True)
    )
    scale = math.sqrt((stddevs[0] ** 2 + stddevs[1] ** 2) / 2)
    difference = none_if_infinite((means[1] - means[0]) / scale) if scale > 0 else None
    return {"logged": logged, "policy": policy, "difference": difference}


def gather_candidate_features(
    copy: TrainingCopy, numbers: NDArray[np.int64], ids: Sequence[int], num_choices: int
) -> NDArray[np.float32]:
    """Returns raw features of the rows' candidates, [n, K, F]; NaN if absent or after a list's end."""
    lists = np.asarray(copy.actions_list[numbers])
    starts = copy.list_offsets[lists]
    stops = copy.list_offsets[lists + 1]
    indices = starts[:, None] + np.arange(num_choices)
    within = indices < stops[:, None]
    features = np.full((len(numbers), num_choices, len(ids)), np.nan, np.float32)
    features[within] = in_order(np.asarray(copy.candidates[indices[within]]), copy.action_ids, ids, absent=np.nan)
    return features
