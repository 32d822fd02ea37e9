"""Raw features of states or candidates: maps, arrays and frames become float32 matrices; numpy only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.categories import code_of, is_other
from reagent_lite.errors import BundleError, Problem, join_names, raise_any
from reagent_lite.feature_ids import id_of
from reagent_lite.feature_values import value_of
from reagent_lite.id_values import IdFeature
from reagent_lite.raw_values import RawColumn, read_map

FeatureMap = Mapping[str, Any] | Mapping[int, Any]
"""{feature id: a number, a string or None; for features of ids see id_values.py}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSet:
    """The features of a matrix [N, F].

    Attributes:
        ids: [F] ids by column.
        columns: {feature id as text: column}.
        levels: {feature id as text: levels} of the features whose values are texts.
        possible: {column: possible values} of the one-hot features, and of listed ids.
        id_features: {feature id as text: the feature} of the features of ids, each of which has a column for every id.
        raw: columns of the training log whose values are read from their text, such as dates.
        first_columns: {name of a feature, as maps have it: its column}; of a list of ids, the column of the first.
    """

    ids: tuple[int, ...]
    columns: dict[str, int]
    levels: dict[str, tuple[str, ...]]
    possible: dict[int, NDArray[np.float32]]
    id_features: dict[str, IdFeature]
    raw: tuple[RawColumn, ...]
    first_columns: dict[str, int]

    @classmethod
    def of(cls, ids: tuple[int, ...], normalization: Mapping[str, Any], raw: tuple[RawColumn, ...]) -> "FeatureSet":
        """Returns the features of some ids, with their parameters from normalization.json."""
        columns = {str(feature): column for column, feature in enumerate(ids)}
        levels = {}
        possible = {}
        for name, column in columns.items():
            text = normalization.get(name, "{}")
            parameters = json.loads(text) if isinstance(text, str) else text
            if parameters.get("feature_type") == "ENUM":
                possible[column] = np.array(parameters.get("possible_values") or (), np.float32)
                if parameters.get("levels"):
                    levels[name] = tuple(parameters["levels"])
        id_features = features_of_ids(normalization)
        for name, feature in id_features.items():
            text = normalization[name]
            parameters = json.loads(text) if isinstance(text, str) else text
            if listed := parameters.get("possible_values"):
                codes = np.array(listed, np.float32)
                possible |= {columns[str(column)]: codes for column in feature.columns[: feature.length]}
        of_ids = {str(column): name for name, feature in id_features.items() for column in feature.columns}
        first = {name: columns[str(feature.columns[0])] for name, feature in id_features.items()}
        names = dict.fromkeys(of_ids.get(column, column) for column in columns)
        return cls(
            ids=ids,
            columns=columns,
            levels=levels,
            possible=possible,
            id_features=id_features,
            raw=raw,
            first_columns={name: first[name] if name in first else columns[name] for name in names},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features, as maps have them."""
        return tuple(self.first_columns)

    def others(self, values: NDArray[np.float32]) -> dict[int, int]:
        """Returns {feature id: number of rows with a value that has no column}, of features with such rows."""
        counts = dict.fromkeys((self._feature_of(column) for column in self.possible), 0)
        for column, possible in self.possible.items():
            counts[self._feature_of(column)] += int(is_other(values[:, column], possible).sum())
        return {feature: count for feature, count in counts.items() if count}

    def _feature_of(self, column: int) -> int:
        """Returns the id of the feature that a column belongs to."""
        feature = self.ids[column]
        return next((of.feature for of in self.id_features.values() if feature in of.columns), feature)

    def of_maps(self, where: str, maps: Sequence[FeatureMap], *, ignore_unknown: bool = False) -> NDArray[np.float32]:
        """Returns the features [N, F] in N sparse maps {feature id: value}; NaN where a feature is absent or missing.

        Values are those of `feature_values.value_of`; a map may have raw columns. With `ignore_unknown` other keys than
        the features' are skipped.

        Raises:
            BundleError: an unknown feature id, a value of a category that is not a text, or another value that is not a
                finite number; up to 20 at once.
        """
        if isinstance(maps, Mapping):
            raise BundleError(Problem(where, "a list of maps {feature id: number}", "one map"))
        values = np.full((len(maps), len(self.ids)), np.nan)
        problems: list[Problem] = []
        for row, sparse in enumerate(maps):
            if not isinstance(sparse, Mapping):
                problems.append(Problem(f"{where}[{row}]", "a map {feature id: number}", repr(sparse)))
                continue
            features, wrong = read_map(self.raw, sparse, f"{where}[{row}]")
            problems += wrong
            for key, value in features.items():
                if ignore_unknown and str(key) not in self.first_columns:
                    continue
                name = str(key)
                try:
                    column = self.first_columns[name]
                    if feature := self.id_features.get(name):
                        values[row, [self.columns[str(part)] for part in feature.columns]] = feature.numbers(value)
                    else:
                        values[row, column] = self._number(name, value)
                except (KeyError, ValueError) as error:
                    problems.append(self._problem(f"{where}[{row}]", key, value, error))
        raise_any(problems, BundleError)
        return values.astype(np.float32)

    def _number(self, name: str, value: Any) -> float:
        """Returns the number that stands for a value of a map.

        Raises:
            ValueError: the feature has no such value; the message says what was expected.
        """
        converted = value_of(value)
        if converted is None:
            return np.nan
        if isinstance(converted, str):
            if name not in self.levels:
                raise ValueError("a number or null")
            return code_of(converted)
        if name in self.levels:
            raise ValueError("a string or null, as it is a category")
        return converted

    def _problem(self, where: str, key: object, value: Any, error: Exception) -> Problem:
        if isinstance(error, KeyError):
            advice = "A model cannot use a feature it was not trained on: leave it out, or train with it"
            return Problem(where, f"feature ids among {join_names(self.names)}", repr(key), advice)
        return Problem(f"{where}, feature {key}", str(error), f"{value!r:.60}")

    def of_arrays(self, where: str, given: Any) -> NDArray[np.float32]:
        """Returns the features [N, F] in an array, or in the columns of a frame by name; NaN where missing.

        Raises:
            BundleError: a wrong shape or type, or a frame without one of the columns.
        """
        names = getattr(given, "column_names", getattr(given, "columns", None))  # Arrow, or pandas and polars
        if names is not None and self.columns:
            by_text = {str(name): given[name] for name in names}
            by_text |= self._of_raw(where, by_text) | self._of_ids(where, by_text)
            if lacking := [name for name in self.columns if name not in by_text]:
                expected = f"the columns {join_names(self.columns)}"
                advice = "Add a column of NaN for a feature that no row has"
                raise BundleError(Problem(where, expected, f"no {join_names(lacking)}", advice))
            columns = [
                (_codes if name in self.levels else _numbers)(f"{where}, column {name}", by_text[name])
                for name in self.columns
            ]
            given = np.stack(columns, axis=1)
        expected = "real numbers, NaN where missing"
        if self.levels:
            expected += f", with {join_names(self.levels)} as codes: `states`, `candidates` and frames take the strings"
        array = checked_array(where, given, (None, len(self.ids)), "fiu", expected)
        with np.errstate(over="ignore"):
            return array.astype(np.float32)

    def _of_raw(self, where: str, columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Returns {feature: values [N]} of the raw columns among a frame's columns.

        Raises:
            BundleError: values are not of their column's kind.
        """
        features: dict[str, NDArray[Any]] = {}
        problems: list[Problem] = []
        for raw in self.raw:
            if raw.column in columns:
                values = columns[raw.column]
                values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
                rows = [read_map([raw], {raw.column: value}, f"{where}[{row}]") for row, value in enumerate(values)]
                problems += [problem for _, wrong in rows for problem in wrong]
                features |= {name: np.array([row.get(name) for row, _ in rows], object) for name in raw.features}
        raise_any(problems, BundleError)
        return features

    def _of_ids(self, where: str, columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Returns {column: numbers [N]} of the features of ids among a frame's columns.

        Raises:
            BundleError: values are no ids.
        """
        numbers: dict[str, NDArray[Any]] = {}
        for name in self.id_features.keys() & columns.keys():
            values = columns[name]
            values = values.to_pylist() if hasattr(values, "to_pylist") else list(values)
            feature = self.id_features[name]
            rows = []
            for row, value in enumerate(values):
                try:
                    rows.append(feature.numbers(value))
                except ValueError as error:
                    problem = Problem(f"{where}[{row}], feature {name}", str(error), f"{value!r:.60}")
                    raise BundleError(problem) from None
            table = np.array(rows).reshape(len(rows), len(feature.columns))
            numbers |= {str(column): table[:, index] for index, column in enumerate(feature.columns)}
        return numbers


def stack_steps(rows: Sequence[NDArray[np.float32]], width: int, history: int) -> NDArray[np.float32]:
    """Returns states [N, history * (1 + F)] of the last steps, as `feature_ids.stack_columns` names their columns.

    Args:
        rows: for each row the features [k, F] of its steps, the oldest first; of more than `history`, the last count.
        width: F.
        history: number of steps of a state.
    """
    stacked = np.full((len(rows), history, 1 + width), np.nan, np.float32)
    stacked[:, :, 0] = 0.0
    for row, steps in zip(stacked, rows, strict=True):
        kept = steps[-history:]
        row[history - len(kept) :, 0] = 1.0
        row[history - len(kept) :, 1:] = kept
    return stacked.reshape(len(rows), history * (1 + width))


def features_of_ids(normalization: Mapping[str, Any]) -> dict[str, IdFeature]:
    """Returns {feature id as text: the feature} of the features of ids in a part of normalization.json."""
    features = {}
    for name, text in normalization.items():
        parameters = json.loads(text) if isinstance(text, str) else text
        if table := parameters.get("embedding"):
            features[name] = IdFeature(id_of(name), table["length"], table["scores"])
    return features


def _array(given: Any) -> NDArray[Any]:
    """Returns a frame's column as an array, with None in place of pandas' NA, which has no truth value."""
    values = np.asarray(given)
    if values.dtype == np.object_ and hasattr(given, "isna"):
        values = values.copy()
        values[given.isna()] = None
    return values


def _numbers(where: str, given: Any) -> NDArray[np.float64]:
    """Returns the numbers of a frame's column, NaN where missing."""
    values = _array(given)
    if values.dtype == np.object_:  # a column with None, or of decimals
        values = np.array([_float(value) for value in values.flat])
    return checked_array(where, values, (None,), "bfiu", "real numbers, NaN or None where missing").astype(np.float64)


def _float(value: Any) -> Any:
    if value is None:
        return np.nan
    return float(value) if isinstance(value, Decimal) else value


def _codes(where: str, given: Any) -> NDArray[np.float64]:
    """Returns the codes of a frame's column of strings, NaN where missing."""
    values = _array(given).tolist()
    wrong = [value for value in values if not isinstance(value, str) and value is not None and value == value]
    if wrong:
        raise BundleError(Problem(where, "strings, NaN or None where missing", repr(wrong[0])))
    return np.array([code_of(value) if isinstance(value, str) else np.nan for value in values])


def checked_array(where: str, given: Any, shape: tuple[int | None, ...], kinds: str, expected: str) -> NDArray[Any]:
    """Returns an argument as an array.

    Args:
        where: name of the argument, for the message.
        given: an array, or nested lists.
        shape: expected sizes; None accepts any size.
        kinds: accepted kinds of dtypes, as numpy's letters.
        expected: the accepted kinds in words, for the message.

    Raises:
        BundleError: another shape or type.
    """
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise BundleError(Problem(where, "rows of equal length", str(error))) from error
    if array.dtype.kind not in kinds:
        raise BundleError(Problem(where, expected, f"an array of {array.dtype}"))
    if array.ndim != len(shape) or any(size not in (None, n) for size, n in zip(shape, array.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BundleError(Problem(where, f"shape [{sizes}]", f"{list(array.shape)}"))
    return array
