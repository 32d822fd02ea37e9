"""What type a feature is, and the parameters of that type, from its present values in float64.

    values ─► identify ─► FeatureType ─► FEATURE_TYPES[type] ─► FeatureSpec

Each fit is one half of a pair: the transform of the same type is in `models/preprocessor.py`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from reagent_lite.config.norm_params import NormParams
from reagent_lite.types import FeatureSpec, FeatureType

Floats = npt.NDArray[np.float64]
Fit = Callable[[FeatureSpec, Floats, NormParams], FeatureSpec]

SMALLEST_STDDEV = float(np.finfo(np.float32).tiny)
"""Below it a standard deviation is 0 to a float32 network."""

IDENTIFICATION_FLOOR = 1e-4
"""Smallest shifted value the Box-Cox candidate is judged on."""

TRANSFORM_FLOOR = 1e-6
"""Smallest shifted value the preprocessor transforms; mean and stddev are taken behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of values; parts seen apart merge into the whole."""

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Returns the moments of values [N]; all zero for none."""
        if not len(values):
            return cls(count=0, mean=0.0, squares=0.0)
        mean = float(values.mean())
        return cls(count=len(values), mean=mean, squares=float(np.square(values - mean).sum()))

    def merge(self, other: Self) -> Self:
        """Returns the moments of both parts together (Chan, Golub and LeVeque 1983, equation 2.1)."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        return replace(
            self,
            count=count,
            mean=self.mean + delta * other.count / count,
            squares=self.squares + other.squares + delta * delta * self.count * other.count / count,
        )

    @property
    def stddev(self) -> float:
        """Sample standard deviation (ddof 1); 0 for fewer than two values."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0


def is_constant(values: Floats) -> bool:
    """Whether values [N >= 1] are one value, or too close together for a float32 standard deviation."""
    return bool(values.min() == values.max()) or Moments.of(values).stddev < SMALLEST_STDDEV


def k_squared(values: Floats) -> float:
    """Returns D'Agostino and Pearson's K² of values [N >= 20]: about 2 for normal ones; NaN for a constant."""
    from scipy import stats  # here: it takes half of torch's time to import, and few runs fit anything

    with warnings.catch_warnings():
        # scipy warns of lost precision for nearly constant values; their K² is then NaN or huge, and both are handled.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(stats.normaltest(values).statistic)


def box_cox_exponent(values: Floats) -> float:
    """Returns the Box-Cox λ of greatest likelihood for positive values [N]; NaN where there is none.

    Box and Cox (1964), equation 8. Divided by their geometric mean, values have the likelihood −N/2 log var of the
    transform, which needs one exponential per value and step: at 100,000 values about 20 times faster than
    `scipy.stats.boxcox_normmax`, which works on logarithms of sums, and the same λ.
    """
    from scipy import optimize, special

    if values.min() == values.max():
        return float("nan")
    log_values = np.log(values)
    log_values -= log_values.mean()

    def log_variance(exponent: float) -> float:
        variance = float(np.var(special.expm1(exponent * log_values) / exponent if exponent else log_values))
        return float(np.log(variance)) if 0 < variance < np.inf else np.inf  # NaN too is no candidate

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


def identify(values: Floats, settings: NormParams) -> FeatureType:
    """Returns the type of a feature from its present, finite values [N >= 20].

    The first that holds: BINARY all in {0, 1}; PROBABILITY all in [0, 1]; ENUM non-negative integers, few distinct;
    BOXCOX where that transform makes the values much more normal; QUANTILE where they are far from normal;
    CONTINUOUS.
    """
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        return FeatureType.BINARY if np.isin(values, (0, 1)).all() else FeatureType.PROBABILITY
    whole = low >= 0 and bool((values == np.floor(values)).all())
    if whole and len(np.unique(values)) <= settings.max_unique_enum_values:
        return FeatureType.ENUM
    if is_constant(values):
        return FeatureType.CONTINUOUS
    return judge_shape(values, settings, lowest=float(values.min())).feature_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How far values are from normal, and the type that follows.

    Attributes:
        feature_type: CONTINUOUS, BOXCOX or QUANTILE.
        k_squared: of the values; NaN where they are constant.
        exponent: Box-Cox λ of greatest likelihood; NaN where there is none or it was not looked for.
        box_cox_k_squared: of the values transformed by it; NaN where it is too near 1, or the transform explodes.
    """

    feature_type: FeatureType
    k_squared: float
    exponent: float
    box_cox_k_squared: float


def judge_shape(values: Floats, settings: NormParams, *, lowest: float) -> Shape:
    """Returns whether values [N >= 20] are normal enough, made so by Box-Cox, or want quantiles.

    Args:
        values: a sample of a feature that is no constant.
        settings: thresholds, and what is never chosen.
        lowest: of all values, of which these may be a sample; the shift is −lowest.
    """
    k2, exponent, bent = k_squared(values), float("nan"), float("nan")
    if not settings.skip_box_cox:
        exponent, bent = _box_cox_candidate(values, lowest)
    if k2 > 10 * bent and bent <= settings.quantile_k2_threshold:  # false for NaN
        kind = FeatureType.BOXCOX
    elif not settings.skip_quantiles and k2 > settings.quantile_k2_threshold:
        kind = FeatureType.QUANTILE
    else:
        kind = FeatureType.CONTINUOUS
    return Shape(feature_type=kind, k_squared=k2, exponent=exponent, box_cox_k_squared=bent)


def _box_cox_candidate(values: Floats, lowest: float) -> tuple[float, float]:
    """Returns (λ, K² of the candidate): the latter NaN unless it bends the values (λ not near 1) without exploding."""
    shift = 0.0 - lowest
    exponent = box_cox_exponent(np.maximum(values + shift, IDENTIFICATION_FLOOR))
    if not np.isfinite(exponent) or 0.9 <= exponent <= 1.1:
        return exponent, float("nan")
    candidate = box_cox(values, exponent, shift, IDENTIFICATION_FLOOR)
    if not np.isfinite(candidate).all():
        return exponent, float("nan")
    stddev = Moments.of(candidate).stddev
    if not np.isfinite(stddev) or stddev >= 1e8 or np.isclose(stddev, 0):
        return exponent, float("nan")
    return exponent, k_squared(candidate)


def fit_feature(feature_id: int, feature_type: FeatureType, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns the parameters of one feature of a known type from its present, finite values [N].

    Raises:
        ValueError: the values cannot give the parameters of this type; the message says why.
    """
    if len(values):
        low, high = float(values.min()), float(values.max())
        spec = FeatureSpec(feature_id=feature_id, feature_type=feature_type, min_value=low, max_value=high)
    else:
        spec = FeatureSpec(feature_id=feature_id, feature_type=feature_type)
    return FEATURE_TYPES[feature_type](spec, values, settings)


def fit_nothing(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns the spec as it is: the type has no parameters."""
    return spec


def fit_continuous(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns mean and stddev (ddof 1); of a constant its value and 1."""
    if is_constant(values):
        return replace(spec, mean=float(values[0]), stddev=1.0)
    moments = Moments.of(values)
    return replace(spec, mean=moments.mean, stddev=moments.stddev)


def fit_box_cox(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns shift = −min, λ of greatest likelihood, and mean and stddev of the transformed values."""
    exponent = box_cox_exponent(np.maximum(values - spec.min_value, IDENTIFICATION_FLOOR))
    return with_box_cox(spec, values, exponent)


def with_box_cox(spec: FeatureSpec, values: Floats, exponent: float) -> FeatureSpec:
    """Returns shift = −min and a known λ, with mean and stddev of the transformed values [N].

    Raises:
        ValueError: the transform has no finite, positive standard deviation.
    """
    shift = 0.0 - spec.min_value
    moments = Moments.of(box_cox(values, exponent, shift, TRANSFORM_FLOOR))
    if not SMALLEST_STDDEV <= moments.stddev < np.inf:  # false for NaN too
        raise ValueError("values without a Box-Cox transform of finite, positive standard deviation")
    return replace(spec, boxcox_shift=shift, boxcox_lambda=exponent, mean=moments.mean, stddev=moments.stddev)


def fit_enum(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns the distinct values, increasing."""
    distinct = np.unique(values)
    if len(distinct) > settings.max_unique_enum_values:
        raise ValueError(
            f"{len(distinct)} distinct values, max_unique_enum_values is {settings.max_unique_enum_values}"
        )
    return replace(spec, possible_values=tuple(distinct.tolist()))


def fit_quantile(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns the distinct quantiles at i / quantile_size, linear in the empirical distribution (R's type 4)."""
    steps = np.arange(settings.quantile_size + 1) / settings.quantile_size
    quantiles = np.unique(np.quantile(values, steps, method="interpolated_inverted_cdf"))
    if len(quantiles) < 2:
        raise ValueError("one single value, which has no quantiles")
    return replace(spec, quantiles=tuple(quantiles.tolist()))


def fit_range(spec: FeatureSpec, values: Floats, settings: NormParams) -> FeatureSpec:
    """Returns the spec as it is, once its min_value is below its max_value."""
    if not spec.min_value < spec.max_value:
        raise ValueError("one single value, which has no range")
    return spec


UNFITTED = frozenset(
    {
        FeatureType.BINARY,
        FeatureType.PROBABILITY,
        FeatureType.DISCRETE_ACTION,
        FeatureType.DO_NOT_PREPROCESS,
        FeatureType.CLIP_LOG,
    }
)
"""Types that any number of values will do for, none included."""

FEATURE_TYPES: dict[FeatureType, Fit] = {
    **dict.fromkeys(UNFITTED, fit_nothing),
    FeatureType.CONTINUOUS: fit_continuous,
    FeatureType.BOXCOX: fit_box_cox,
    FeatureType.ENUM: fit_enum,
    FeatureType.QUANTILE: fit_quantile,
    FeatureType.CONTINUOUS_ACTION: fit_range,
}
