"""Compares a training copy with a normalization: which features are strings, and how many one-hot values are other."""

from __future__ import annotations

import numpy as np

from reagent_lite.categories import is_other
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.levels import ONE_KIND, WORDS
from reagent_lite.errors import DataError, Problem
from reagent_lite.types import NormalizationSpec

_VALUES_AT_ONCE = 1 << 22


def require_texts(copy: TrainingCopy, side: str, spec: NormalizationSpec, where: str) -> None:
    """Checks that features are strings in a copy if they have levels in a normalization, and only then.

    Args:
        copy: the data.
        side: "state" or "action".
        spec: the normalization of its features.
        where: names the normalization.

    Raises:
        DataError: they are not; with file and line of the first such value of each feature.
    """
    ids = copy.state_ids if side == "state" else copy.action_ids
    texts = copy.levels[side]
    without = copy.without_value[side]
    problems = []
    for feature in spec.features:
        feature_id = feature.feature_id
        if feature_id not in ids or feature_id in without or bool(feature.levels) == (feature_id in texts):
            continue
        expected = f"{WORDS[bool(feature.levels)]} for feature {feature_id}, as {where} has parameters for"
        problems.append(Problem(_first_line(copy, side, feature_id), expected, WORDS[feature_id in texts], ONE_KIND))
    if problems:
        raise DataError(problems)


def _first_line(copy: TrainingCopy, side: str, feature: int) -> str:
    """Returns the file and line of the first row of a copy that has a value of a feature."""
    if side == "state":
        rows = np.flatnonzero(~np.isnan(copy.state[: len(copy), copy.state_ids.index(feature)]))
    else:
        present = ~np.isnan(copy.candidates[:, copy.action_ids.index(feature)])
        lists = np.searchsorted(copy.list_offsets, np.flatnonzero(present), side="right") - 1
        rows = np.flatnonzero(np.isin(copy.actions_list, lists))
    return copy.source_line(int(rows[0])) if len(rows) else str(copy.files[0])


def count_others(copy: TrainingCopy, side: str, spec: NormalizationSpec) -> dict[int, int]:
    """Returns {id: number of other values} of one-hot features of states, or of candidates as often as rows list them.

    A value is other if it is not one of the feature's possible values, such as a text that is not a level. Ids that a
    table of vectors does not have are other, too.
    """
    ids = copy.state_ids if side == "state" else copy.action_ids
    column_of = {name: column for column, name in enumerate(ids)}
    listed = [
        (feature.feature_id, np.array(feature.possible_values, np.float32), column_of[name])
        for feature in spec.features
        if feature.has_possible_values
        for name in feature.value_ids
        if name in column_of
    ]
    if not listed:
        return {}
    values = copy.state[: len(copy)] if side == "state" else copy.candidates
    times = np.zeros(0, np.int64)  # of each candidate
    if side == "action":
        lists = np.bincount(copy.actions_list, minlength=len(copy.list_offsets) - 1)
        times = np.repeat(lists, np.diff(copy.list_offsets))
    counts = dict.fromkeys((feature for feature, _, _ in listed), 0)
    step = max(_VALUES_AT_ONCE // len(ids), 1)
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        for feature, possible, column in listed:
            other = is_other(values[part, column], possible)
            counts[feature] += int(other.sum() if side == "state" else times[part][other].sum())
    copy.release()
    return {feature: count for feature, count in counts.items() if count}
