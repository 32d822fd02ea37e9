"""Features whose values are ids: one id, a list of ids, or ids with scores; the same in logs, bundles and the server.

    "u17", 17                     one id; integers count by their digits
    ["a", "b"]                    a list of ids
    {"a": 0.5, "b": 1.0}          ids with scores; also [{"key": "a", "value": 0.5}, ...]

A value becomes columns of numbers: for each id its code (categories.py), then for each id its score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reagent_lite.categories import MOST_CHARACTERS, code_of
from reagent_lite.feature_ids import id_of, list_columns
from reagent_lite.feature_values import LARGEST
from reagent_lite.item_table import id_text

ID_COLUMNS = ("state_id_list_features", "state_id_score_list_features")
"""Columns of ReAgent's timelines, {id of a feature: ids} and {id of a feature: {id: score}}. The feature 35 of such a
column is called state_id_list_features.35; those of next states begin with next_."""
_IDS = "ids"
"""Key of the features of ids among the settings that a folder's content depends on."""


@dataclass(frozen=True, slots=True)
class IdFeature:
    """A feature whose values are ids.

    Attributes:
        feature: its id.
        length: most ids of a value.
        scores: whether each id has a score.
    """

    feature: int
    length: int
    scores: bool

    @property
    def column(self) -> str:
        """Column of the log that has the feature, one of ID_COLUMNS; "" if it is in state_features."""
        prefix = str(self.feature).partition(".")[0]
        return prefix if prefix in ID_COLUMNS else ""

    @property
    def columns(self) -> tuple[int, ...]:
        """Ids of its columns: of codes, then of scores."""
        return list_columns(self.feature, self.length, scores=self.scores)

    @property
    def expected(self) -> str:
        """The expected values in words."""
        if self.scores:
            return "ids with finite scores, {id: score}"
        return "an id, a string or an integer" if self.length == 1 else "a list of ids, strings or integers"

    def read(self, value: Any) -> tuple[list[str], list[float]]:
        """Returns the ids and scores of a value as JSON or Python have it; both empty for None and NaN.

        Raises:
            ValueError: it is no such value; the message is `expected`.
        """
        if value is None or type(value).__name__ in ("NAType", "NaTType"):
            return [], []
        if self.scores:
            return self._read_scores(value)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(values, list | tuple):
            if isinstance(value, float) and value != value:
                return [], []
            values = [value]
        return [self._id(element) for element in values], []

    def _read_scores(self, value: Any) -> tuple[list[str], list[float]]:
        if isinstance(value, Mapping):
            pairs = [(name, score) for name, score in value.items() if score is not None]
        elif isinstance(value, list | tuple | np.ndarray):
            pairs = []
            for pair in value:
                if isinstance(pair, Mapping) and pair.keys() == {"key", "value"}:
                    pair = (pair["key"], pair["value"])
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise ValueError(self.expected)
                pairs.append((pair[0], pair[1]))
        else:
            raise ValueError(self.expected)
        scores = [score for _, score in pairs]
        if not all(_is_finite(score) for score in scores):
            raise ValueError(self.expected)
        return [self._id(name) for name, _ in pairs], [float(score) for score in scores]

    def _id(self, value: Any) -> str:
        if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < 2**53:
            value = int(value)
        text = id_text(value)
        if text is None:
            raise ValueError(self.expected)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"ids of at most {MOST_CHARACTERS} characters")
        return text

    def canonical(self, value: Any) -> Any:
        """Returns a value in the form in which a log has it, None if it has no id; see `read`.

        Raises:
            ValueError: see `read`.
        """
        ids, scores = self.read(value)
        if not ids:
            return None
        if self.scores:
            return [{"key": name, "value": score} for name, score in zip(ids, scores, strict=True)]
        return ids[0] if self.length == 1 else ids

    def numbers(self, value: Any) -> list[float]:
        """Returns a value's numbers in the order of `columns`, NaN where it has fewer ids; see `read`."""
        ids, scores = self.read(value)
        missing = [np.nan] * (self.length - min(len(ids), self.length))
        codes = [code_of(name) for name in ids[: self.length]] + missing
        return codes + (scores[: self.length] + missing if self.scores else [])


def _is_finite(score: Any) -> bool:
    if not isinstance(score, int | float | np.number) or isinstance(score, bool | np.complexfloating):
        return False
    return abs(float(score)) <= LARGEST


def ids_setting(id_features: tuple[IdFeature, ...]) -> dict[str, Any]:
    """Returns the setting that stands for the features of ids; {} without any."""
    return {_IDS: {str(of.feature): [of.length, of.scores] for of in id_features}} if id_features else {}


def ids_of_setting(settings: Mapping[str, Any]) -> tuple[IdFeature, ...]:
    """Returns the features of ids of settings that have the result of `ids_setting`."""
    ids = settings.get(_IDS, {})
    return tuple(IdFeature(id_of(feature), length, scores) for feature, (length, scores) in ids.items())
