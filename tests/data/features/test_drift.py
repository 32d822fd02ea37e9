"""Drift: figures by hand and by definition, chance by simulation, verdicts by their limits."""

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import summaries
from oracles.transitions import code_of_text
from scipy import stats

from reagent_lite.config.drift import DriftConfig
from reagent_lite.data.features.drift import distance, drift_between, stability_index
from reagent_lite.data.features.summary import ColumnSummary
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError

RNG = np.random.default_rng(6)


def column(**features: npt.ArrayLike) -> ColumnSummary:
    """A data set of these features (f0, f1, ...), all rows of which are its sample."""
    return summaries.column(*features.values(), ids=[int(name.removeprefix("f")) for name in features])


def floats(*values: Any) -> npt.NDArray[np.float64]:
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in values])


@pytest.mark.parametrize("num_bins", [2, 10])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.96])
def test_index_of_a_binary_feature(num_bins: int, share: float) -> None:
    """Two bins, 0 and 1, whatever the shares: Σ (a − e) ln(a / e)."""
    ones = round(100 * share)
    reference = floats(np.zeros(100 - ones), np.ones(ones))
    values = floats(np.zeros(80), np.ones(20))
    expected = (0.8 - (1 - share)) * math.log(0.8 / (1 - share)) + (0.2 - share) * math.log(0.2 / share)
    index, chance = stability_index(values, reference, num_bins)
    assert index == pytest.approx(expected, abs=1e-12)
    # the 95 % point of χ² with one degree of freedom is 1.95996²
    assert chance == pytest.approx((1 / 100 + 1 / 100) * 1.959964**2, rel=1e-5)


def test_index_by_deciles() -> None:
    """1 to 100 against 1 to 50 twice: deciles of the reference are 10, 20, ...; the upper five get nothing.

    The lower five hold 0.2 against 0.1, the upper five half a value of 100 against 0.1.
    """
    reference, values = floats(range(1, 101)), floats(range(1, 51), range(1, 51))
    expected = 5 * (0.2 - 0.1) * math.log(0.2 / 0.1) + 5 * (0.005 - 0.1) * math.log(0.005 / 0.1)
    assert stability_index(values, reference, 10)[0] == pytest.approx(expected, rel=1e-12)
    assert stability_index(reference, reference, 10)[0] == 0


def test_a_value_the_reference_never_had() -> None:
    """All zeros before, a tenth of ones now: (0.9 − 1) ln 0.9 + (0.1 − 0.005) ln(0.1 / 0.005)."""
    index, _ = stability_index(floats(np.zeros(90), np.ones(10)), np.zeros(100), 10)
    assert index == pytest.approx(-0.1 * math.log(0.9) + 0.095 * math.log(20), rel=1e-12)
    assert stability_index(np.zeros(10), np.zeros(100), 10) == (0.0, 0.0)
    # half zeros that become 0.001 beside a continuum: zeros have a bin of their own
    uniform = (np.arange(500) + 1) / 500
    assert stability_index(floats(np.full(500, 0.001), uniform), floats(np.zeros(500), uniform), 10)[0] > 1


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_distance_by_definition_and_by_scipy(values: list[int], reference: list[int]) -> None:
    """The largest difference of the two empirical distribution functions."""
    figure, chance = distance(floats(values), floats(reference))
    expected = max(
        abs(np.mean(np.array(values) <= x) - np.mean(np.array(reference) <= x)) for x in (*values, *reference)
    )
    assert figure == pytest.approx(expected, abs=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's p-value, which is not asked for
        assert figure == pytest.approx(stats.ks_2samp(values, reference).statistic, abs=1e-12)
    # 1.3581 is the tabled 5 % point of Kolmogorov's distribution
    assert chance == pytest.approx(1.3581 * math.sqrt(1 / len(values) + 1 / len(reference)), rel=1e-4)


def test_chance_stays_below_what_is_said() -> None:
    """600 pairs of samples of one distribution: 5 % above each limit, within 4 deviations of a binomial's share."""
    above = np.zeros(2)
    for _ in range(600):
        values, reference = RNG.normal(size=300), RNG.normal(size=500)
        for place, (figure, chance) in enumerate((stability_index(values, reference, 10), distance(values, reference))):
            above[place] += figure > chance
    shares = above / 600
    assert shares[0] == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 600))
    assert 0 < shares[1] <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 600)  # its limit is asymptotic, from above


def test_verdicts_and_their_order() -> None:
    num = 20_000
    plain, more = (np.arange(num) + 0.5) / num, np.arange(num) % 10 < 3
    base = stats.norm.ppf(plain)
    nowhere = np.where(np.arange(num) % 10 == 0, np.nan, base)  # a tenth is absent
    reference = column(f0=base, f1=base, f2=base, f3=base, f4=base, f5=np.zeros(num), f9=base)
    training = column(f0=base, f1=base + 0.35, f2=base + 1, f3=base + 0.01, f4=nowhere, f5=more, f8=base)
    drift = drift_between(training, reference, DriftConfig(), where="data")
    by_id = {feature.feature_id: feature for feature in drift.features}
    # normals a shift d apart: the index is nearly their symmetric Kullback-Leibler divergence d², less what bins lose,
    # and the distance is 2 Φ(d / 2) − 1
    assert by_id[1].psi == pytest.approx(0.35**2, rel=0.1)
    assert by_id[1].ks == pytest.approx(2 * stats.norm.cdf(0.175) - 1, abs=1e-3)
    assert {feature_id: feature.verdict for feature_id, feature in by_id.items()} == {
        0: "stable", 1: "moderate", 2: "large", 3: "stable", 4: "moderate", 5: "large"
    }  # fmt: skip
    assert (by_id[4].present, by_id[4].reference_present) == (0.9, 1.0)
    assert [feature.feature_id for feature in drift.features] == [5, 2, 1, 4, 3, 0]
    assert (drift.only_in_training, drift.only_in_reference) == ((8,), (9,))


def test_small_samples_are_stable_by_chance() -> None:
    """Twenty values in every second of ten bins, 0.2 or half a value of 20 against 0.1: large, and yet chance."""
    values = np.repeat([0, 1, 4, 5, 8, 9, 12, 13, 16, 17], 2)
    (drift,) = drift_between(column(f0=values), column(f0=np.arange(20)), DriftConfig(), where="data").features
    expected = 5 * (0.2 - 0.1) * math.log(0.2 / 0.1) + 5 * (0.025 - 0.1) * math.log(0.025 / 0.1)
    assert (drift.psi, drift.psi_by_chance) == (pytest.approx(expected), pytest.approx(0.1 * 16.919, rel=1e-4))
    assert drift.verdict == "stable"


def test_a_feature_without_values_on_one_side() -> None:
    drift = drift_between(column(f0=np.full(50, np.nan)), column(f0=np.arange(50)), DriftConfig(), where="data")
    (feature,) = drift.features
    assert (feature.psi, feature.ks, feature.mean, feature.present, feature.verdict) == (None, None, None, 0.0, "large")


def test_no_common_feature_is_refused() -> None:
    with pytest.raises(DataError, match="at least one common feature, got 1, 2"):
        drift_between(column(f1=[1.0], f2=[1.0]), column(f3=[1.0]), DriftConfig(), where="data")


def levels(rows: int, **counts: int) -> ColumnSummary:
    """A category, feature 1, in a data set of so many rows."""
    texts = [text for text, count in counts.items() for _ in range(count)]
    codes = np.append([code_of_text(text) for text in texts], np.full(rows - len(texts), np.nan)).astype(np.float32)
    of_code = {float(code_of_text(text)): text for text in counts}
    return ColumnSummary.of(FeatureMatrix((1,), codes[:, None]), np.zeros(rows, np.uint64), 100, {1: of_code})


def test_index_of_a_category_is_over_its_levels_and_all_others() -> None:
    """A 60 → 30, B 40 → 50, new levels 0 → 20 of 100: an empty bin counts as half a value."""
    drift = drift_between(
        levels(125, A=30, B=50, C=15, D=5), levels(100, A=60, B=40), DriftConfig(), where="both"
    ).features[0]
    expected = sum((a - e) * math.log(a / e) for a, e in ((0.3, 0.6), (0.5, 0.4), (0.2, 0.005)))
    assert drift.psi == pytest.approx(expected, abs=1e-12)
    assert (drift.ks, drift.mean, drift.reference_mean) == (None, None, None)
    assert (drift.other, drift.reference_other) == (0.2, 0.0)
    assert (drift.present, drift.reference_present, drift.verdict) == (0.8, 1.0, "large")


def test_integers_that_the_reference_has_not_are_counted() -> None:
    drift = drift_between(column(f1=[0, 1, 2, 7] * 10), column(f1=[0, 1, 2, 3] * 10), DriftConfig(), where="both")
    assert (drift.features[0].other, drift.features[0].reference_other) == (0.25, 0.0)
    drift = drift_between(column(f1=[0.5, 1] * 10), column(f1=[0.5, 1] * 10), DriftConfig(), where="both")
    assert drift.features[0].other is None


def test_a_feature_is_a_text_in_both_or_in_none() -> None:
    with pytest.raises(DataError, match="both: feature 1: expected texts"):
        drift_between(levels(30, A=30), column(f1=[0, 1] * 10), DriftConfig(), where="both")
