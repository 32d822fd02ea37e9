"""Fitting normalization to a matrix: what is found, what is refused, and fit against apply."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from oracles.summaries import column

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.fitting import check_overrides, fit_columns
from reagent_lite.data.features.summary import MISSING, ColumnSummary, Merge
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.types import NormalizationSpec

NAN = math.nan
RNG = np.random.default_rng(11)
FIRST = slice(100)


def fit(*columns: npt.ArrayLike, norm_params: NormParams | None = None) -> tuple[NormalizationSpec, tuple[str, ...]]:
    summary = {"x": column(*columns, ids=range(1, len(columns) + 1))}
    fitted = fit_columns(summary, norm_params or NormParams(), where="data")["x"]
    return fitted.spec, fitted.notes


def kinds(summary: ColumnSummary, norm_params: NormParams | None = None) -> list[str]:
    fitted = fit_columns({"x": summary}, norm_params or NormParams(), where="data")
    return [str(feature.feature_type) for feature in fitted["x"].spec.features]


def overridden(**types: str) -> NormParams:
    return NormParams(feature_overrides={key.removeprefix("f"): name for key, name in types.items()})


def test_fit_then_apply_standardizes() -> None:
    columns = [RNG.normal(40, 0.01, 5000), RNG.lognormal(0, 1, 5000), RNG.gamma(3, 2, 5000) - 9]
    for values in columns:
        values[RNG.random(5000) < 0.2] = NAN
    spec, _ = fit(*columns)
    assert [f.feature_type.value for f in spec.features] == ["CONTINUOUS", "BOXCOX", "BOXCOX"]
    raw = torch.tensor(np.stack(columns, axis=1), dtype=torch.float32)
    out = Preprocessor(spec).dense(raw).numpy().astype(np.float64)
    absent = raw.isnan().numpy()
    assert not out[absent].any()
    for index in range(3):
        present = out[~absent[:, index], index]
        assert (present.mean(), present.std(ddof=1)) == (pytest.approx(0, abs=1e-4), pytest.approx(1, abs=1e-4))


def test_fit_ignores_absent_and_the_sentinel() -> None:
    spec, _ = fit([2.5, 3.5] * 10 + [NAN, -1337.1337] * 30)
    (feature,) = spec.features
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
    fitted = fit_columns({"x": column(values, sampled=FIRST)}, NormParams(), where="data")["x"]
    assert str(fitted.spec.features[0].feature_type) == expected
    assert fitted.statistics["features"]["0"]["mean"] == pytest.approx((499 + odd) / 1000)


def test_few_distinct_values_in_the_sample_and_many_in_all() -> None:
    values = np.arange(4000) % 100
    more = np.where(np.arange(4000) == 777, 4000, values)  # the 101st
    assert kinds(column(values, more, sampled=FIRST)) == ["CONTINUOUS", "ENUM"]
    with pytest.raises(DataError, match=r"feature 0: .*ENUM.*got more than 100"):
        kinds(column(more, sampled=FIRST), overridden(f0="ENUM"))


def test_box_cox_shifts_by_the_least_of_all_rows() -> None:
    values = np.append(RNG.lognormal(0, 0.5, 3000) + 5, 4.5)
    (feature,) = fit_columns({"x": column(values, sampled=slice(3000))}, NormParams(), where="data")["x"].spec.features
    assert (str(feature.feature_type), feature.boxcox_shift, feature.min_value) == ("BOXCOX", -4.5, 4.5)


def test_too_few_values_in_the_sample() -> None:
    """0, 1/7, ..., 24/7 have mean 12/7 and squares 2 (1 + 4 + ... + 144) / 49 = 1300/49; ten are in the sample.

    Of the second, 0 and 1, and the third, 0.5 and 2.5, which is one from its mean forty times, none is.
    """
    rows = np.arange(1000)
    values = (
        np.where(rows % 40 == 0, rows // 40 / 7, np.nan),
        np.where(rows >= 960, rows % 2, np.nan),
        np.where(rows >= 960, 0.5 + 2 * (rows % 2), np.nan),
    )
    few = {"x": column(*values, sampled=slice(400))}
    fit = fit_columns(few, NormParams(), where="data")["x"]
    assert fit.notes == tuple(
        f"data: x: feature {words} of its {count} values in the sample, too few to see how far from normal it is; "
        "raise norm_params.num_samples"
        for words, count in (("0: 10", 25), ("2: 0", 40))
    )
    by_id = {feature.feature_id: feature for feature in fit.spec.features}
    assert [str(by_id[number].feature_type) for number in range(3)] == ["CONTINUOUS", "BINARY", "CONTINUOUS"]
    assert (by_id[0].mean, by_id[0].stddev) == (pytest.approx(12 / 7), pytest.approx(math.sqrt(1300 / 49 / 24)))
    assert (by_id[2].mean, by_id[2].stddev) == (1.5, pytest.approx(math.sqrt(40 / 39)))
    report = fit.statistics["features"]["1"]
    assert (report["sampled"], report["count"], report["share_present"]) == (0, 40, 0.04)
    with pytest.raises(DataError, match=r"QUANTILE.*got 0 values in the sample"):
        kinds(few["x"], overridden(f2="QUANTILE"))


def test_no_feature_at_all_is_refused() -> None:
    with pytest.raises(DataError, match=r"data: x: .*got none in 0 rows"):
        kinds(Merge(20, 4).summary())


def test_constants_say_so() -> None:
    spec, notes = fit([-2.5] * 30, [3.0] * 30)
    assert (spec.features[0].mean, spec.features[0].stddev, spec.features[1].possible_values) == (-2.5, 1.0, (3.0,))
    assert notes == (
        "data: x: feature 1: every value is -2.5; its type is CONTINUOUS with stddev 1",
        "data: x: feature 2: every value is 3; its type is ENUM",
    )


def test_too_few_values_names_every_such_feature() -> None:
    sparse = np.full(50, NAN)
    sparse[:19] = np.arange(19) / 7
    with pytest.raises(DataError) as caught:
        fit(sparse, np.arange(50) / 7, np.full(50, NAN))
    assert [problem.where for problem in caught.value.problems] == ["data: x: feature 1", "data: x: feature 3"]
    assert "expected at least 20 present values, got 19 in 50 rows or candidates" in str(caught.value)
    sparse[19] = 0.0
    assert fit(sparse)[0].features[0].feature_type == "CONTINUOUS"


def test_overrides_fix_the_type_and_its_parameters_are_fitted() -> None:
    columns = [np.arange(40) % 4] * 9 + [np.full(40, NAN)]
    kept = {"f5": "DO_NOT_PREPROCESS", "f6": "CLIP_LOG", "f7": "PROBABILITY", "f8": "DISCRETE_ACTION", "f10": "BINARY"}
    fitted = {"f1": "CONTINUOUS", "f2": "QUANTILE", "f3": "CONTINUOUS_ACTION", "f4": "BOXCOX"}
    spec, notes = fit(*columns, norm_params=overridden(**fitted, **kept))
    assert notes == (
        "data: x: feature 7: PROBABILITY takes values above 1 as 1 and below 0 as 0; they are 0 to 3",
        "data: x: feature 10: no row has a value",
    )
    by_id = {f.feature_id: f for f in spec.features}
    # Ten each of 0, 1, 2, 3: squared deviations 2.25, 0.25, 0.25, 2.25
    assert (by_id[1].mean, by_id[1].stddev) == (1.5, pytest.approx(math.sqrt(50 / 39)))
    assert (by_id[2].quantiles[0], by_id[2].quantiles[-1]) == (0.0, 3.0)
    assert (by_id[3].min_value, by_id[3].max_value, by_id[4].boxcox_shift) == (0.0, 3.0, 0.0)
    assert {f"f{i}": str(by_id[i].feature_type) for i in (5, 6, 7, 8, 10)} == kept
    assert by_id[9].possible_values == (0.0, 1.0, 2.0, 3.0)


def test_override_of_an_unknown_feature() -> None:
    check_overrides(overridden(f7="ENUM"), {7}, "data")
    with pytest.raises(ConfigError, match=r"overrides\.7: .*Did you mean 71?"):
        check_overrides(overridden(f7="ENUM"), {1, 71}, "data")
