"""Fitting normalization to a matrix: what is found, what is refused, and fit against apply."""

import math

import numpy as np
import pytest
import torch
from oracles.summaries import column

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.fitting import Fitted, check_overrides, fit_columns
from reagent_lite.data.features.summary import MISSING, ColumnSummary, Merge
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.models.preprocessor import Preprocessor

NAN = math.nan
RNG = np.random.default_rng(11)
FIRST = slice(100)
ROWS = np.arange(1000)
MORE = np.where(np.arange(4000) == 777, 4000, np.arange(4000) % 100)  # 777 is the 101st value
SEVENTHS = np.arange(50) / 7
FEW = column(
    np.where(ROWS % 40 == 0, ROWS // 40 / 7, NAN),
    np.where(ROWS >= 960, ROWS % 2, NAN),
    np.where(ROWS >= 960, 0.5 + 2 * (ROWS % 2), NAN),
    sampled=slice(400),
)


def fitted(summary: ColumnSummary, **types: str) -> Fitted:
    """Fits a column; types override those of features f1, f2, ..."""
    overrides = {key.removeprefix("f"): name for key, name in types.items()}
    return fit_columns({"x": summary}, NormParams(feature_overrides=overrides), where="data")["x"]


def kinds(fit: Fitted) -> dict[int, str]:
    return {feature.feature_id: str(feature.feature_type) for feature in fit.spec.features}


def test_fit_then_apply_standardizes() -> None:
    columns = np.stack([RNG.normal(40, 0.01, 5000), RNG.lognormal(0, 1, 5000), RNG.gamma(3, 2, 5000) - 9])
    columns[RNG.random((3, 5000)) < 0.2] = NAN
    fit = fitted(column(*columns))
    assert kinds(fit) == {0: "CONTINUOUS", 1: "BOXCOX", 2: "BOXCOX"}
    raw = torch.tensor(columns.T, dtype=torch.float32)
    out = Preprocessor(fit.spec).dense(raw).numpy().astype(np.float64)
    assert not out[np.isnan(columns.T)].any()
    present = np.where(np.isnan(columns.T), NAN, out)
    np.testing.assert_allclose(np.nanmean(present, 0), 0, atol=1e-4)
    np.testing.assert_allclose(np.nanstd(present, 0, ddof=1), 1, atol=1e-4)


def test_fit_ignores_absent_and_the_sentinel() -> None:
    (feature,) = fitted(column([2.5, 3.5] * 10 + [NAN, -1337.1337] * 30)).spec.features
    assert (feature.feature_type, feature.mean, feature.min_value, feature.max_value) == ("CONTINUOUS", 3.0, 2.5, 3.5)
    # Twenty values half a unit from their mean: 20 · 0.25 / 19
    assert feature.stddev == pytest.approx(math.sqrt(5 / 19), rel=1e-12)
    assert float(MISSING) == float(np.float32(Preprocessor.missing_value))


@pytest.mark.parametrize(
    ("odd", "expected"),
    [(0, "BINARY"), (0.5, "PROBABILITY"), (2.0, "ENUM"), (-1.0, "CONTINUOUS"), (2.5, "CONTINUOUS")],
)
def test_one_row_of_many_decides_the_type(odd: float, expected: str) -> None:
    """500 zeros and 500 ones, one of which is odd and not in the sample."""
    values = np.tile(np.float32([0, 1]), 500)
    values[777] = odd
    fit = fitted(column(values, sampled=FIRST))
    assert kinds(fit) == {0: expected}
    assert fit.statistics["features"]["0"]["mean"] == pytest.approx((499 + odd) / 1000)


def test_few_distinct_values_in_the_sample_and_many_in_all() -> None:
    assert kinds(fitted(column(np.arange(4000) % 100, MORE, sampled=FIRST))) == {0: "ENUM", 1: "CONTINUOUS"}


def test_box_cox_shifts_by_the_least_of_all_rows() -> None:
    values = np.append(RNG.lognormal(0, 0.5, 3000) + 5, 4.5)
    (feature,) = fitted(column(values, sampled=slice(3000))).spec.features
    assert (str(feature.feature_type), feature.boxcox_shift, feature.min_value) == ("BOXCOX", -4.5, 4.5)


def test_too_few_values_in_the_sample() -> None:
    """0, 1/7, ..., 24/7 have mean 12/7 and squares 2 (1 + 4 + ... + 144) / 49 = 1300/49; ten are in the sample.

    Of the second, 0 and 1, and the third, 0.5 and 2.5, which is one from its mean forty times, none is.
    """
    fit = fitted(FEW)
    assert fit.notes == tuple(
        f"data: x: feature {words} of its {count} values in the sample, too few to see how far from normal it is; "
        "raise norm_params.num_samples"
        for words, count in (("0: 10", 25), ("2: 0", 40))
    )
    assert kinds(fit) == {0: "CONTINUOUS", 1: "BINARY", 2: "CONTINUOUS"}
    by_id = {feature.feature_id: feature for feature in fit.spec.features}
    assert (by_id[0].mean, by_id[0].stddev) == (pytest.approx(12 / 7), pytest.approx(math.sqrt(1300 / 49 / 24)))
    assert (by_id[2].mean, by_id[2].stddev) == (1.5, pytest.approx(math.sqrt(40 / 39)))
    report = fit.statistics["features"]["1"]
    assert (report["sampled"], report["count"], report["share_present"]) == (0, 40, 0.04)


REFUSED: list[tuple[ColumnSummary, dict[str, str], list[str], str]] = [
    (column(MORE, sampled=FIRST), {"f0": "ENUM"}, ["data: x: feature 0"], "ENUM.*got more than 100"),
    (FEW, {"f2": "QUANTILE"}, ["data: x: feature 2"], "QUANTILE.*got 0 values in the sample"),
    (Merge(20, 4).summary(), {}, ["data: x"], "got none in 0 rows"),
    # too few values: every such feature is named
    (column([*SEVENTHS[:19], *[NAN] * 31], SEVENTHS, [NAN] * 50), {}, ["data: x: feature 0", "data: x: feature 2"],
     "expected at least 20 present values, got 19 in 50 rows or candidates"),
]  # fmt: skip


@pytest.mark.parametrize(("summary", "types", "places", "words"), REFUSED)
def test_what_cannot_be_fitted_is_refused(
    summary: ColumnSummary, types: dict[str, str], places: list[str], words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        fitted(summary, **types)
    assert [problem.where for problem in caught.value.problems] == places


def test_twenty_values_are_enough() -> None:
    assert kinds(fitted(column([*SEVENTHS[:20], *[NAN] * 30]))) == {0: "CONTINUOUS"}


def test_constants_say_so() -> None:
    fit = fitted(column([-2.5] * 30, [3.0] * 30))
    first, second = fit.spec.features
    assert (first.mean, first.stddev, second.possible_values) == (-2.5, 1.0, (3.0,))
    assert fit.notes == (
        "data: x: feature 0: every value is -2.5; its type is CONTINUOUS with stddev 1",
        "data: x: feature 1: every value is 3; its type is ENUM",
    )


def test_overrides_fix_the_type_and_its_parameters_are_fitted() -> None:
    columns = [np.arange(40) % 4] * 9 + [np.full(40, NAN)]
    kept = {"f5": "DO_NOT_PREPROCESS", "f6": "CLIP_LOG", "f7": "PROBABILITY", "f8": "DISCRETE_ACTION", "f10": "BINARY"}
    types = {"f1": "CONTINUOUS", "f2": "QUANTILE", "f3": "CONTINUOUS_ACTION", "f4": "BOXCOX"} | kept
    fit = fitted(column(*columns, ids=range(1, 11)), **types)
    assert fit.notes == (
        "data: x: feature 7: PROBABILITY takes values above 1 as 1 and below 0 as 0; they are 0 to 3",
        "data: x: feature 10: no row has a value",
    )
    by_id = {feature.feature_id: feature for feature in fit.spec.features}
    # Ten each of 0, 1, 2, 3: squared deviations 2.25, 0.25, 0.25, 2.25
    assert (by_id[1].mean, by_id[1].stddev) == (1.5, pytest.approx(math.sqrt(50 / 39)))
    assert (by_id[2].quantiles[0], by_id[2].quantiles[-1]) == (0.0, 3.0)
    assert (by_id[3].min_value, by_id[3].max_value, by_id[4].boxcox_shift) == (0.0, 3.0, 0.0)
    assert {f"f{number}": name for number, name in kinds(fit).items() if number != 9} == types
    assert by_id[9].possible_values == (0.0, 1.0, 2.0, 3.0)


def test_override_of_an_unknown_feature() -> None:
    norm_params = NormParams(feature_overrides={"7": "ENUM"})
    check_overrides(norm_params, {7}, "data")
    with pytest.raises(ConfigError, match=r"overrides\.7: .*Did you mean 71?"):
        check_overrides(norm_params, {1, 71}, "data")
