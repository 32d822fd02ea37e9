"""A segment of rows in words: the values of few features that tell them from the other rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.categories import code_of
from reagent_lite.data.copy.choice_hashes import hashes_of
from reagent_lite.data.copy.training_copy import TrainingCopy, release
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.interval import number
from reagent_lite.memory import give_back_memory

_MOST_CONDITIONS = 3
_LEAST_GAIN = 0.02  # of the score, for a further condition
_LEAST_SCORE = 0.6
_EXACT_SCORE = 0.95
_FEW_VALUES = 12  # numbers with more different values are divided at a limit
_NAMED_VALUES = 5
_MOST_ROWS = 200_000  # that a segment is looked for in
_VALUES_AT_ONCE = 1 << 26  # of states that are compared


def categories_of(copy: TrainingCopy, side: str, ids: Sequence[int]) -> dict[int, dict[float, str]]:
    """Returns {column: {code: text}} of the categories among features, whose side is "state" or "action"."""
    levels = copy.levels[side]
    return {
        column: {code_of(text): text for text in levels[feature]}
        for column, feature in enumerate(ids)
        if feature in levels
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFeatures:
    """Raw state features of rows.

    Attributes:
        names: names of the F features.
        values: [R, F] float32 values of all rows; NaN if absent; strings are codes.
        texts: {feature's column: {code: text}} of categories.
        ids: ids of the columns of the states, which `context` compares.
        states: [R, S] the columns; those of `values`, or images, which have no features.
        of_ids: columns of features whose values are ids, which have no order and too many values for conditions.
        position: returns numbers [n] that are in the order of the files, given numbers of rows [n].
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]
    texts: dict[int, dict[float, str]] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    states: NDArray[Any] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    of_ids: frozenset[int] = frozenset()
    position: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda rows: rows

    @classmethod
    def of(cls, copy: TrainingCopy) -> "StateFeatures":
        """Returns the state features of a training copy's rows."""
        names = () if copy.has_images else copy.state_ids
        return cls(
            names=tuple(map(str, names)),
            values=copy.state[:, : len(names)],
            ids=copy.state_ids,
            states=copy.state,
            position=lambda rows: np.asarray(copy.origin_file[rows], np.int64) << 40 | copy.origin_line[rows],
            texts=categories_of(copy, "state", copy.state_ids),
            of_ids=frozenset(column for column, name in enumerate(copy.state_ids) if name in copy.feature_of_column),
        )

    def context(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a code [n] that is equal for rows [n] with equal states."""
        parts = np.array_split(rows, -(-len(rows) * max(len(self.ids), 1) // _VALUES_AT_ONCE) or 1)
        hashes = np.concatenate([
            hashes_of(self.ids, self.states[part], np.ones(len(part), np.int64)).view(np.int64) for part in parts
        ])  # fmt: skip
        release(self.states)
        give_back_memory()
        return hashes

    def describe(self, rows: NDArray[np.int64], inside: NDArray[np.bool_]) -> str:
        """Returns which values of features the rows of a segment have and others lack; empty if few features do not.

        Conditions are added one by one, each the one with the largest 2 |A and B| / (|A| + |B|), where A are the
        rows that fulfil all conditions and B the rows of the segment; van Rijsbergen (1979), the F measure.

        Args:
            rows: [n] numbers of rows.
            inside: [n] which of them are in the segment; none are on a machine without such rows.
        """
        if not inside.any():
            return ""
        if len(rows) > _MOST_ROWS:
            others = np.flatnonzero(~inside)
            stride = -(-len(rows) // _MOST_ROWS)
            kept = np.sort(np.concatenate((np.flatnonzero(inside), others[::stride])))
            weight = np.where(inside[kept], 1.0, float(stride))
            rows = rows[kept]
            inside = inside[kept]
        else:
            weight = np.ones(len(rows))
        total = float(weight[inside].sum())
        within = np.ones(len(rows), np.bool_)
        best = 0.0
        conditions: list[str] = []
        for _ in range(_MOST_CONDITIONS):
            candidates = [
                self._best_condition(column, rows, inside, weight, within, total)
                for column in range(len(self.names))
                if column not in self.of_ids
            ]
            score, words, fulfilled = max(candidates, key=lambda candidate: candidate[0], default=(0.0, "", within))
            if score < best + _LEAST_GAIN:
                break
            best = score
            conditions.append(words)
            within = within & fulfilled
        if best < _LEAST_SCORE:
            return ""
        return f"{'those' if best >= _EXACT_SCORE else 'most of them'} with {' and '.join(conditions)}"

    def _best_condition(
        self,
        column: int,
        rows: NDArray[np.int64],
        inside: NDArray[np.bool_],
        weight: NDArray[np.float64],
        within: NDArray[np.bool_],
        total: float,
    ) -> tuple[float, str, NDArray[np.bool_]]:
        """Returns the best condition on a feature among rows `within`: score, words, and which rows fulfil it."""
        values = np.asarray(self.values[rows, column])
        present = np.unique(values[within])  # NaN last
        name = self.names[column]
        ordered = column not in self.texts and len(present) > _FEW_VALUES
        code = np.searchsorted(present, values).clip(max=max(len(present) - 1, 0))
        counted_all = np.bincount(code, weight * within, len(present))
        counted_inside = np.bincount(code, weight * (within & inside), len(present))
        # categories by their share of the segment: some first ones of this order are the best set of them
        order = np.arange(len(present)) if ordered else np.argsort(-counted_inside / counted_all.clip(min=1e-9))
        if ordered and np.isnan(present[-1]):
            order = order[:-1]
        up_to = np.cumsum(counted_inside[order]), np.cumsum(counted_all[order])
        scores = 2 * up_to[0] / (total + up_to[1])
        sets = [(scores, order, 1)]
        if ordered:
            beyond = [part[-1] - part for part in up_to]
            sets.append((2 * beyond[0] / (total + beyond[1]), order, -1))
        side_scores, _, side = max(sets, key=lambda entry: float(entry[0].max()))
        last = int(side_scores.argmax())
        chosen = order[: last + 1] if side > 0 else order[last + 1 :]
        fulfilled = np.isin(code, chosen)
        if not ordered:
            return float(side_scores[last]), self._in_words(column, present[chosen]), fulfilled
        words = f"{name} at most {present[order[last]]:.4g}" if side > 0 else f"{name} above {present[order[last]]:.4g}"
        return float(side_scores[last]), words, fulfilled

    def _in_words(self, column: int, values: NDArray[np.float32]) -> str:
        texts = self.texts.get(column, {})
        names = sorted(
            "absent" if np.isnan(value) else texts.get(float(value), number(float(value))) for value in values
        )
        more = len(names) - _NAMED_VALUES
        listed = ", ".join(names[:_NAMED_VALUES])
        rest = f" or {pluralize(more, 'other value')}" if more > 0 else ""
        return f"{self.names[column]} {listed}{rest}"
