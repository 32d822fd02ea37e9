"""Strings of features, which are categories: collects those of each feature, and checks that values are of one kind.

    block ─► Faults.levels ─► Vocabulary, block after block ─► {side: {id: {text: number of its values}}}

The side of a feature is "state", or "action" for candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from reagent_lite.categories import code_of
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError, Problem

Levels = dict[int, dict[str, int]]
"""{id of a feature: {text: number of its values}}."""
SIDE_OF = {
    "state_features": "state",
    "next_state_features": "state",
    "action": "action",
    "next_action": "action",
    "possible_actions": "action",
    "possible_next_actions": "action",
}
MOST_LEVELS = 1 << 16
"""Largest number of strings of a feature that are kept; beyond it, the least frequent so far are dropped."""
ONE_KIND = "All values of a feature are numbers, or all are strings, which are categories"
WORDS = ("a number", "a string")


def add_levels(levels: Levels, more: Mapping[int, Mapping[str, int]], most: int | None = None) -> None:
    """Adds counts of strings to `levels`; a feature with more than 2 * `most` of them keeps the `most` frequent."""
    for feature, counts in more.items():
        counts_so_far = levels.setdefault(feature, {})
        for text, count in counts.items():
            counts_so_far[text] = counts_so_far.get(text, 0) + count
        if most is not None and len(counts_so_far) > 2 * most:
            levels[feature] = dict(most_frequent(counts_so_far, most))


def most_frequent(counts: Mapping[str, int], most: int) -> list[tuple[str, int]]:
    """Returns the most frequent strings with their counts; of equally frequent strings, the first in text order."""
    return heapq.nsmallest(most, counts.items(), key=lambda pair: (-pair[1], pair[0]))


def texts_of(levels: Levels) -> dict[int, dict[float, str]]:
    """Returns {id: {code: text}}; of strings with the same code, the most frequent."""
    return {
        feature: {code_of(text): text for text, _ in reversed(most_frequent(counts, len(counts)))}
        for feature, counts in levels.items()
    }


class Vocabulary:
    """The strings of all blocks so far.

    Attributes:
        levels: {side: {id: {text: number of its values}}} of the features whose values are texts.
    """

    def __init__(self) -> None:
        self.levels: dict[str, Levels] = {"state": {}, "action": {}}
        self._first: dict[tuple[str, int], tuple[bool, str]] = {}  # whether the first value is a text, and its location

    def add(self, levels: Mapping[str, Mapping[int, Mapping[str, int]]]) -> None:
        """Adds the strings of a block, by column."""
        for column, of_column in levels.items():
            add_levels(self.levels[SIDE_OF[column]], of_column, MOST_LEVELS)

    def require_one_kind(
        self,
        side: str,
        matrix: FeatureMatrix,
        texts: Collection[int],
        block: Block,
        row_of: NDArray[np.int64] | None = None,
    ) -> None:
        """Checks that features have numbers, or strings, as in the previous blocks.

        Args:
            side: "state" or "action".
            matrix: features of a block.
            texts: ids of the features whose values are texts.
            block: the block.
            row_of: [n] the block's row of each row of the matrix; None if they are the same.

        Raises:
            DataError: with file and line of the first value of the other kind.
        """
        for index, feature in enumerate(matrix.ids):
            is_text = feature in texts
            before = self._first.get((side, feature))
            if before is not None and before[0] == is_text:
                continue
            present = ~np.isnan(matrix.values[:, index])
            if not present.any():
                continue
            row = int(present.argmax())
            where = block.where(row if row_of is None else int(row_of[row]))
            if before is None:
                self._first[side, feature] = is_text, where
                continue
            expected = f"{WORDS[not is_text]} for feature {feature}, as in {before[1]}"
            raise DataError(Problem(where, expected, WORDS[is_text], ONE_KIND))

    def without_value(self, side: str, ids: Collection[int]) -> tuple[int, ...]:
        """Returns the features of a side that have no value in any block."""
        return tuple(sorted(feature for feature in ids if (side, feature) not in self._first))
