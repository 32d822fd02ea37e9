"""Features of rows, summarized part by part: exact counts, moments and extremes, and a sample chosen by hash.

    values [n, F] and a hash of each row ─► ColumnSummary ─┐
    values [n, F] and a hash of each row ─► ColumnSummary ─┴► Merge ─► ColumnSummary of all rows ─► bytes ─► Merge …

Parts are blocks of a file, blocks of a training copy, or summaries of other machines. Counts, extremes and distinct
values do not depend on how rows are divided; float64 means and squares depend on it in their last digits only. The
sample depends on the rows alone: it consists of those with the smallest hashes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from reagent_lite.data.rows.hashes import Hashes
from reagent_lite.data.rows.levels import MOST_LEVELS, Levels, add_levels, most_frequent
from reagent_lite.data.rows.matrices import FeatureIds, FeatureMatrix
from reagent_lite.id_values import IdFeature
from reagent_lite.types import MISSING_VALUE

Floats = NDArray[np.float64]

STATE = "state_features"
ACTION = "action"
"""Columns that are summarized."""

_FEWEST_MERGED = 1 << 20
"""Ids of further parts that are merged at once."""

MISSING = np.float32(MISSING_VALUE)
"""A value that the preprocessor treats as missing, and statistics as well."""

SMALLEST_STDDEV = float(np.finfo(np.float32).tiny)
"""Below it a standard deviation is 0 to a float32 network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of values; the moments of parts can be merged."""

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Returns the moments of values [N]; all zero for none."""
        if not len(values):
            return cls(count=0, mean=0.0, squares=0.0)
        mean = float(values.mean())
        return cls(count=len(values), mean=mean, squares=float(np.square(values - mean).sum()))

    def merge(self, other: Self) -> Self:
        """Returns the moments of both parts together (Chan, Golub and LeVeque 1983, equation 2.1)."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        return type(self)(
            count=count,
            mean=self.mean + delta * other.count / count,
            squares=self.squares + other.squares + delta * delta * self.count * other.count / count,
        )

    @property
    def stddev(self) -> float:
        """Sample standard deviation (ddof 1); 0 for fewer than two values."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSummary:
    """The present values of one feature in all rows.

    Attributes:
        moments: count, mean, squares.
        low, high: smallest and largest value; inf and -inf without values.
        whole: whether all values are integers.
        distinct: the distinct values, ascending; None if there are more than the limit.
    """

    moments: Moments
    low: float
    high: float
    whole: bool
    distinct: tuple[float, ...] | None

    @classmethod
    def of(cls, values: NDArray[np.float32] | Floats, most_distinct: int) -> Self:
        """Returns the summary of raw values [n]; NaN and the missing value are left out."""
        present = _drop_missing(values)
        # most features have too many distinct values among their first ones already: the others need not be sorted then
        distinct = np.unique(present[: 4 * most_distinct])
        if len(distinct) <= most_distinct:
            distinct = np.unique(present)
        return cls(
            moments=Moments.of(present.astype(np.float64)),
            low=float(present.min(initial=np.inf)),
            high=float(present.max(initial=-np.inf)),
            whole=bool((present == np.floor(present)).all()),
            distinct=tuple(distinct.tolist()) if len(distinct) <= most_distinct else None,
        )

    def merge(self, other: Self, most_distinct: int) -> Self:
        """Returns the summary of both parts together."""
        distinct = None
        if self.distinct is not None and other.distinct is not None:
            distinct = tuple(sorted({*self.distinct, *other.distinct}))
        return type(self)(
            moments=self.moments.merge(other.moments),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            whole=self.whole and other.whole,
            distinct=distinct if distinct is not None and len(distinct) <= most_distinct else None,
        )

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal, or too close together for a float32 standard deviation."""
        return self.low == self.high or self.moments.stddev < SMALLEST_STDDEV


def _drop_missing(values: NDArray[Any]) -> NDArray[Any]:
    values = np.ascontiguousarray(values)  # a column of a matrix, which is read several times
    present: NDArray[Any] = values[~np.isnan(values) & (values != MISSING)]
    return present


@dataclass(frozen=True, slots=True)
class IdCounts:
    """The ids of a feature, by their codes.

    Attributes:
        codes: [n] float32, ascending, each once.
        counts: [n] int64, how often each occurs.
    """

    codes: NDArray[np.float32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, codes: NDArray[np.float32], counts: NDArray[np.int64] | None = None) -> Self:
        """Returns the counts of codes [n], each as often as `counts` say; NaN is left out."""
        if counts is None:
            distinct, of_each = np.unique(codes[~np.isnan(codes)], return_counts=True)
            return cls(distinct, of_each.astype(np.int64))
        distinct, index = np.unique(codes, return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, index, counts)
        return cls(distinct, sums)

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Returns the counts of several parts together."""
        if len(parts) == 1:
            return parts[0]
        none = cls(np.empty(0, np.float32), np.empty(0, np.int64))
        return cls.of(
            np.concatenate([part.codes for part in (none, *parts)]),
            np.concatenate([part.counts for part in (none, *parts)]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSummary:
    """The features of states, or of candidates as often as rows list them.

    Attributes:
        rows: number of rows or candidates.
        features: {id: summary}, ids ascending.
        levels: {id: {text: number of its values}} of the features whose values are texts.
        hashes: [n] hashes of the rows in the sample.
        ids: {id: counts of its ids} of the features of ids; empty counts for those whose ids are hashed.
        sample: sampled rows or candidates, n in all, in matrices of the features that they have; in the summary of a
            part, all rows. The memory of sparse rows is therefore far below n times the number of features.
    """

    rows: int
    features: dict[int, FeatureSummary]
    levels: Levels
    hashes: Hashes
    sample: tuple[FeatureMatrix, ...]
    ids: dict[int, IdCounts]

    @classmethod
    def of(
        cls,
        matrix: FeatureMatrix,
        hashes: Hashes,
        most_distinct: int,
        texts: Mapping[int, Mapping[float, str]] = {},
        id_features: Mapping[IdFeature, bool] = {},
    ) -> Self:
        """Returns the summary of a part.

        Args:
            matrix: values [n, F].
            hashes: [n] hashes of the rows.
            most_distinct: limit of the distinct values that are listed.
            texts: {id: {code: text}} of features whose values are texts.
            id_features: features of ids, and whether the ids of each are counted.
        """
        matrix, ids = _without_ids(matrix, id_features)
        columns = dict(zip(matrix.ids, matrix.values.T, strict=True))
        features = {feature: FeatureSummary.of(values, most_distinct) for feature, values in columns.items()}
        levels = {
            feature: _count_texts(columns[feature], of_code) for feature, of_code in texts.items() if feature in columns
        }
        present = matrix.nonempty()
        in_order = tuple(sorted(present.ids))
        sample = (FeatureMatrix(in_order, present.align(in_order)),)
        return cls(rows=len(hashes), features=features, levels=levels, hashes=hashes, sample=sample, ids=ids)

    def sample_values(self, feature_id: int) -> Floats:
        """Returns the present values of a feature in the sample, ascending."""
        parts = [
            _drop_missing(matrix.values[:, matrix.ids.index(feature_id)])
            for matrix in self.sample
            if feature_id in matrix.ids
        ]
        return np.sort(np.concatenate(parts)).astype(np.float64) if parts else np.empty(0)

    def to_bytes(self) -> bytes:
        """Returns the summary for another machine."""
        levels = {feature: dict(most_frequent(counts, MOST_LEVELS)) for feature, counts in self.levels.items()}
        ids = [matrix.ids for matrix in self.sample]
        features = tuple(self.features), list(self.features.values())
        tree = _TREE.dump_json((self.rows, *features, tuple(levels), list(levels.values()), ids, tuple(self.ids)))
        values: dict[str, Any] = {f"values_{number}": matrix.values for number, matrix in enumerate(self.sample)}
        for number, counted in enumerate(self.ids.values()):
            values |= {f"codes_{number}": counted.codes, f"counts_{number}": counted.counts}
        stream = io.BytesIO()
        np.savez(stream, tree=np.frombuffer(tree, np.uint8), hashes=self.hashes, **values)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Returns the summary that `to_bytes` wrote."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            rows, names, features, with_levels, levels, ids, with_ids = _TREE.validate_json(arrays["tree"].tobytes())
            return cls(
                rows=rows,
                features=dict(zip(names, features, strict=True)),
                levels=dict(zip(with_levels, levels, strict=True)),
                hashes=arrays["hashes"],
                sample=tuple(FeatureMatrix(of, arrays[f"values_{number}"]) for number, of in enumerate(ids)),
                ids={
                    feature: IdCounts(arrays[f"codes_{number}"], arrays[f"counts_{number}"])
                    for number, feature in enumerate(with_ids)
                },
            )


_TREE: TypeAdapter[Any] = TypeAdapter(
    tuple[int, FeatureIds, list[FeatureSummary], FeatureIds, list[dict[str, int]], list[FeatureIds], FeatureIds],
    config=ConfigDict(ser_json_inf_nan="constants"),
)


def _without_ids(
    matrix: FeatureMatrix, id_features: Mapping[IdFeature, bool]
) -> tuple[FeatureMatrix, dict[int, IdCounts]]:
    """Returns the columns of other features, and the ids of the features of ids that the matrix has."""
    column_of = {name: column for column, name in enumerate(matrix.ids)}
    counts = {}
    for feature, is_counted in id_features.items():
        of_feature = [column_of.pop(name) for name in feature.columns if name in column_of]
        if of_feature:
            codes = [column for column in of_feature if matrix.ids[column] in feature.columns[: feature.length]]
            counts[feature.feature] = IdCounts.of(matrix.values[:, codes if is_counted else []].ravel())
    others = FeatureMatrix(tuple(column_of), matrix.values[:, list(column_of.values())]) if counts else matrix
    return others, counts


def _count_texts(codes: NDArray[np.float32], texts: Mapping[float, str]) -> dict[str, int]:
    """Returns {text: number of its values}; a code whose text was dropped is left out."""
    distinct, counts = np.unique(_drop_missing(codes), return_counts=True)
    pairs = zip(distinct.tolist(), counts.tolist(), strict=True)
    return {texts[code]: count for code, count in pairs if code in texts}


class Merge:
    """Merges the summaries of a column's parts.

    The order of the parts only matters for rows with equal hashes and for the last digits of moments. In memory are the
    sample and at most a quarter as many newer rows.
    """

    def __init__(self, num_samples: int, most_distinct: int) -> None:
        self._num_samples = num_samples
        self._most_distinct = most_distinct
        self._rows = 0
        self._features: dict[int, FeatureSummary] = {}
        self._levels: Levels = {}
        self._ids: dict[int, list[IdCounts]] = {}
        self._parts: list[tuple[Hashes, FeatureMatrix]] = []
        self._newer = 0  # rows since the last choice
        self._cut = np.uint64(2**64 - 1)  # rows above it are not in the sample

    def add(self, part: ColumnSummary) -> None:
        """Adds a part."""
        self._rows += part.rows
        for feature, summary in part.features.items():
            before = self._features.get(feature)
            self._features[feature] = summary if before is None else before.merge(summary, self._most_distinct)
        add_levels(self._levels, part.levels, MOST_LEVELS)
        for feature, counts in part.ids.items():
            parts = self._ids.setdefault(feature, [])
            parts.append(counts)
            if sum(len(later.codes) for later in parts[1:]) > _FEWEST_MERGED + len(parts[0].codes):
                self._ids[feature] = [IdCounts.merge(parts)]
        first = 0
        for matrix in part.sample:
            hashes = part.hashes[first : first + len(matrix.values)]
            first += len(matrix.values)
            self._keep(hashes, matrix, hashes <= self._cut)
        if self._newer > self._num_samples // 4:
            self._choose()

    def _keep(self, hashes: Hashes, matrix: FeatureMatrix, rows: NDArray[Any]) -> None:
        self._parts.append((hashes[rows], FeatureMatrix(matrix.ids, matrix.values[rows])))
        self._newer += len(self._parts[-1][0])

    def summary(self) -> ColumnSummary:
        """Returns the summary of all parts."""
        self._choose()
        return ColumnSummary(
            rows=self._rows,
            features=dict(sorted(self._features.items())),
            levels=dict(sorted(self._levels.items())),
            hashes=np.concatenate([np.empty(0, np.uint64), *(hashes for hashes, _ in self._parts)]),
            sample=tuple(matrix for _, matrix in self._parts),
            ids={feature: IdCounts.merge(parts) for feature, parts in sorted(self._ids.items())},
        )

    def _choose(self) -> None:
        """Drops all rows but those with the smallest hashes; parts stay in their order."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part for part, _ in self._parts)])
        kept = np.sort(np.argsort(hashes, kind="stable")[: self._num_samples])
        if len(kept) == self._num_samples:
            self._cut = hashes[kept].max()
        first = 0
        parts = self._parts
        self._parts = []
        for of_part, matrix in parts:
            start, stop = np.searchsorted(kept, (first, first + len(of_part)))
            if stop > start:
                self._keep(of_part, matrix, kept[start:stop] - first)
            first += len(of_part)
        self._newer = 0
