"""Fitting normalization to a matrix: what is found, what is refused, and fit against apply."""

import math
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cases import cases
from helpers.summaries import column

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.column_fits import Fitted, check_overrides, fit_columns
from reagent_lite.data.features.summary import MISSING, ColumnSummary, Merge
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.models.preprocessor import Preprocessor

RNG = np.random.default_rng(11)
FIRST = slice(100)
ROWS = np.arange(1000)
MORE = np.where(np.arange(4000) == 777, 4000, np.arange(4000) % 100)  # 777 is the 101st value
SEVENTHS = np.arange(50) / 7
FEW = column(
    np.where(ROWS % 40 == 0, ROWS // 40 / 7, nan),
    np.where(ROWS >= 960, ROWS % 2, nan),
    np.where(ROWS >= 960, 0.5 + 2 * (ROWS % 2), nan),
    sampled=slice(400),
)


def fitted(summary: ColumnSummary, **types: str) -> Fitted:
    """Fits a column; types override those of features f1, f2, ..."""
    return fit_columns(
        {"x": summary},
        NormParams(feature_overrides={key.removeprefix("f"): name for key, name in types.items()}),
        where="data",
    )["x"]


def test_fit_then_apply_standardizes() -> None:
    columns = np.stack([RNG.normal(40, 0.01, 5000), RNG.lognormal(0, 1, 5000), RNG.gamma(3, 2, 5000) - 9])
    columns[RNG.random((3, 5000)) < 0.2] = nan
    spec = fitted(column(*columns)).spec
    assert [str(feature.feature_type) for feature in spec.features] == ["CONTINUOUS", "BOXCOX", "BOXCOX"]
    out = Preprocessor(spec).dense(torch.tensor(columns.T, dtype=torch.float32)).numpy().astype(np.float64)
    assert not out[np.isnan(columns.T)].any()
    present = np.where(np.isnan(columns.T), nan, out)
    np.testing.assert_allclose([np.nanmean(present, 0), np.nanstd(present, 0, ddof=1)], [[0] * 3, [1] * 3], atol=1e-4)


OF_SAMPLE = " values in the sample, too few to see how far from normal it is; raise norm_params.num_samples"
TYPES = {
    "f1": "CONTINUOUS", "f2": "QUANTILE", "f3": "CONTINUOUS_ACTION", "f4": "BOXCOX", "f5": "DO_NOT_PREPROCESS",
    "f6": "CLIP_LOG", "f7": "PROBABILITY", "f8": "DISCRETE_ACTION", "f10": "BINARY",
}  # fmt: skip


@cases("summary, types, expected, notes", {
    # twenty values half a unit from their mean: 20 · 0.25 / 19
    "absent values and the sentinel do not count": (
        column([2.5, 3.5] * 10 + [nan, -1337.1337] * 30), {},
        {0: {"feature_type": "CONTINUOUS", "mean": 3.0, "stddev": pytest.approx(math.sqrt(5 / 19), rel=1e-12),
             "min_value": 2.5, "max_value": 3.5}}, [],
    ),
    # 500 zeros and 500 ones, one of which is odd and not in the sample
    **{f"one row of many decides the type: {odd}": (
           column(np.where(ROWS == 777, odd, ROWS % 2), sampled=FIRST), {}, {0: {"feature_type": kind} | more}, [],
       ) for odd, kind, more in (
           (0, "BINARY", {}), (0.5, "PROBABILITY", {}), (2.0, "ENUM", {}),
           (-1.0, "CONTINUOUS", {"mean": pytest.approx(0.498)}),
           (2.5, "CONTINUOUS", {"mean": pytest.approx(0.5015)}),
       )},
    "few distinct values in the sample and many in all": (
        column(np.arange(4000) % 100, MORE, sampled=FIRST), {},
        {0: {"feature_type": "ENUM"}, 1: {"feature_type": "CONTINUOUS"}},
        ["feature 0: 100 whole numbers, each a one-hot column; other numbers count as missing. If they are amounts, "
         'such as ages, set norm_params.whole_numbers to "continuous"'],
    ),
    "Box-Cox shifts by the least of all rows": (
        column(np.append(RNG.lognormal(0, 0.5, 3000) + 5, 4.5), sampled=slice(3000)), {},
        {0: {"feature_type": "BOXCOX", "boxcox_shift": -4.5, "min_value": 4.5}}, [],
    ),
    # 0, 1/7, ..., 24/7 have mean 12/7 and squares 2 (1 + 4 + ... + 144) / 49 = 1300/49; ten are in the sample.
    # Of the second, 0 and 1, and the third, 0.5 and 2.5, which is one from its mean forty times, none is.
    "too few values in the sample": (
        FEW, {},
        {0: {"feature_type": "CONTINUOUS", "mean": pytest.approx(12 / 7),
             "stddev": pytest.approx(math.sqrt(1300 / 49 / 24))},
         1: {"feature_type": "BINARY"},
         2: {"feature_type": "CONTINUOUS", "mean": 1.5, "stddev": pytest.approx(math.sqrt(40 / 39))}},
        [f"feature 0: 10 of its 25{OF_SAMPLE}", f"feature 2: 0 of its 40{OF_SAMPLE}"],
    ),
    "twenty values are enough": (
        column([*SEVENTHS[:20], *[nan] * 30]), {}, {0: {"feature_type": "CONTINUOUS"}}, [],
    ),
    "constants say so": (
        column([-2.5] * 30, [3.0] * 30), {}, {0: {"mean": -2.5, "stddev": 1.0}, 1: {"possible_values": (3.0,)}},
        ["feature 0: every value is -2.5; its type is CONTINUOUS with stddev 1",
         "feature 1: every value is 3; its type is ENUM"],
    ),
    # ten each of 0, 1, 2, 3: squared deviations 2.25, 0.25, 0.25, 2.25
    "overrides fix the type and its parameters are fitted": (
        column(*([np.arange(40) % 4] * 9 + [np.full(40, nan)]), ids=range(1, 11)), TYPES,
        {1: {"feature_type": "CONTINUOUS", "mean": 1.5, "stddev": pytest.approx(math.sqrt(50 / 39))},
         2: {"feature_type": "QUANTILE", "min_value": 0.0, "max_value": 3.0},
         3: {"feature_type": "CONTINUOUS_ACTION", "min_value": 0.0, "max_value": 3.0},
         4: {"feature_type": "BOXCOX", "boxcox_shift": 0.0}, 9: {"possible_values": (0.0, 1.0, 2.0, 3.0)},
         **{int(key[1:]): {"feature_type": kind} for key, kind in TYPES.items() if int(key[1:]) > 4}},
        ["feature 7: PROBABILITY takes values above 1 as 1 and below 0 as 0; they are 0 to 3",
         "feature 10: no row has a value"],
    ),
})  # fmt: skip
def test_fits(
    summary: ColumnSummary, types: dict[str, str], expected: dict[int, dict[str, Any]], notes: list[str]
) -> None:
    fit = fitted(summary, **types)
    by_id = {feature.feature_id: feature for feature in fit.spec.features}
    result = {key: {name: getattr(by_id[key], name) for name in features} for key, features in expected.items()}
    assert (result, [note.removeprefix("data: x: ") for note in fit.notes]) == (expected, notes)


def test_statistics_say_what_the_sample_has() -> None:
    report = fitted(FEW).statistics["features"]["1"]
    assert (report["sampled"], report["count"], report["share_present"], report["mean"]) == (0, 40, 0.04, 0.5)
    assert float(MISSING) == float(np.float32(Preprocessor.missing_value))


@pytest.mark.parametrize(("summary", "types", "places", "words"), [
    (column(MORE, sampled=FIRST), {"f0": "ENUM"}, ["data: x: feature 0"], "ENUM.*got more than 100"),
    (FEW, {"f2": "QUANTILE"}, ["data: x: feature 2"], "QUANTILE.*got 0 values in the sample"),
    (Merge(20, 4).summary(), {}, ["data: x"], "got none in 0 rows"),
    # too few values in all features: every one is named
    (column([*SEVENTHS[:19], *[nan] * 31], [nan] * 50), {}, ["data: x: feature 0", "data: x: feature 1"],
     "expected at least 20 present values, got 19 in 50 rows or candidates"),
])  # fmt: skip
def test_what_cannot_be_fitted_is_refused(
    summary: ColumnSummary, types: dict[str, str], places: list[str], words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        fitted(summary, **types)
    assert [problem.where for problem in caught.value.problems] == places


def test_override_of_an_unknown_feature() -> None:
    norm_params = NormParams(feature_overrides={"7": "ENUM"})
    check_overrides(norm_params, {7}, "data")
    with pytest.raises(ConfigError, match=r"overrides\.7: .*Did you mean 71?"):
        check_overrides(norm_params, {1, 71}, "data")


def test_rare_features_are_left_out() -> None:
    """Unless an override names them, or fewer values are enough."""
    summary = column([*SEVENTHS[:19], *[nan] * 31], SEVENTHS, [nan] * 50)
    assert fitted(summary).spec.feature_ids == (1,)
    assert fitted(summary, f2="DO_NOT_PREPROCESS").spec.feature_ids == (1, 2)
    few = fit_columns({"x": summary}, NormParams(min_present_values=19), where="data")["x"]
    assert few.spec.feature_ids == (0, 1)
