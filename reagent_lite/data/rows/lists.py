"""Candidate lists of parametric rows, and the place of the action taken among its candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.rows.columns import Column, pieces
from reagent_lite.data.rows.contract import NONE
from reagent_lite.data.rows.faults import Faults, Mask
from reagent_lite.data.rows.named import FeatureMatrix, features


@dataclass(frozen=True, slots=True)
class Lists:
    """Candidate lists of n rows: lengths [n], and the features of all candidates in order."""

    lengths: NDArray[np.int64]
    features: FeatureMatrix

    @property
    def rows(self) -> NDArray[np.int64]:
        """[candidates] row of each candidate."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def without(self, rows: Mask) -> Lists:
        """Returns the lists with those of some rows emptied."""
        kept = np.repeat(~rows, self.lengths)
        return Lists(np.where(rows, 0, self.lengths), FeatureMatrix(self.features.ids, self.features.values[kept]))

    def or_alone(self, action: FeatureMatrix, taken: Mask, rows: Mask) -> Lists:
        """Returns the lists, in some rows with the action taken as the only candidate; with none where none is."""
        if not rows.any():
            return self
        ids = tuple(dict.fromkeys(self.features.ids + action.ids))
        lengths = np.where(rows, taken, self.lengths)
        alone = np.repeat(rows, lengths)
        values = np.empty((len(alone), len(ids)), np.float32)
        values[alone] = action.aligned(ids)[rows & taken]
        values[~alone] = self.features.aligned(ids)[~rows[self.rows]]
        return Lists(lengths, FeatureMatrix(ids, values))


def candidate_lists(column: Column, faults: Faults) -> Lists:
    """Returns the lists of maps {id: number} of a column; rows without one have an empty list."""
    lengths, elements = pieces(column, faults, "a list of objects {id: number}", "Names are actions of workflows.dqn")
    found, present = features(elements, faults)
    elements.fault(faults, ~present, f"an object for every candidate in {column.name}", lambda _: "null")
    return Lists(lengths, found)


def match(action: FeatureMatrix, known: Mask, lists: Lists) -> NDArray[np.int32]:
    """Returns [n] index of the first candidate whose features equal the action's, absent = absent; NONE without one."""
    ids = tuple(dict.fromkeys(lists.features.ids + action.ids))
    candidates, wanted = lists.features.aligned(ids), action.aligned(ids)
    rows = lists.rows
    equal = known[rows]
    for index in range(len(ids)):
        one, other = candidates[:, index], wanted[rows, index]
        equal &= (one == other) | (np.isnan(one) & np.isnan(other))
    found = np.full(len(known), NONE, np.int32)
    starts = np.cumsum(lists.lengths) - lists.lengths
    at = np.flatnonzero(equal)[::-1]
    # Written from the last to the first: the first equal candidate stays.
    found[rows[at]] = (at - starts[rows[at]]).astype(np.int32)
    return found
