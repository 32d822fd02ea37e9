"""Identification and fits against scipy, distributions of known type, and hand-computed moments."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.column_fits import identify
from reagent_lite.data.features.feature_types import Values, box_cox, box_cox_exponent, fit_feature
from reagent_lite.data.features.summary import FeatureSummary
from reagent_lite.types import FeatureSpec, FeatureType

Floats = npt.NDArray[np.float64]
RNG = np.random.default_rng(20)
NUM = 2000
NORMAL = RNG.normal(3, 2, NUM)
LOGNORMAL = RNG.lognormal(0, 1, NUM)
AMOUNTS = {"whole_numbers": "continuous"}
HEAVY_TAILED = RNG.standard_t(1.2, NUM)


def known(values: npt.ArrayLike, settings: NormParams) -> Values:
    numbers = np.asarray(values, float)
    return Values(FeatureSummary.of(numbers, settings.max_unique_enum_values), np.sort(numbers))


def fitted(name: str, values: npt.ArrayLike, **settings: Any) -> FeatureSpec:
    norm_params = NormParams(**settings)
    return fit_feature(7, FeatureType(name), known(values, norm_params), norm_params)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        (RNG.integers(0, 2, NUM), {}, "BINARY"),
        (np.zeros(30), {}, "BINARY"),
        (np.ones(30), {}, "BINARY"),
        (RNG.random(NUM), {}, "PROBABILITY"),
        (np.full(30, 0.5), {}, "PROBABILITY"),
        (RNG.integers(0, 50, NUM), {}, "ENUM"),
        (np.full(30, 3.0), {}, "ENUM"),
        (RNG.integers(17, 96, NUM), AMOUNTS, "CONTINUOUS"),  # ages
        (RNG.integers(0, 10, NUM), AMOUNTS, "ENUM"),
        (np.append(RNG.integers(0, 10, 95), np.arange(10, 15)), AMOUNTS, "ENUM"),  # 10 values are 95 %
        (np.append(RNG.integers(0, 10, 94), np.arange(10, 16)), AMOUNTS, "CONTINUOUS"),
        (RNG.integers(0, 10, NUM), AMOUNTS | {"max_unique_enum_values": 9}, "CONTINUOUS"),
        (np.arange(100), {}, "ENUM"),
        (np.arange(101), {}, "CONTINUOUS"),
        (np.arange(50.0), {"max_unique_enum_values": 49}, "CONTINUOUS"),
        (np.arange(50.0), {"max_unique_enum_values": 50}, "ENUM"),
        (RNG.binomial(100, 0.5, NUM) - 60, {}, "CONTINUOUS"),
        (RNG.binomial(100, 0.5, NUM) + 0.5, {}, "CONTINUOUS"),
        (NORMAL, {}, "CONTINUOUS"),
        (NORMAL, {"skip_quantiles": False}, "CONTINUOUS"),
        (np.full(30, -2.5), {}, "CONTINUOUS"),
        (LOGNORMAL, {}, "BOXCOX"),
        (RNG.gamma(3, 1, NUM) - 5, {}, "BOXCOX"),
        (np.random.default_rng(1).normal(3, 0.8, NUM).clip(0) ** 1.2, {}, "BOXCOX"),  # λ 0.8
        (LOGNORMAL, {"skip_box_cox": True}, "CONTINUOUS"),
        (LOGNORMAL, {"skip_box_cox": True, "skip_quantiles": False}, "QUANTILE"),
        (LOGNORMAL, {"quantile_k2_threshold": 1e-9}, "CONTINUOUS"),  # K² after the transform must stay below it too
        (HEAVY_TAILED, {}, "CONTINUOUS"),
        (HEAVY_TAILED, {"skip_quantiles": False}, "QUANTILE"),
        (HEAVY_TAILED, {"skip_quantiles": False, "quantile_k2_threshold": 1e9}, "CONTINUOUS"),
    ],
)
def test_identify(values: Floats, settings: dict[str, Any], expected: str) -> None:
    norm_params = NormParams(**settings)
    assert str(identify(known(values, norm_params), norm_params)[0]) == expected


@pytest.mark.parametrize(
    "values", [LOGNORMAL, NORMAL - NORMAL.min() + 1e-4, RNG.exponential(5, NUM), RNG.beta(2, 5, NUM)]
)
def test_box_cox_exponent_is_scipys(values: Floats) -> None:
    # Both searches stop at a relative 1.5e-8 of the likelihood, which is flat at its maximum.
    assert box_cox_exponent(values) == pytest.approx(stats.boxcox_normmax(values, method="mle"), abs=1e-5)


def test_box_cox_by_scipy_and_by_hand() -> None:
    assert math.isnan(box_cox_exponent(np.full(30, 4.0)))
    assert math.isfinite(box_cox_exponent(np.exp(np.linspace(-9, 88, 50))))  # the range of float32
    np.testing.assert_allclose(box_cox(LOGNORMAL, 0.3, 0.0, 1e-6), stats.boxcox(LOGNORMAL, 0.3), rtol=1e-13)
    # (4^0.5 - 1)/0.5 = 2; log 4 at λ 0; the floor 1e-4: (0.01 - 1)/0.5 = -1.98
    assert box_cox(np.array([3.0, -9.0]), 0.5, 1.0, 1e-4) == pytest.approx([2.0, -1.98])
    assert box_cox(np.array([3.0]), 0.0, 1.0, 1e-4) == pytest.approx([math.log(4)])


SMALL = 5 + 1e-3 * RNG.standard_normal(NUM)


@pytest.mark.parametrize(("name", "values", "settings", "expected"), [
    # mean 5, squared deviations 9+1+1+1+0+0+4+16 = 32, 32/7 with ddof 1
    ("CONTINUOUS", [2, 4, 4, 4, 5, 5, 7, 9], {},
     {"mean": 5.0, "stddev": pytest.approx(math.sqrt(32 / 7), rel=1e-15), "min_value": 2.0, "max_value": 9.0}),
    ("CONTINUOUS", SMALL, {}, {"stddev": pytest.approx(np.std(SMALL, ddof=1), rel=1e-12)}),  # no floor
    # 0.1 summed thirty times and divided is not 0.1: the mean of a constant is not computed.
    ("CONTINUOUS", np.full(30, 0.1), {}, {"mean": 0.1, "stddev": 1.0}),
    ("QUANTILE", HEAVY_TAILED, {}, {"quantiles": pytest.approx(
        stats.mstats.mquantiles(HEAVY_TAILED, np.arange(21) / 20, alphap=0, betap=1), rel=1e-12)}),
    # linear in the empirical distribution of 1..20: the share p is reached at 20 p; p = 0 gives the minimum
    ("QUANTILE", np.arange(1.0, 21.0), {"quantile_size": 8},
     {"quantiles": (1.0, 2.5, 5.0, 7.5, 10.0, 12.5, 15.0, 17.5, 20.0)}),
    ("QUANTILE", [0.0] * 90 + [1.0] * 5 + [2.0] * 5, {}, {"quantiles": (0.0, 1.0, 2.0)}),
    *((name, [2.0, 5.0], {}, {"stddev": 1.0, "mean": 0.0, "min_value": 2.0, "max_value": 5.0, "quantiles": ()})
      for name in ("BINARY", "PROBABILITY", "DISCRETE_ACTION", "DO_NOT_PREPROCESS", "CLIP_LOG")),
])  # fmt: skip
def test_fits_by_hand_and_by_scipy(
    name: str, values: npt.ArrayLike, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = fitted(name, values, **settings)
    assert {name: getattr(result, name) for name in expected} == expected


@pytest.mark.parametrize(("values", "constant"), [([0.1] * 30, True), ([0.0, 1e-45], True), ([0.0, 1e-30], False)])
def test_a_constant_is_one_value_of_float32(values: list[float], constant: bool) -> None:
    assert FeatureSummary.of(np.array(values), 1).is_constant == constant


@pytest.mark.parametrize("name", ["QUANTILE", "BOXCOX", "CONTINUOUS_ACTION"])
def test_constant_cannot_be_fitted(name: str) -> None:
    with pytest.raises(ValueError, match=r"all values are equal|finite, positive"):
        fitted(name, np.full(30, 4.0))
