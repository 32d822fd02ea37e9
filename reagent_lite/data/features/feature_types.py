"""The feature types: the parameters of each, how they are fitted, and how those read from a file are checked.

    Values of a feature ─► FEATURE_TYPES[type].fit ─► parameters ─► FeatureSpec

Each entry is one half of a pair: the transform of the same type is in `models/preprocessor.py`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.summary import SMALLEST_STDDEV, FeatureSummary, Floats, Moments
from reagent_lite.types import FIRST_ROW, FeatureSpec, FeatureType

MIN_PRESENT_VALUES = 20

IDENTIFICATION_FLOOR = 1e-4
"""Smallest shifted value by which identification evaluates Box-Cox."""

FEW_LEVELS = 10
"""Number of values of a whole-number feature that may be levels, with norm_params.whole_numbers "continuous"."""
SHARE_OF_FEW_LEVELS = 0.95
"""Share of the feature's values that these levels have at least."""

TRANSFORM_FLOOR = 1e-6
"""Smallest shifted value in the preprocessor, and in the fit of mean and stddev."""


@dataclass(frozen=True)
class Values:
    """The values of a feature; figures of the distribution's shape are computed on first use.

    Attributes:
        summary: the summary of all rows.
        sample: [n] present values of the sampled rows, ascending.
    """

    summary: FeatureSummary
    sample: Floats

    @cached_property
    def k_squared(self) -> float:
        """D'Agostino and Pearson's K² of the sample; NaN for a constant."""
        return k_squared(self.sample)

    @cached_property
    def exponent(self) -> float:
        """Maximum-likelihood λ of Box-Cox for the sample minus the smallest of all values; NaN if there is none."""
        return box_cox_exponent(np.maximum(self.sample - self.summary.low, IDENTIFICATION_FLOOR))

    @cached_property
    def box_cox_k_squared(self) -> float:
        """K² of the transformed sample; NaN if the transform changes little (λ near 1) or overflows."""
        if not np.isfinite(self.exponent) or 0.9 <= self.exponent <= 1.1:
            return float("nan")
        candidate = box_cox(self.sample, self.exponent, 0.0 - self.summary.low, IDENTIFICATION_FLOOR)
        stddev = Moments.of(candidate).stddev if np.isfinite(candidate).all() else np.inf
        return k_squared(candidate) if stddev < 1e8 and not np.isclose(stddev, 0) else float("nan")


def few_levels(counts: Iterable[int]) -> bool:
    """Whether the most frequent values are nearly all; counts: rows of each value of a whole-number feature."""
    ordered = sorted(counts, reverse=True)
    return sum(ordered[:FEW_LEVELS]) >= SHARE_OF_FEW_LEVELS * sum(ordered)


def k_squared(values: Floats) -> float:
    """Returns D'Agostino and Pearson's K² of values [N >= 20]: about 2 for normal values; NaN for a constant."""
    from scipy import stats  # here: it takes half of torch's time to import, and few runs fit anything

    with warnings.catch_warnings():
        # scipy warns of lost precision for nearly constant values; their K² is then NaN or huge, and both are handled.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(stats.normaltest(values).statistic)


def box_cox_exponent(values: Floats) -> float:
    """Returns the maximum-likelihood λ of Box-Cox for positive values [N]; NaN if there is none.

    Box and Cox (1964), equation 8. For values divided by their geometric mean the log-likelihood is −N/2 times the
    logarithm of the transform's variance, which takes one exponential per value and step. With 100,000 values this is
    about 20 times faster than `scipy.stats.boxcox_normmax`, which works on logarithms of sums, and gives the same λ.
    """
    from scipy import optimize, special

    if values.min() == values.max():
        return float("nan")
    log_values = np.log(values)
    log_values -= log_values.mean()

    def log_variance(exponent: float) -> float:
        variance = float(np.var(special.expm1(exponent * log_values) / exponent if exponent else log_values))
        return float(np.log(variance)) if 0 < variance < np.inf else np.inf  # NaN counts as inf

    with np.errstate(over="ignore", invalid="ignore"):
        try:
            return float(optimize.brent(log_variance, brack=(-2.0, 2.0)))
        except RuntimeError:  # no bracket around a maximum
            return float("nan")


def box_cox(values: Floats, exponent: float, shift: float, floor: float) -> Floats:
    """Returns ((max(values + shift, floor))^λ − 1) / λ, log where λ ≈ 0 (Box and Cox 1964, equation 2)."""
    from scipy import special

    with np.errstate(over="ignore"):
        transformed: Floats = special.boxcox(np.maximum(values + shift, floor), exponent)
    return transformed


def _fit_continuous(values: Values, settings: NormParams) -> dict[str, Any]:
    """Returns mean and stddev (ddof 1) of all rows; for a constant its value and 1."""
    summary = values.summary
    return {
        "mean": summary.low if summary.low == summary.high else summary.moments.mean,
        "stddev": 1.0 if summary.is_constant else summary.moments.stddev,
    }


def _fit_box_cox(values: Values, settings: NormParams) -> dict[str, Any]:
    """Returns shift = −min of all rows, maximum-likelihood λ, and mean and stddev of the transformed sample."""
    _require_sample(values)
    shift = 0.0 - values.summary.low
    moments = Moments.of(box_cox(values.sample, values.exponent, shift, TRANSFORM_FLOOR))
    if not SMALLEST_STDDEV <= moments.stddev < np.inf:  # false for NaN too
        raise ValueError("values without a Box-Cox transform of finite, positive standard deviation")
    return {
        "boxcox_shift": shift,
        "boxcox_lambda": values.exponent,
        "mean": moments.mean,
        "stddev": moments.stddev,
    }


def _fit_enum(values: Values, settings: NormParams) -> dict[str, Any]:
    if values.summary.distinct is None:
        raise ValueError(f"more than {settings.max_unique_enum_values} distinct values (max_unique_enum_values)")
    return {"possible_values": values.summary.distinct}


def _fit_quantile(values: Values, settings: NormParams) -> dict[str, Any]:
    """Returns the sample's distinct quantiles at i / quantile_size, linear in its distribution (R's type 4)."""
    _require_sample(values)
    steps = np.arange(settings.quantile_size + 1) / settings.quantile_size
    quantiles = np.unique(np.quantile(values.sample, steps, method="interpolated_inverted_cdf"))
    if len(quantiles) < 2:
        raise ValueError("all values are equal, so there are no quantiles")
    return {"quantiles": tuple(quantiles.tolist())}


def _fit_range(values: Values, settings: NormParams) -> dict[str, Any]:
    if not values.summary.low < values.summary.high:
        raise ValueError("all values are equal, so there is no range to scale by")
    return {}


def _require_sample(values: Values) -> None:
    if len(values.sample) < MIN_PRESENT_VALUES:
        raise ValueError(f"{len(values.sample)} values in the sample of norm_params.num_samples rows")


Fault = tuple[str, str, str, str]
"""Keys of the parameters, expected, got, and advice."""


def _stddev_fault(feature: FeatureSpec) -> Fault | None:
    fault = "stddev", "a positive number of float32", repr(feature.stddev), "A constant feature has stddev 1"
    return fault if feature.stddev < SMALLEST_STDDEV else None


def _enum_fault(feature: FeatureSpec) -> Fault | None:
    # The preprocessor compares in float32, where integers above 2^24 begin to coincide.
    with np.errstate(over="ignore"):
        repeated = len(feature.possible_values) - len(np.unique(np.array(feature.possible_values, np.float32)))
    fault = "possible_values", "values that differ in float32", f"{repeated} of them repeated", "List each once"
    return fault if repeated else None


def _quantiles_fault(feature: FeatureSpec) -> Fault | None:
    if len(feature.quantiles) > 1 and all(low < high for low, high in itertools.pairwise(feature.quantiles)):
        return None
    todo = "Sort them and list each once; a feature with one value is CONTINUOUS with stddev 1"
    return "quantiles", "at least 2 strictly increasing numbers", repr(list(feature.quantiles))[:80], todo


def _range_fault(feature: FeatureSpec) -> Fault | None:
    got = f"{feature.min_value!r}, {feature.max_value!r}"
    fault = "min_value, max_value", "min_value below max_value", got, ""
    return None if feature.min_value < feature.max_value else fault


def _embedding_fault(feature: FeatureSpec) -> Fault | None:
    assert feature.embedding is not None
    listed = np.array(feature.possible_values, np.float32)
    if (np.diff(listed) <= 0).any():
        return "possible_values", "codes of ids, ascending", "others", "Fit the normalization again"
    if len(listed) and feature.embedding.rows != FIRST_ROW + len(listed):
        expected = f"{FIRST_ROW + len(listed)}, two more than possible_values"
        return "embedding.rows", expected, str(feature.embedding.rows), ""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRule:
    """One type of feature.

    Attributes:
        fit: returns the parameters of a feature with at least one value, or raises ValueError with the reason why not.
        needs: parameters that a file must give; other parameters are neither fitted nor checked.
        fault: returns the fault of the parameters that `needs` names, None if they are valid.
    """

    fit: Callable[[Values, NormParams], dict[str, Any]] = lambda values, settings: {}
    needs: tuple[str, ...] = ()
    fault: Callable[[FeatureSpec], Fault | None] = lambda feature: None


_STDDEV = ("mean", "stddev")
FEATURE_TYPES = {
    FeatureType.BINARY: TypeRule(),
    FeatureType.PROBABILITY: TypeRule(),
    FeatureType.CONTINUOUS: TypeRule(fit=_fit_continuous, needs=_STDDEV, fault=_stddev_fault),
    FeatureType.BOXCOX: TypeRule(
        fit=_fit_box_cox, needs=("boxcox_lambda", "boxcox_shift", *_STDDEV), fault=_stddev_fault
    ),
    FeatureType.ENUM: TypeRule(fit=_fit_enum, needs=("possible_values",), fault=_enum_fault),
    FeatureType.QUANTILE: TypeRule(fit=_fit_quantile, needs=("quantiles",), fault=_quantiles_fault),
    FeatureType.CONTINUOUS_ACTION: TypeRule(fit=_fit_range, needs=("min_value", "max_value"), fault=_range_fault),
    FeatureType.DISCRETE_ACTION: TypeRule(),
    FeatureType.DO_NOT_PREPROCESS: TypeRule(),
    FeatureType.CLIP_LOG: TypeRule(),
    FeatureType.EMBEDDING: TypeRule(needs=("embedding",), fault=_embedding_fault),
    FeatureType.IMAGE: TypeRule(needs=("image",)),
}


def fit_feature(feature_id: int, feature_type: FeatureType, values: Values, settings: NormParams) -> FeatureSpec:
    """Returns the parameters of one feature of a known type.

    Raises:
        ValueError: the values cannot give the parameters of this type; the message says why.
    """
    summary = values.summary
    if not summary.moments.count:
        return FeatureSpec(feature_id=feature_id, feature_type=feature_type)
    return FeatureSpec(
        feature_id=feature_id,
        feature_type=feature_type,
        min_value=summary.low,
        max_value=summary.high,
        **FEATURE_TYPES[feature_type].fit(values, settings),
    )
