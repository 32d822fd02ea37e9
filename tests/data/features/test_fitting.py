"""Fitting normalization to a matrix: what is found, what is refused, and fit against apply."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from oracles.summaries import column

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.fitting import check_overrides, fit_columns
from reagent_lite.data.features.normalization import read_normalization, write_normalization
from reagent_lite.data.features.summary import MISSING
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.types import NormalizationSpec

NAN = math.nan
RNG = np.random.default_rng(11)


def fit(*columns: npt.ArrayLike, norm_params: NormParams | None = None) -> tuple[NormalizationSpec, tuple[str, ...]]:
    summary = {"x": column(*columns, ids=range(1, len(columns) + 1))}
    fitted = fit_columns(summary, norm_params or NormParams(), where="data")["x"]
    return fitted.spec, fitted.notes


def overridden(**types: str) -> NormParams:
    return NormParams(feature_overrides={key.removeprefix("f"): name for key, name in types.items()})


def test_fit_identifies_and_orders() -> None:
    num = 3000
    spec, notes = fit(
        RNG.lognormal(0, 1, num),
        RNG.normal(40, 0.01, num),
        RNG.integers(0, 5, num),
        RNG.random(num),
        RNG.integers(0, 2, num),
        RNG.standard_t(1.2, num),
        norm_params=NormParams(skip_quantiles=False),
    )
    assert [(f.feature_id, f.feature_type.value) for f in spec.features] == [
        (5, "BINARY"),
        (4, "PROBABILITY"),
        (2, "CONTINUOUS"),
        (1, "BOXCOX"),
        (3, "ENUM"),
        (6, "QUANTILE"),
    ]
    assert notes == ()
    assert spec.width == 5 + 5


def test_fit_then_apply_standardizes() -> None:
    num = 5000
    columns = [RNG.normal(40, 0.01, num), RNG.lognormal(0, 1, num), RNG.gamma(3, 2, num) - 9]
    for values in columns:
        values[RNG.random(num) < 0.2] = NAN
    spec, _ = fit(*columns)
    assert [f.feature_type.value for f in spec.features] == ["CONTINUOUS", "BOXCOX", "BOXCOX"]
    raw = torch.tensor(np.stack(columns, axis=1), dtype=torch.float32)
    out = Preprocessor(spec).dense(raw).numpy().astype(np.float64)
    for index in range(3):
        absent = raw[:, index].isnan().numpy()
        present = out[~absent, index]
        assert present.mean() == pytest.approx(0, abs=1e-4)
        assert present.std(ddof=1) == pytest.approx(1, abs=1e-4)
        assert not out[absent, index].any()


def test_fit_then_apply_quantile_is_uniform() -> None:
    heavy = RNG.standard_t(1.2, 5000).astype(np.float32)
    spec, _ = fit(heavy, norm_params=NormParams(skip_quantiles=False))
    out = np.sort(Preprocessor(spec).dense(torch.from_numpy(heavy)[:, None]).numpy()[:, 0])
    # At the quantiles the transform equals the empirical distribution; between them it is monotone.
    assert np.abs(out[249::250] - np.arange(1, 21) / 20).max() < 1e-3
    assert (out[0], out[-1]) == (0.0, 1.0)


def test_fit_ignores_absent_and_the_sentinel() -> None:
    spec, _ = fit([2.5, 3.5] * 10 + [NAN, -1337.1337] * 30)
    (feature,) = spec.features
    assert (feature.feature_type, feature.mean, feature.min_value, feature.max_value) == ("CONTINUOUS", 3.0, 2.5, 3.5)
    # Twenty values half a unit from their mean: 20 · 0.25 / 19
    assert feature.stddev == pytest.approx(math.sqrt(5 / 19), rel=1e-12)
    assert float(MISSING) == float(np.float32(Preprocessor.missing_value))


def test_constants_say_so() -> None:
    spec, notes = fit([-2.5] * 30, [3.0] * 30)
    assert spec.features[0].stddev == 1.0
    assert spec.features[0].mean == -2.5
    assert notes == (
        "data: x: feature 1: every value is -2.5; a constant is CONTINUOUS with stddev 1",
        "data: x: feature 2: every value is 3; a constant is ENUM",
    )
    assert spec.features[1].possible_values == (3.0,)


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
    spec, _ = fit(
        *columns,
        norm_params=overridden(
            f1="CONTINUOUS",
            f2="QUANTILE",
            f3="CONTINUOUS_ACTION",
            f4="BOXCOX",
            f5="DO_NOT_PREPROCESS",
            f6="CLIP_LOG",
            f7="PROBABILITY",
            f8="DISCRETE_ACTION",
            f10="BINARY",
        ),
    )
    by_id = {f.feature_id: f for f in spec.features}
    assert by_id[1].mean == 1.5
    # Ten each of 0, 1, 2, 3: squared deviations 2.25, 0.25, 0.25, 2.25
    assert by_id[1].stddev == pytest.approx(math.sqrt(50 / 39))
    assert by_id[2].quantiles[0] == 0.0
    assert by_id[2].quantiles[-1] == 3.0
    assert (by_id[3].min_value, by_id[3].max_value) == (0.0, 3.0)
    assert by_id[4].boxcox_shift == 0.0
    assert [by_id[i].feature_type.value for i in (5, 6, 7, 8)] == [
        "DO_NOT_PREPROCESS",
        "CLIP_LOG",
        "PROBABILITY",
        "DISCRETE_ACTION",
    ]
    assert by_id[9].possible_values == (0.0, 1.0, 2.0, 3.0)
    assert by_id[10].feature_type == "BINARY"


def test_override_of_an_unknown_feature() -> None:
    check_overrides(overridden(f7="ENUM"), {7}, "data")
    with pytest.raises(ConfigError, match=r"overrides\.7: expected a feature of data, got 7. Did you mean 71?"):
        check_overrides(overridden(f7="ENUM"), {1, 71}, "data")


def test_override_that_cannot_be_fitted() -> None:
    with pytest.raises(DataError, match="feature 1: expected values that QUANTILE can be fitted to, got one single"):
        fit(np.ones(40), norm_params=overridden(f1="QUANTILE"))
    with pytest.raises(
        DataError, match="expected values that ENUM can be fitted to, got more than 100 distinct values"
    ):
        fit(np.arange(200) / 7, norm_params=overridden(f1="ENUM"))


def test_fitted_spec_reads_back(tmp_path: Path) -> None:
    num = 3000
    spec, _ = fit(RNG.lognormal(0, 1, num), RNG.normal(size=num), RNG.integers(0, 9, num), RNG.random(num), [7.5] * num)
    path = str(tmp_path / "norm.json")
    write_normalization(path, spec)
    assert read_normalization(path) == spec
