"""Small decision trees over raw features, whose leaves are described in words.

features, targets ─► grow_tree: LightGBM finds each split ─► SmallTree: conditions of each leaf ─► leaf of any row

LightGBM has no trees with several targets. A leaf is therefore split by a tree with two leaves, grown on the first
principal component of the leaf's targets; the leaf whose split lowers the squared errors of all targets most is split
next. With a single target this is LightGBM's own leaf-wise growth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.errors import pluralize
from reagent_lite.evaluation.interval import number
from reagent_lite.evaluation.segment import StateFeatures

_NAMED_LEVELS = 5
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
            features: names of features and texts of categories.
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
        features: names of the F features and texts of categories; its values are not used.
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
"""What a split explains, and its two leaves."""


class _Splitter:
    """Splits leaves by LightGBM.

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
        import lightgbm  # an extra: a log was read with it

        self._values = values
        self._targets = targets
        self._fewest = fewest
        self._least_gain = least_gain
        categories = sorted(features.texts)
        # LightGBM knows categories as small integers; an absent one is a category of its own
        self._levels = {column: np.unique(values[:, column]) for column in categories}
        inputs = np.array(values, np.float64)
        for column, levels in self._levels.items():
            inputs[:, column] = np.searchsorted(levels, values[:, column])
        self._parameters = {
            "objective": "regression",
            "num_leaves": 2,
            "min_data_in_leaf": fewest,
            "min_data_in_bin": 1,
            "min_sum_hessian_in_leaf": 0.0,
            "min_data_per_group": min(fewest, 20),
            "cat_smooth": max(10.0, fewest / 5),  # rows of a level that is not left to the others
            "cat_l2": 0.0,
            "max_cat_threshold": 256,
            "learning_rate": 1.0,
            "deterministic": True,
            "force_row_wise": True,
            "feature_pre_filter": False,
            "num_threads": torch.get_num_threads(),
            "verbosity": -1,
        }
        self._data = lightgbm.Dataset(
            inputs, targets[:, 0], params=self._parameters, categorical_feature=categories, free_raw_data=False
        ).construct()

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
        import lightgbm

        if len(leaf.rows) < 2 * self._fewest:
            return None
        targets = self._targets[leaf.rows]
        component = _first_component(targets - targets.mean(0))
        scale = float(np.abs(component).max())
        if not scale > 0:
            return None
        data = self._data.subset(leaf.rows.tolist()).construct()
        data.set_label(component / scale)
        node = lightgbm.train(self._parameters, data, 1).dump_model()["tree_info"][0]["tree_structure"]
        if "split_feature" not in node:
            return None
        condition = self._condition(node, leaf)
        inside = condition.holds(self._values[leaf.rows, condition.column])
        count = int(inside.sum())
        if not 0 < count < len(inside):
            return None
        difference = targets[inside].mean(0) - targets[~inside].mean(0)
        gain = count * (len(inside) - count) / len(inside) * float(np.square(difference).sum())
        if gain <= self._least_gain:
            return None
        return gain, (leaf.within(condition, inside), leaf.within(_opposite(condition), ~inside))

    def _condition(self, node: dict[str, Any], leaf: _Leaf) -> Condition:
        """Returns the condition of the rows that go to the left."""
        column = int(node["split_feature"])
        if node["decision_type"] == "<=":
            absent = bool(node["default_left"])
            threshold = float(node["threshold"])
            values = self._values[leaf.rows, column].astype(np.float64)
            if not (values <= threshold).any() or not (values > threshold).any():
                return Condition(column=column, absent=False)  # numbers on one side, absent values on the other
            return Condition(column=column, high=_shortest_between(values, threshold), absent=absent)
        levels = self._levels[column][[int(code) for code in str(node["threshold"]).split("||")]]
        seen = np.unique(self._values[leaf.rows, column])
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


def _shortest_between(values: NDArray[np.float64], threshold: float) -> float:
    """Returns the number with the fewest digits that divides values as a threshold does; the values are float32."""
    low = float(values[values <= threshold].max())
    high = float(values[values > threshold].min())
    for digits in range(1, 17):
        for candidate in (float(f"{low:.{digits}g}"), float(f"{(low + high) / 2:.{digits}g}")):
            if low <= np.float32(candidate) < high:
                return candidate
    return low


def _write_limit(limit: float) -> str:
    return f"{limit:,.0f}" if limit == round(limit) and abs(limit) < 1e15 else f"{limit:.7g}"
