"""Normalization from statistics of all rows: types that hold for every row, and what is said of each feature.

FeatureSummary (all rows) ──┬─► BINARY, PROBABILITY, ENUM, constants; mean and stddev of CONTINUOUS
Sample (rows of least hash) ┴─► CONTINUOUS, BOXCOX or QUANTILE; λ, quantiles ─► FeatureSpec, FeatureReport
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.full_statistics import ColumnSummary, FeatureSummary
from reagent_lite.data.features.normalization import MIN_PRESENT_VALUES, MISSING, raise_any
from reagent_lite.data.features.statistics import (
    FEATURE_TYPES,
    UNFITTED,
    Floats,
    Shape,
    fit_feature,
    judge_shape,
    with_box_cox,
)
from reagent_lite.data.formats.reading import num_threads
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

SHOWN_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_LACKING = Shape(feature_type=FeatureType.CONTINUOUS, k_squared=math.nan, exponent=math.nan, box_cox_k_squared=math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureReport:
    """What statistics.json says of a feature; numbers are of raw values, None where there is none.

    Attributes:
        feature_type: as in the normalization file.
        reason: why this type.
        count, share_present: values in all rows, and their share of rows (or candidates).
        mean, stddev, low, high: of all rows; stddev is the sample's, ddof 1.
        distinct: how many distinct values, None where more than max_unique_enum_values.
        possible_values: these values, else empty.
        sampled: values in the sample.
        quantiles: {share: value} of the sample.
        k_squared, boxcox_lambda, boxcox_k_squared: of the sample; None where they were not needed.
        parameters_from: "all rows" or "the sample": what mean, stddev and quantiles of the normalization are of.
    """

    feature_type: str
    reason: str
    count: int
    share_present: float
    mean: float | None
    stddev: float | None
    low: float | None
    high: float | None
    distinct: int | None
    possible_values: tuple[float, ...]
    sampled: int
    quantiles: dict[str, float]
    k_squared: float | None
    boxcox_lambda: float | None
    boxcox_k_squared: float | None
    parameters_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The normalization of a column, sentences a user should know, and a report by feature id."""

    spec: NormalizationSpec
    notes: tuple[str, ...]
    reports: dict[int, FeatureReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The type of a feature and why; `shape` is what its sample says, where it was asked."""

    feature_type: FeatureType
    reason: str
    shape: Shape = _LACKING


def fit_summary(column: ColumnSummary, settings: NormParams, *, where: str) -> Fitted:
    """Returns the normalization of every feature of a column; features are fitted in threads.

    Args:
        column: of all rows.
        settings: how to identify; overrides of other columns' features are passed over.
        where: what errors and notes name, such as the data's path.

    Raises:
        DataError: no feature; fewer than 20 present values, or values that an override's type cannot be fitted to (20
            features, and how many more).
    """
    if not column.features:
        raise DataError(
            Problem(
                where,
                "at least one feature",
                f"none in {counted(column.rows, 'row or candidate', 'rows or candidates')}",
            )
        )
    with ThreadPoolExecutor(num_threads()) as pool:
        results = list(pool.map(partial(_fitted, column, settings, where), column.features))
    raise_any([problem for one in results if isinstance(one, DataError) for problem in one.problems])
    fitted = [one for one in results if not isinstance(one, DataError)]
    return Fitted(
        spec=NormalizationSpec.ordered({spec.feature_id: spec for spec, _, _ in fitted}),
        notes=tuple(note for _, _, notes in fitted for note in notes),
        reports={spec.feature_id: report for spec, report, _ in fitted},
    )


def _fitted(
    column: ColumnSummary, settings: NormParams, where: str, feature_id: int
) -> tuple[FeatureSpec, FeatureReport, Sequence[str]] | DataError:
    place = f"{where}: feature {feature_id}"
    summary = column.features[feature_id]
    sampled = column.sample.column(feature_id)
    values: Floats = sampled[~np.isnan(sampled) & (sampled != MISSING)].astype(np.float64)
    override = {int(key): FeatureType(name) for key, name in settings.feature_overrides.items()}.get(feature_id)
    if summary.moments.count < MIN_PRESENT_VALUES and override not in UNFITTED:
        got = f"{summary.moments.count:,} in {counted(column.rows, 'row or candidate', 'rows or candidates')}"
        todo = "Leave the feature out, or override it with DO_NOT_PREPROCESS"
        return DataError(Problem(place, f"at least {MIN_PRESENT_VALUES} present values", got, todo))
    judged = _judge(summary, values, settings)
    if override is not None:
        judged = replace(judged, feature_type=override, reason=f"overridden; by itself {judged.feature_type}")
    try:
        spec = _fit(feature_id, judged, summary, values, settings)
    except ValueError as error:
        todo = "Override it with another type in norm_params.feature_overrides"
        expected = f"values that {judged.feature_type} can be fitted to"
        return DataError(Problem(place, expected, str(error), todo))
    report = _report(column, judged, summary, values)
    return spec, report, _notes(place, judged.feature_type, summary, values)


def _judge(summary: FeatureSummary, values: Floats, settings: NormParams) -> _Judged:
    """Returns the type that holds for all rows; only how far from normal a feature is, is judged on the sample."""
    limit = settings.max_unique_enum_values
    if not summary.moments.count:
        return _Judged(feature_type=FeatureType.CONTINUOUS, reason="no value")
    if summary.low >= 0 and summary.high <= 1:
        if summary.whole:
            return _Judged(feature_type=FeatureType.BINARY, reason="all values are 0 or 1")
        return _Judged(feature_type=FeatureType.PROBABILITY, reason="all values are from 0 to 1")
    if summary.low >= 0 and summary.whole and summary.distinct is not None:
        reason = f"integers from 0 on, {len(summary.distinct)} distinct, at most {limit}"
        return _Judged(feature_type=FeatureType.ENUM, reason=reason)
    if summary.is_constant:
        return _Judged(feature_type=FeatureType.CONTINUOUS, reason="a constant")
    if len(values) < MIN_PRESENT_VALUES or values.min() == values.max():
        return _Judged(feature_type=FeatureType.CONTINUOUS, reason="too few different values in the sample to say more")
    shape = judge_shape(values, settings, lowest=summary.low)
    return _Judged(feature_type=shape.feature_type, reason=_reason(shape, settings), shape=shape)


def _reason(shape: Shape, settings: NormParams) -> str:
    k2, limit = f"K² is {shape.k_squared:.4g}", settings.quantile_k2_threshold
    if shape.feature_type is FeatureType.BOXCOX:
        return f"{k2}, and {shape.box_cox_k_squared:.4g} after Box-Cox with λ {shape.exponent:.4g}"
    far = shape.k_squared > limit
    if shape.feature_type is FeatureType.QUANTILE:
        return f"{k2}, above quantile_k2_threshold {limit:g}, and Box-Cox does not help"
    if far and settings.skip_quantiles:
        return f"{k2}, above quantile_k2_threshold {limit:g}, but skip_quantiles is true"
    return k2


def _fit(
    feature_id: int, judged: _Judged, summary: FeatureSummary, values: Floats, settings: NormParams
) -> FeatureSpec:
    """Returns the parameters: of all rows where these say them, else of the sample.

    Raises:
        ValueError: the values cannot give the parameters of this type; the message says why.
    """
    kind = judged.feature_type
    if not summary.moments.count:
        return fit_feature(feature_id, kind, np.empty(0), settings)
    spec = FeatureSpec(feature_id=feature_id, feature_type=kind, min_value=summary.low, max_value=summary.high)
    match kind:
        case FeatureType.CONTINUOUS:
            stddev = 1.0 if summary.is_constant else summary.moments.stddev
            return replace(spec, mean=summary.low if summary.low == summary.high else summary.moments.mean,
                           stddev=stddev)  # fmt: skip
        case FeatureType.ENUM:
            if summary.distinct is None:
                raise ValueError(
                    f"more than {settings.max_unique_enum_values} distinct values (max_unique_enum_values)"
                )
            return replace(spec, possible_values=tuple(summary.distinct.tolist()))
        case FeatureType.BOXCOX if math.isfinite(judged.shape.exponent):
            return with_box_cox(spec, values, judged.shape.exponent)
        case FeatureType.BOXCOX | FeatureType.QUANTILE if len(values) < MIN_PRESENT_VALUES:
            raise ValueError(f"{len(values)} values in the sample of norm_params.num_samples rows")
        case _:
            return FEATURE_TYPES[kind](spec, values, settings)


def _report(column: ColumnSummary, judged: _Judged, summary: FeatureSummary, values: Floats) -> FeatureReport:
    moments, distinct = summary.moments, summary.distinct
    quantiles = np.quantile(values, SHOWN_QUANTILES).tolist() if len(values) else []
    of_sample = judged.feature_type in (FeatureType.BOXCOX, FeatureType.QUANTILE)
    some = moments.count > 0
    return FeatureReport(
        feature_type=str(judged.feature_type),
        reason=judged.reason,
        count=moments.count,
        share_present=moments.count / max(column.rows, 1),
        mean=moments.mean if some else None,
        stddev=moments.stddev if some else None,
        low=summary.low if some else None,
        high=summary.high if some else None,
        distinct=None if distinct is None else len(distinct),
        possible_values=() if distinct is None else tuple(distinct.tolist()),
        sampled=len(values),
        quantiles={f"{share:g}": value for share, value in zip(SHOWN_QUANTILES, quantiles, strict=False)},
        k_squared=_or_none(judged.shape.k_squared),
        boxcox_lambda=_or_none(judged.shape.exponent),
        boxcox_k_squared=_or_none(judged.shape.box_cox_k_squared),
        parameters_from="the sample" if of_sample else "all rows",
    )


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _notes(place: str, kind: FeatureType, summary: FeatureSummary, values: Floats) -> list[str]:
    if not summary.moments.count:
        return [f"{place}: no row has a value"]
    if summary.is_constant:
        stddev = " with stddev 1" if kind is FeatureType.CONTINUOUS else ""
        return [f"{place}: every value is {summary.low:.9g}; a constant is {kind}{stddev}"]
    if len(values) < MIN_PRESENT_VALUES and kind is FeatureType.CONTINUOUS:
        return [f"{place}: {len(values):,} of its {summary.moments.count:,} values in the sample, too few to see how "
                "far from normal it is; raise norm_params.num_samples"]  # fmt: skip
    return []
