"""Normalization of a column from its summary: the type of every feature, its parameters, and a report.

all rows ──┬─► BINARY, PROBABILITY, ENUM, constants; mean and stddev of CONTINUOUS
sample ────┴─► CONTINUOUS, BOXCOX or QUANTILE; λ, quantiles ─► FeatureSpec, statistics.json
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reagent_lite.categories import code_of
from reagent_lite.config.embedding_config import EmbeddingConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.feature_types import FEATURE_TYPES, MIN_PRESENT_VALUES, Values, few_levels, fit_feature
from reagent_lite.data.features.summary import ColumnSummary, IdCounts
from reagent_lite.data.formats.blocks import num_threads
from reagent_lite.data.rows.levels import MOST_LEVELS, most_frequent
from reagent_lite.errors import ConfigError, Problem, join_names, pluralize, raise_any, suggest_nearest
from reagent_lite.feature_ids import id_of
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

VERSION = 2
"""Raised when the same rows give other parameters, so that older normalizations are fitted again."""

NUMERAL = re.compile(r"[-+€$£\s]*[0-9][0-9.,:/'\s]*[€$£%]?")
"""A text that looks like a number or a time: 0,5, $1,234.50, 30 %, 31.12.2026."""
SHOWN_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The normalization of a column, notes for the user, and its part of statistics.json.

    Attributes:
        spec: in column order.
        notes: sentences about unusual features.
        statistics: rows (or candidates) of the column, how many of them are sampled, and the entry of each feature by
            the text of its id; see `_report`.
    """

    spec: NormalizationSpec
    notes: tuple[str, ...]
    statistics: dict[str, Any]


def fit_columns(
    columns: Mapping[str, ColumnSummary],
    settings: NormParams,
    *,
    where: str,
    embeddings: Mapping[int, EmbeddingConfig] = {},
    tables: Mapping[str, tuple[float, ...]] = {},
) -> dict[str, Fitted]:
    """Returns the normalization of every column; features are fitted in threads.

    Args:
        columns: summaries of all rows, by name.
        settings: how to identify; overrides of features that no column has are ignored.
        where: name of the data in errors and notes, such as its path.
        embeddings: settings of the features of ids; without any, these features are left out.
        tables: {table of embeddings: codes of its ids} of tables that are not fitted.

    Raises:
        DataError: a column without features, or a feature with fewer than 20 present values or with values that its
            override's type cannot be fitted to (lists 20 problems, and the number of others).
    """
    overrides = {id_of(key): FeatureType(name) for key, name in settings.feature_overrides.items()}
    results: dict[str, list[tuple[FeatureSpec, dict[str, Any], list[str]]]] = {}
    problems: list[Problem] = []
    with ThreadPoolExecutor(num_threads()) as pool:
        for name, column in columns.items():
            if not column.features and not column.ids:
                problems.append(Problem(f"{where}: {name}", "at least one feature", f"none in {_rows(column)}"))
            rare = _rare_features(column, settings, overrides)
            kept = [feature for feature in column.features if feature not in rare]
            results_of_column = list(pool.map(partial(_fit, column, settings, overrides, f"{where}: {name}"), kept))
            problems += [result for result in results_of_column if isinstance(result, Problem)]
            results[name] = [result for result in results_of_column if not isinstance(result, Problem)]
    raise_any(problems)
    for name, fits in _fit_ids(columns, embeddings, tables, where).items():
        results[name] += fits
    return {
        name: Fitted(
            spec=NormalizationSpec.from_features({spec.feature_id: spec for spec, _, _ in fits}),
            notes=tuple(note for _, _, notes in fits for note in notes),
            statistics={
                "rows": columns[name].rows,
                "sampled": len(columns[name].hashes),
                "features": {str(spec.feature_id): report for spec, report, _ in fits},
            },
        )
        for name, fits in results.items()
    }


def _fit_ids(
    columns: Mapping[str, ColumnSummary],
    embeddings: Mapping[int, EmbeddingConfig],
    tables: Mapping[str, tuple[float, ...]],
    where: str,
) -> dict[str, list[tuple[FeatureSpec, dict[str, Any], list[str]]]]:
    """Returns the features of ids by column; features that share a table have the ids of all of them."""
    ids: dict[str, list[IdCounts]] = {}
    for column in columns.values():
        for feature, counts in column.ids.items() if embeddings else ():
            ids.setdefault(_table_of(feature, embeddings[feature]), []).append(counts)
    codes = dict(tables)
    for table, parts in ids.items():
        section = next(section for feature, section in embeddings.items() if _table_of(feature, section) == table)
        if section.buckets is None and table not in codes:
            codes[table] = _most_frequent_ids(IdCounts.merge(parts), section.max_ids)
    return {
        name: [
            _embedding(feature, embeddings[feature], codes, counts, f"{where}: {name}: feature {feature}")
            for feature, counts in column.ids.items()
            if embeddings
        ]
        for name, column in columns.items()
    }


def _table_of(feature: int, section: EmbeddingConfig) -> str:
    return section.table or str(feature)


def _most_frequent_ids(ids: IdCounts, most: int) -> tuple[float, ...]:
    """Returns the codes of the most frequent ids, ascending; of equally frequent ones, those with smaller codes."""
    kept = np.sort(np.argsort(-ids.counts, kind="stable")[:most])
    return tuple(ids.codes[kept].tolist())


def _embedding(
    feature: int, section: EmbeddingConfig, codes: Mapping[str, tuple[float, ...]], ids: IdCounts, where: str
) -> tuple[FeatureSpec, dict[str, Any], list[str]]:
    table = _table_of(feature, section)
    listed = () if section.buckets is not None else codes[table]
    spec = FeatureSpec(
        feature_id=feature,
        feature_type=FeatureType.EMBEDDING,
        possible_values=listed,
        embedding=section.form(str(feature), len(listed)),
    )
    is_other = ~np.isin(ids.codes, np.array(listed, np.float32))
    other = int(ids.counts[is_other].sum()) if section.buckets is None else 0
    total = int(ids.counts.sum())
    notes = []
    if other:
        notes.append(
            f"{where}: {int(is_other.sum()):,} of {len(ids.codes):,} ids share a vector (max_ids): "
            f"{other / total:.1%} of {total:,} values"
        )
    report = {
        "feature_type": str(FeatureType.EMBEDDING),
        "reason": "embeddings of the config",
        "table": table,
        "rows": spec.embedding.rows if spec.embedding else 0,
        "ids": len(ids.codes) if section.buckets is None else None,
        "count": total if section.buckets is None else None,
        "other": other,
        "parameters_from": "all rows",
    }
    return spec, report, notes


def _rare_features(column: ColumnSummary, settings: NormParams, overrides: dict[int, FeatureType]) -> set[int]:
    """Returns the features that are left out as their values are too few; none if all are."""
    summaries = column.features.items()
    rare = {name for name, summary in summaries if summary.moments.count < settings.min_present_values}
    rare -= overrides.keys()
    return rare if len(rare) < len(column.features) else set()


def _rows(column: ColumnSummary) -> str:
    return pluralize(column.rows, "row or candidate", "rows or candidates")


def _fit(
    column: ColumnSummary, settings: NormParams, overrides: dict[int, FeatureType], where: str, feature_id: int
) -> tuple[FeatureSpec, dict[str, Any], list[str]] | Problem:
    where = f"{where}: feature {feature_id}"
    override = overrides.get(feature_id)
    is_text = feature_id in column.levels
    count = column.features[feature_id].moments.count
    fewest = settings.min_present_values
    if count < fewest and (override is None or (FEATURE_TYPES[override].needs and not is_text)):
        todo = f"Leave the feature out, or override it with {'ENUM' if is_text else 'DO_NOT_PREPROCESS'}"
        return Problem(where, f"at least {fewest} present values", f"{count:,} in {_rows(column)}", todo)
    if is_text:
        return _fit_category(column, settings, override, where, feature_id)
    values = Values(column.features[feature_id], column.sample_values(feature_id))
    kind, reason = identify(values, settings)
    if override is not None:
        reason = f"overridden; by itself {kind}"
        kind = override
    try:
        spec = fit_feature(feature_id, kind, values, settings)
    except ValueError as error:
        todo = "Override it with another type in norm_params.feature_overrides"
        return Problem(where, f"values that {kind} can be fitted to", str(error), todo)
    notes = _notes(where, kind, values)
    _, counts = np.unique(values.sample, return_counts=True)
    if kind is FeatureType.ENUM and override is None and not few_levels(counts):
        notes.append(
            f"{where}: {len(counts):,} whole numbers, each a one-hot column; other numbers count as missing. If they "
            'are amounts, such as ages, set norm_params.whole_numbers to "continuous"'
        )
    return spec, _report(column, kind, reason, values), notes


def _fit_category(
    column: ColumnSummary, settings: NormParams, override: FeatureType | None, where: str, feature_id: int
) -> tuple[FeatureSpec, dict[str, Any], list[str]] | Problem:
    """Returns the most frequent strings as levels, in the order of the strings; see `_fit`."""
    count = column.features[feature_id].moments.count
    counts = column.levels[feature_id]
    if override not in (None, FeatureType.ENUM):
        todo = "Drop the override, or write the feature as numbers"
        return Problem(where, f"{FeatureType.ENUM}, as its values are strings", f"the override {override}", todo)
    of_code: dict[float, str] = {}
    notes = []
    for text, _ in most_frequent(counts, settings.max_unique_enum_values):
        other = of_code.setdefault(code_of(text), text)
        if other != text:
            notes.append(f"{where}: {text!r} and {other!r} have one code by chance, and count as {other!r}")
    levels = tuple(sorted(of_code.values()))
    others = count - sum(counts[level] for level in levels)
    if others:
        more = pluralize(len(counts) - len(levels), "further text")
        more = f"{MOST_LEVELS:,} or more strings" if len(counts) >= MOST_LEVELS else more
        notes.append(
            f"{where}: {len(levels)} levels (norm_params.max_unique_enum_values), and {more} that count as other: "
            f"{others / count:.1%} of {count:,} values"
        )
    if all(map(NUMERAL.fullmatch, levels)):
        notes.append(
            f"{where}: a category, as its values are strings, and all of them look like numbers or times; "
            "write numbers as 1234.5"
        )
    spec = FeatureSpec(
        feature_id=feature_id,
        feature_type=FeatureType.ENUM,
        possible_values=tuple(code_of(level) for level in levels),
        levels=levels,
    )
    report = {
        "feature_type": str(FeatureType.ENUM),
        "reason": "its values are strings",
        "count": count,
        "share_present": count / max(column.rows, 1),
        "levels": {level: counts[level] for level in levels},
        "other": others,
        "parameters_from": "all rows",
    }
    return spec, report, notes


def _has_levels(values: Values, settings: NormParams) -> bool:
    """Whether whole numbers are levels and not amounts; see norm_params.whole_numbers."""
    if settings.whole_numbers == "enum":
        return True
    _, counts = np.unique(values.sample, return_counts=True)
    return few_levels(counts)


def identify(values: Values, settings: NormParams) -> tuple[FeatureType, str]:
    """Returns the type of a feature, and the reason.

    It is the first that applies: BINARY, all values are 0 or 1; PROBABILITY, all are in [0, 1]; ENUM, non-negative
    integers with few distinct values (norm_params.whole_numbers); BOXCOX, the transform makes the values much more
    normal; QUANTILE, the values are far from normal; CONTINUOUS. The distance from normal and the share of frequent
    values are computed from the sample, all else from all rows.
    """
    summary = values.summary
    if not summary.moments.count:
        return FeatureType.CONTINUOUS, "no value"
    if summary.low >= 0 and summary.high <= 1:
        if summary.whole:
            return FeatureType.BINARY, "all values are 0 or 1"
        return FeatureType.PROBABILITY, "all values are from 0 to 1"
    if summary.low >= 0 and summary.whole and summary.distinct is not None and _has_levels(values, settings):
        most = settings.max_unique_enum_values
        return FeatureType.ENUM, f"integers from 0 on, {len(summary.distinct)} distinct, at most {most}"
    if summary.is_constant:
        return FeatureType.CONTINUOUS, "a constant"
    if len(values.sample) < MIN_PRESENT_VALUES or values.sample[0] == values.sample[-1]:
        return FeatureType.CONTINUOUS, "too few different values in the sample to say more"
    limit = settings.quantile_k2_threshold
    reason = f"K² is {values.k_squared:.4g}"
    if not settings.skip_box_cox:
        transformed = values.box_cox_k_squared
        if values.k_squared > 10 * transformed and transformed <= limit:  # false for NaN
            return FeatureType.BOXCOX, f"{reason}, and {transformed:.4g} after Box-Cox with λ {values.exponent:.4g}"
    if values.k_squared <= limit:
        return FeatureType.CONTINUOUS, reason
    if settings.skip_quantiles:
        return FeatureType.CONTINUOUS, f"{reason}, above quantile_k2_threshold {limit:g}, but skip_quantiles is true"
    return FeatureType.QUANTILE, f"{reason}, above quantile_k2_threshold {limit:g}, and Box-Cox does not help"


def _report(column: ColumnSummary, kind: FeatureType, reason: str, values: Values) -> dict[str, Any]:
    """Returns a feature's entry in statistics.json; numbers are of raw values, None if there is no value.

    From count to possible_values they are of all rows (stddev has ddof 1; distinct is None above
    max_unique_enum_values), from sampled to boxcox_k_squared of the sample; the last three are None if they were not
    needed. parameters_from says which of the two the normalization's mean, stddev and quantiles are computed from.
    """
    summary = values.summary
    sample = values.sample
    moments = summary.moments
    distinct = summary.distinct
    figures = {"mean": moments.mean, "stddev": moments.stddev, "low": summary.low, "high": summary.high}
    quantiles = np.quantile(sample, SHOWN_QUANTILES).tolist() if len(sample) else []
    computed = {name: vars(values).get(name, math.nan) for name in ("k_squared", "exponent", "box_cox_k_squared")}
    shape = {name: figure if math.isfinite(figure) else None for name, figure in computed.items()}
    return {
        "feature_type": str(kind),
        "reason": reason,
        "count": moments.count,
        "share_present": moments.count / max(column.rows, 1),
        **(figures if moments.count else dict.fromkeys(figures)),
        "distinct": None if distinct is None else len(distinct),
        "possible_values": distinct or (),
        "sampled": len(sample),
        "quantiles": {f"{share:g}": value for share, value in zip(SHOWN_QUANTILES, quantiles, strict=False)},
        "k_squared": shape["k_squared"],
        "boxcox_lambda": shape["exponent"],
        "boxcox_k_squared": shape["box_cox_k_squared"],
        "parameters_from": "the sample" if kind in (FeatureType.BOXCOX, FeatureType.QUANTILE) else "all rows",
    }


def _notes(where: str, kind: FeatureType, values: Values) -> list[str]:
    summary = values.summary
    count = len(values.sample)
    if not summary.moments.count:
        return [f"{where}: no row has a value"]
    if summary.is_constant:
        stddev = " with stddev 1" if kind is FeatureType.CONTINUOUS else ""
        return [f"{where}: every value is {summary.low:.9g}; its type is {kind}{stddev}"]
    if kind is FeatureType.PROBABILITY and not 0 <= summary.low <= summary.high <= 1:
        extent = f"they are {summary.low:.9g} to {summary.high:.9g}"
        return [f"{where}: {kind} takes values above 1 as 1 and below 0 as 0; {extent}"]
    if count < MIN_PRESENT_VALUES and kind is FeatureType.CONTINUOUS:
        few = f"{count:,} of its {summary.moments.count:,} values in the sample"
        return [f"{where}: {few}, too few to see how far from normal it is; raise norm_params.num_samples"]
    return []


def check_overrides(settings: NormParams, ids: Iterable[int], where: str) -> None:
    """Raises ConfigError for overrides of features that are not in `ids`; names the nearest that is."""
    names = [str(feature) for feature in sorted(ids)]
    otherwise = f"Known: {join_names(names)}"
    problems = []
    for key in settings.feature_overrides:
        if str(id_of(key)) not in names:
            todo = suggest_nearest(key, names, "Did you mean {}?", otherwise)
            problems.append(Problem(f"norm_params.feature_overrides.{key}", f"a feature of {where}", key, todo))
    raise_any(problems, ConfigError)
