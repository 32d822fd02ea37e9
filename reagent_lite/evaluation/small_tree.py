"""Small decision trees over raw features, whose leaves are described in words.

features, targets ─► grow_tree: the best split of each leaf ─► SmallTree: conditions of each leaf ─► leaf of any row

A leaf is split at the limit, or set of levels, that explains most of the first principal component of its targets; the
leaf whose split lowers the squared errors of all targets most is split next. The trees have few rows and leaves: to
import LightGBM took as long as an evaluation of 100 000 rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import pluralize
from reagent_lite.evaluation.interval import number
from reagent_lite.evaluation.segment import StateFeatures

_NAMED_LEVELS = 5
_FEWEST_OF_LEVEL = 10  # rows
_POWER_STEPS = 20  # of the power method; a direction between two that explain nearly the same is as good
_ROUNDING = 1e-12  # of the squared errors of all rows: a smaller gain is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on one feature.

    Attributes:
        column: the feature's column.
        low, high: limits of a number, low < number <= high.
        levels: codes of a category; None for a number.
        other: whether the category is none of `levels`, instead of one of them.
        absent: whether an absent value fulfils the condition.
    """

    column: int
    low: float = -math.inf
    high: float = math.inf
    levels: frozenset[float] | None = None
    other: bool = False
    absent: bool = True

    def holds(self, values: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns whether each value [n] of the feature fulfils the condition; NaN is an absent value."""
        if self.levels is None:
            inside = (values > self.low) & (values <= self.high)
        else:
            inside = np.isin(values, np.array(sorted(self.levels), np.float32)) != self.other
        return np.where(np.isnan(values), self.absent, inside)

    def meet(self, other: "Condition") -> "Condition":
        """Returns the condition that values fulfil which fulfil both conditions on the same feature."""
        absent = self.absent and other.absent
        if self.levels is None or other.levels is None:
            return replace(self, low=max(self.low, other.low), high=min(self.high, other.high), absent=absent)
        if self.other and other.other:
            return replace(self, levels=self.levels | other.levels, absent=absent)
        if not self.other and not other.other:
            return replace(self, levels=self.levels & other.levels, absent=absent)
        inside, outside = (other, self) if self.other else (self, other)
        assert inside.levels is not None
        assert outside.levels is not None
        return replace(inside, levels=inside.levels - outside.levels, absent=absent)

    def words(self, features: StateFeatures, *, has_absent: bool) -> str:
        """Returns the condition in words.

        Args:
            features: names of features and strings of categories.
            has_absent: whether the feature is absent in some rows.
        """
        name = features.names[self.column]
        absent = " or absent" if has_absent and self.absent else ""
        if self.levels is not None:
            return f"{name} {self._words_of_levels(features.texts.get(self.column, {}), absent)}"
        if self.low >= self.high:
            return f"{name} absent"
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{name} present"
        limits = [f"above {_write_limit(self.low)}"] if math.isfinite(self.low) else []
        limits += [f"at most {_write_limit(self.high)}"] if math.isfinite(self.high) else []
        return f"{name} {' and '.join(limits)}{absent}"

    def _words_of_levels(self, texts: dict[float, str], absent: str) -> str:
        assert self.levels is not None
        names = sorted(texts.get(code, number(code)) for code in self.levels)
        more = len(names) - _NAMED_LEVELS
        rest = [pluralize(more, "other value")] if more > 0 else []
        *first, last = [*names[:_NAMED_LEVELS], *rest] or ["absent"]
        listed = f"{', '.join(first)} or {last}" if first else last
        return f"other than {listed}{absent}" if self.other else f"{listed}{absent if names else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTree:
    """A tree as the conditions of its leaves, each row being in exactly one leaf.

    Attributes:
        leaves: conditions of each leaf, at most one on a feature; the only leaf of a tree without splits has none.
        words: conditions of each leaf in words, "all rows" for that leaf.
    """

    leaves: tuple[tuple[Condition, ...], ...]
    words: tuple[str, ...]

    def leaf_of(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns the number of the leaf of each row, [n], given raw features [n, F]; NaN is an absent value."""
        return self.leaf_by_columns(lambda column: values[:, column], len(values))

    def leaf_by_columns(self, read: Callable[[int], NDArray[np.float32]], count: int) -> NDArray[np.int64]:
        """Returns the same for `count` rows, of which `read` returns the values [count] of a feature's column."""
        leaf = np.zeros(count, np.int64)
        for index, conditions in enumerate(self.leaves):
            inside = np.ones(count, np.bool_)
            for condition in conditions:
                inside &= condition.holds(read(condition.column))
            leaf[inside] = index
        return leaf


WITHOUT_SPLITS: Final = SmallTree(leaves=((),), words=("all rows",))


def grow_tree(
    features: StateFeatures,
    values: NDArray[np.float32],
    targets: NDArray[np.float64],
    *,
    leaves: int,
    fewest: int,
    least_gain: float = 0.0,
) -> SmallTree:
    """Returns a tree whose leaves have similar targets.

    Args:
        features: names of the F features and strings of categories; its values are not used.
        values: [n, F] raw features; NaN is an absent value.
        targets: [n, K] numbers that the tree predicts.
        leaves: largest number of leaves.
        fewest: least number of rows in a leaf.
        least_gain: share of all squared deviations of the targets that a split has to explain.
    """
    absent = np.asarray(np.isnan(values).any(0))
    total = float(np.square(targets - targets.mean(0)).sum()) if len(targets) else 0.0
    root = _Leaf(rows=np.arange(len(values)), conditions=())
    grown = [root]
    if values.shape[1] and len(values) >= 2 * fewest and total > 0:
        splitter = _Splitter(features, values, targets, fewest, max(least_gain, _ROUNDING) * total)
        grown = splitter.grow(root, leaves)
    return SmallTree(
        leaves=tuple(leaf.conditions for leaf in grown),
        words=tuple(
            "; ".join(
                condition.words(features, has_absent=bool(absent[condition.column])) for condition in leaf.conditions
            )
            or "all rows"
            for leaf in grown
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A leaf: its rows and its conditions."""

    rows: NDArray[np.int64]
    conditions: tuple[Condition, ...]

    def within(self, condition: Condition, inside: NDArray[np.bool_]) -> "_Leaf":
        """Returns the part of the leaf whose rows fulfil a condition."""
        earlier = {other.column: other for other in self.conditions}
        column = condition.column
        met = earlier[column].meet(condition) if column in earlier else condition
        return _Leaf(rows=self.rows[inside], conditions=tuple((earlier | {column: met}).values()))


_Split = tuple[float, tuple[_Leaf, _Leaf]]
"""The gain of a split, and its two leaves."""
_Half = tuple[float, Condition]
"""The gain of one target by a condition, and the condition."""


class _Splitter:
    """Finds the best split of leaves by trying every limit of numbers, and sets of levels in the order of their means.

    That is the best set of levels for one target; Fisher (1958), On grouping for maximum homogeneity. Rare levels, of
    which the order is chance, are left to the others.

    Args:
        features, values, targets, fewest: arguments of `grow_tree`.
        least_gain: sum of squared deviations that a split has to explain.
    """

    def __init__(
        self,
        features: StateFeatures,
        values: NDArray[np.float32],
        targets: NDArray[np.float64],
        fewest: int,
        least_gain: float,
    ) -> None:
        self._values = values
        self._targets = targets
        self._fewest = fewest
        self._least_gain = least_gain
        self._fewest_of_level = max(_FEWEST_OF_LEVEL, fewest / 5)
        self._of_ids = features.of_ids
        self._levels = {column: np.unique(values[:, column], return_inverse=True) for column in features.texts}
        self._order = [
            None if column in self._levels else np.argsort(values[:, column], kind="stable").astype(np.int32)
            for column in range(values.shape[1])
        ]
        """Rows of each number by ascending value, absent ones last."""

    def grow(self, root: _Leaf, most: int) -> list[_Leaf]:
        """Returns at most `most` leaves, in the order of the tree."""
        leaves: list[tuple[_Leaf, _Split | None]] = [(root, self._split(root))]
        while len(leaves) < most:
            gains = [-math.inf if split is None else split[0] for _, split in leaves]
            best = int(np.argmax(gains))
            _, split = leaves[best]
            if split is None:
                break
            leaves[best : best + 1] = [(leaf, self._split(leaf)) for leaf in split[1]]
        return [leaf for leaf, _ in leaves]

    def _split(self, leaf: _Leaf) -> _Split | None:
        """Returns the best split of a leaf; None if there is none that explains enough."""
        if len(leaf.rows) < 2 * self._fewest:
            return None
        targets = self._targets[leaf.rows]
        component = np.zeros(len(self._values))
        component[leaf.rows] = _first_component(targets - targets.mean(0))
        if not component.any():
            return None
        within = np.zeros(len(self._values), np.bool_)
        within[leaf.rows] = True
        halves = [
            self._half_of_levels(column, leaf.rows, component)
            if order is None
            else self._half_of_numbers(column, order[within[order]], component)
            for column, order in enumerate(self._order)
            if column not in self._of_ids
        ]
        explained, condition = max((half for half in halves if half is not None), key=_explain, default=(0.0, None))
        if condition is None or not explained > 0:
            return None
        inside = condition.holds(self._values[leaf.rows, condition.column])
        count = int(inside.sum())
        difference = targets[inside].mean(0) - targets[~inside].mean(0)
        gain = count * (len(inside) - count) / len(inside) * float(np.square(difference).sum())
        if gain <= self._least_gain:
            return None
        return gain, (leaf.within(condition, inside), leaf.within(_opposite(condition), ~inside))

    def _half_of_numbers(self, column: int, rows: NDArray[np.int32], component: NDArray[np.float64]) -> _Half | None:
        """Returns the best limit, with absent values on either side; `rows` ascend by value, absent ones are last."""
        values = self._values[rows, column].astype(np.float64)
        sums = component[rows].cumsum()
        present = len(rows) - int(np.isnan(values).sum())
        if not present:
            return None
        last = np.flatnonzero(values[1:present] > values[: present - 1])  # of the rows below a limit
        last = last[(last + 1 >= self._fewest) & (present - last - 1 >= self._fewest)]
        counts = last + 1
        absent = len(rows) - present
        absent_sum = sums[-1] - sums[present - 1]
        halves = []
        if absent:
            explained = self._explain(np.array([present]), sums[[present - 1]], len(rows))
            halves.append((float(explained[0]), Condition(column=column, absent=False)))
        for with_absent in (False, True)[: 1 + (absent > 0)]:
            explained = self._explain(counts + absent * with_absent, sums[last] + absent_sum * with_absent, len(rows))
            if not len(explained):
                continue
            best = int(explained.argmax())
            limit = _shortest_between(values[last[best]], values[last[best] + 1])
            # values that are absent in other rows go with the larger part
            joins = with_absent if absent else bool(2 * counts[best] >= len(rows))
            halves.append((float(explained[best]), Condition(column=column, high=limit, absent=joins)))
        return max(halves, key=_explain, default=None)

    def _half_of_levels(self, column: int, rows: NDArray[np.int64], component: NDArray[np.float64]) -> _Half | None:
        """Returns the best set of levels."""
        levels, codes = self._levels[column]
        counts = np.bincount(codes[rows], minlength=len(levels))
        sums = np.bincount(codes[rows], component[rows], len(levels))
        frequent = np.flatnonzero(counts >= self._fewest_of_level)
        ascending = frequent[np.argsort(sums[frequent] / (counts[frequent] + self._fewest_of_level), kind="stable")]
        halves = []
        for order in (ascending, ascending[::-1]):
            explained = self._explain(counts[order].cumsum(), sums[order].cumsum(), len(rows))
            if len(explained):
                best = int(explained.argmax())
                chosen = levels[order[: best + 1]]
                halves.append((float(explained[best]), _among(column, chosen, levels[counts > 0])))
        return max(halves, key=_explain, default=None)

    def _explain(self, counts: NDArray[np.int64], sums: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Returns the squared deviations that parts with these counts and sums explain; 0 for those that are too small.

        The sum of all rows is 0.
        """
        others = rows - counts
        enough = (counts >= self._fewest) & (others >= self._fewest)
        return np.where(enough, np.square(sums) * rows / np.where(enough, counts * others, 1), 0.0)


def _explain(half: _Half) -> float:
    return half[0]


def _among(column: int, levels: NDArray[np.float32], seen: NDArray[np.float32]) -> Condition:
    """Returns the condition that a category has one of some levels, of those that were seen, in the shorter way."""
    absent = bool(np.isnan(levels).any())
    codes = frozenset(levels[~np.isnan(levels)].tolist())
    rest = frozenset(seen[~np.isnan(seen)].tolist()) - codes
    if len(rest) < len(codes):  # the shorter list is easier to read
        return Condition(column=column, levels=rest, other=True, absent=absent)
    return Condition(column=column, levels=codes, absent=absent)


def _opposite(condition: Condition) -> Condition:
    """Returns the condition of the values that do not fulfil a condition without a lower limit."""
    if condition.levels is not None:
        return replace(condition, other=not condition.other, absent=not condition.absent)
    return replace(condition, low=condition.high, high=math.inf, absent=not condition.absent)


def _first_component(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the coordinates [n] of deviations [n, K] on their first principal component."""
    if deviations.shape[1] == 1:
        return deviations[:, 0]
    covariance = deviations.T @ deviations
    direction = covariance[int(np.diagonal(covariance).argmax())]
    for _ in range(_POWER_STEPS):
        length = float(np.linalg.norm(direction))
        if not length > 0:
            break
        direction = covariance @ (direction / length)
    return np.asarray(deviations @ (direction / max(float(np.linalg.norm(direction)), np.finfo(np.float64).tiny)))


def _shortest_between(low: float, high: float) -> float:
    """Returns the number with the fewest digits that lies between two float32, or is the lower one."""
    for digits in range(1, 17):
        for candidate in (float(f"{low:.{digits}g}"), float(f"{(low + high) / 2:.{digits}g}")):
            if low <= np.float32(candidate) < high:
                return candidate
    return float(low)


def _write_limit(limit: float) -> str:
    return f"{limit:,.0f}" if limit == round(limit) and abs(limit) < 1e15 else f"{limit:.7g}"
