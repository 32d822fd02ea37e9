"""Dense features of rows and of lists of candidates, by id, as numpy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.feature_ids import read, write_ids

Mask = NDArray[np.bool_]
FeatureIds = Annotated[tuple[int, ...], PlainValidator(read), PlainSerializer(write_ids)]
"""Feature ids; in JSON, an id that has a name is the name."""


@dataclass(frozen=True, slots=True)
class FeatureMatrix:
    """Dense features of rows or candidates: ids as logged, values [n, ids] float32, NaN = absent; uint8 of images."""

    ids: tuple[int, ...]
    values: NDArray[Any]

    @property
    def empty(self) -> Mask:
        """[n] whether the row has no value."""
        if self.values.dtype == np.uint8:
            return np.zeros(len(self.values), bool)
        nothing: Mask = np.isnan(self.values).all(axis=1)
        return nothing

    def align(self, ids: tuple[int, ...]) -> NDArray[Any]:
        """Returns the values [n, ids] for the given ids; NaN for ids that the matrix lacks."""
        return in_order(self.values, self.ids, ids, absent=np.nan)

    def nonempty(self) -> FeatureMatrix:
        """Returns the features that have a value in some row."""
        if self.values.dtype == np.uint8:
            return self
        kept: Mask = ~np.all(np.isnan(self.values), axis=0)
        return self if kept.all() else FeatureMatrix(tuple(itertools.compress(self.ids, kept)), self.values[:, kept])


def in_order(values: NDArray[Any], names: Sequence[object], order: Sequence[object], *, absent: float) -> NDArray[Any]:
    """Returns the columns of `values` [n, names] in another order, [n, order]; missing columns are `absent`."""
    if tuple(names) == tuple(order):
        return values
    result = np.full((len(values), len(order)), absent, np.float32)
    column_of = {name: column for column, name in enumerate(names)}
    present = [column for column, name in enumerate(order) if name in column_of]
    result[:, present] = values[:, [column_of[order[column]] for column in present]]
    return result


@dataclass(frozen=True, slots=True)
class Lists:
    """Candidate lists of n rows: lengths [n], and the features of all candidates in order."""

    lengths: NDArray[np.int64]
    features: FeatureMatrix

    @property
    def rows(self) -> NDArray[np.int64]:
        """[candidates] row of each candidate."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def first_equal(self) -> NDArray[np.int64]:
        """[candidates] number of the first candidate of the same list with the same features, absent = absent."""
        values = np.where(np.isnan(self.features.values), np.float32(np.nan), self.features.values) + np.float32(0)
        bits = values.view(np.uint32)
        key = mix(self.rows.astype(np.uint64))
        for column in bits.T:
            key = mix(key ^ column)
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        earlier = first[number]
        return np.where((bits == bits[earlier]).all(axis=1), earlier, np.arange(len(bits)))

    def hashes(self) -> tuple[Hashes, Hashes]:
        """Returns two independent [n] uint64 hashes of each list; the order of columns does not matter."""
        ids = np.array(self.features.ids, np.int64).view(np.uint64)
        starts = np.cumsum(self.lengths) - self.lengths
        position = (np.arange(int(self.lengths.sum())) - np.repeat(starts, self.lengths)).astype(np.uint64)
        first = mix(position)
        second = mix(position ^ np.uint64(0xA5A5A5A5A5A5A5A5))
        for index, id_hash in enumerate(mix(ids)):
            column = np.ascontiguousarray(self.features.values[:, index])
            cell = mix(column.view(np.uint32).astype(np.uint64) + id_hash)
            cell[np.isnan(column)] = 0
            first += cell
            second += cell * (id_hash | np.uint64(1))
        return _sums(mix(first), self.lengths), _sums(mix(second), self.lengths)

    def distinct(self) -> Lists:
        """Returns the lists without repeated candidates: candidates with equal features are the same action."""
        kept = self.first_equal == np.arange(len(self.rows))
        lengths = np.bincount(self.rows[kept], minlength=len(self.lengths))
        return Lists(lengths, FeatureMatrix(self.features.ids, self.features.values[kept]))

    def without(self, rows: Mask) -> Lists:
        """Returns the lists, empty in the given rows."""
        kept = np.repeat(~rows, self.lengths)
        return Lists(np.where(rows, 0, self.lengths), FeatureMatrix(self.features.ids, self.features.values[kept]))

    def part(self, rows: slice) -> Lists:
        """Returns the lists of consecutive rows."""
        span = slice(self.lengths[: rows.start].sum(), self.lengths[: rows.stop].sum())
        return Lists(self.lengths[rows], FeatureMatrix(self.features.ids, self.features.values[span]))

    def or_same(self, features: FeatureMatrix, rows: Mask) -> Lists:
        """Returns the lists, which in the given rows [n] have the same candidates."""
        if not rows.any():
            return self
        ids = tuple(dict.fromkeys(self.features.ids + features.ids))
        lengths = np.where(rows, len(features.values), self.lengths)
        same = np.repeat(rows, lengths)
        values = np.empty((len(same), len(ids)), np.float32)
        values[same] = np.tile(features.align(ids), (int(rows.sum()), 1))
        values[~same] = self.features.align(ids)[~rows[self.rows]]
        return Lists(lengths, FeatureMatrix(ids, values))

    def or_alone(self, action: FeatureMatrix, present: Mask, rows: Mask) -> Lists:
        """Returns the lists, which in the given rows have the action as the only candidate, or are empty without one.

        Args:
            action: features of the actions.
            present: [n] whether the row has an action.
            rows: [n] whether the row's list is replaced.
        """
        if not rows.any():
            return self
        ids = tuple(dict.fromkeys(self.features.ids + action.ids))
        lengths = np.where(rows, present, self.lengths)
        alone = np.repeat(rows, lengths)
        values = np.empty((len(alone), len(ids)), np.float32)
        values[alone] = action.align(ids)[rows & present]
        values[~alone] = self.features.align(ids)[~rows[self.rows]]
        return Lists(lengths, FeatureMatrix(ids, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyColumn:
    """A policy's probabilities on R rows.

    Attributes:
        values: [R, 1], of the logged action, or [R, K], of every named action or candidate; 0 as padding.
        complete: whether the probabilities are of every action.
    """

    values: NDArray[np.float32]
    complete: bool


def _sums(values: Hashes, lengths: NDArray[np.int64]) -> Hashes:
    """[n] wrapping sums over consecutive runs of `values`, mixed with the runs' lengths."""
    running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)))
    ends = np.cumsum(lengths)
    return mix((running[ends] - running[ends - lengths]) ^ lengths.astype(np.uint64))
