"""Drift: figures by hand and by definition, chance by simulation, verdicts by their limits."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import summaries
from helpers.cases import cases
from helpers.transitions import code_of_text
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reagent_lite.config.drift_limits import DriftConfig
from reagent_lite.data.features.drift import distance, drift_between, stability_index
from reagent_lite.data.features.summary import ColumnSummary
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError

RNG = np.random.default_rng(6)
NUM = 20_000


def column(**features: npt.ArrayLike) -> ColumnSummary:
    """A data set of these features (f0, f1, ...), all rows of which are its sample."""
    return summaries.column(*features.values(), ids=[int(name.removeprefix("f")) for name in features])


def floats(*values: Any) -> npt.NDArray[np.float64]:
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in values])


def index_of(*shares: tuple[float, float]) -> Any:
    """Σ (a − e) ln(a / e) over the shares of bins now and in the reference."""
    return pytest.approx(sum((a - e) * math.log(a / e) for a, e in shares), abs=1e-12)


DECILES = [(0.2, 0.1)] * 5
UNIFORM = (np.arange(500) + 1) / 500


@pytest.mark.parametrize(("values", "reference", "num_bins", "expected", "point"), [
    # two bins, 0 and 1, whatever the shares; the 95 % point of χ² with one degree of freedom is 1.95996²
    *((floats(np.zeros(80), np.ones(20)), floats(np.zeros(100 - ones), np.ones(ones)), num_bins,
       index_of((0.8, 1 - ones / 100), (0.2, ones / 100)), 1.959964**2) for num_bins in (2, 10)
      for ones in (5, 50, 96)),
    # 1 to 100 against 1 to 50 twice: deciles of the reference are 10, 20, ...; the upper five get half a value of 100
    (floats(range(1, 51), range(1, 51)), floats(range(1, 101)), 10, index_of(*DECILES, *[(0.005, 0.1)] * 5), 16.919),
    (floats(range(1, 101)), floats(range(1, 101)), 10, 0, 16.919),
    # all zeros before, a tenth of ones now
    (floats(np.zeros(90), np.ones(10)), np.zeros(100), 10, index_of((0.9, 1), (0.1, 0.005)), 1.959964**2),
    (np.zeros(10), np.zeros(100), 10, 0, 0),
])  # fmt: skip
def test_index_and_its_chance_by_hand(values: Any, reference: Any, num_bins: int, expected: Any, point: float) -> None:
    chance = pytest.approx((1 / len(values) + 1 / len(reference)) * point, rel=1e-4)
    assert stability_index(values, reference, num_bins) == (expected, chance)


def test_zeros_beside_a_continuum_have_a_bin_of_their_own() -> None:
    """Half are zeros that become 0.001."""
    assert stability_index(floats(np.full(500, 0.001), UNIFORM), floats(np.zeros(500), UNIFORM), 10)[0] > 1


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_distance_by_scipy(values: list[int], reference: list[int]) -> None:
    """The largest difference of the two empirical distribution functions."""
    ours, theirs = (stats.ecdf(sample).cdf.evaluate(np.arange(-5, 6)) for sample in (values, reference))
    # 1.3581 is the tabled 5 % point of Kolmogorov's distribution
    chance = 1.3581 * math.sqrt(1 / len(values) + 1 / len(reference))
    assert distance(floats(values), floats(reference)) == (
        pytest.approx(np.abs(ours - theirs).max(), abs=1e-12), pytest.approx(chance, rel=1e-4),
    )  # fmt: skip


def test_chance_stays_below_what_is_said() -> None:
    """600 pairs of samples of one distribution: 5 % above each limit, within 4 deviations of a binomial's share."""
    pairs = [(RNG.normal(size=300), RNG.normal(size=500)) for _ in range(600)]
    above = [(stability_index(*pair, 10), distance(*pair)) for pair in pairs]
    indices, distances = np.mean([[figure > chance for figure, chance in figures] for figures in above], axis=0)
    assert indices == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 600))
    assert 0 < distances <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 600)  # its limit is asymptotic, from above


def test_verdicts_and_their_order() -> None:
    base = stats.norm.ppf((np.arange(NUM) + 0.5) / NUM)
    tenth = np.arange(NUM) % 10
    drift = drift_between(
        column(
            f0=base,
            f1=base + 0.35,
            f2=base + 1,
            f3=base + 0.01,
            f4=np.where(tenth == 0, np.nan, base),
            f5=tenth < 3,
            f8=base,
        ),
        column(f0=base, f1=base, f2=base, f3=base, f4=base, f5=np.zeros(NUM), f9=base),
        DriftConfig(),
        where="data",
    )
    assert [(feature.feature_id, feature.verdict) for feature in drift.features] == [
        (5, "large"), (2, "large"), (1, "moderate"), (4, "moderate"), (3, "stable"), (0, "stable")
    ]  # fmt: skip
    # normals a shift d apart: the index is nearly their symmetric Kullback-Leibler divergence d², less what bins lose,
    # and the distance is 2 Φ(d / 2) − 1
    assert (drift.features[2].psi, drift.features[2].ks) == (
        pytest.approx(0.35**2, rel=0.1), pytest.approx(2 * stats.norm.cdf(0.175) - 1, abs=1e-3),
    )  # fmt: skip
    assert (drift.features[3].present, drift.features[3].reference_present) == (0.9, 1.0)
    assert (drift.only_in_training, drift.only_in_reference) == ((8,), (9,))


def levels(rows: int, **counts: int) -> ColumnSummary:
    """A category, feature 1, in a data set of so many rows."""
    codes = np.repeat([*map(code_of_text, counts), np.float32(np.nan)], [*counts.values(), rows - sum(counts.values())])
    return ColumnSummary.of(
        FeatureMatrix((1,), codes[:, None]),
        np.zeros(rows, np.uint64),
        100,
        {1: {float(code_of_text(text)): text for text in counts}},
    )


@cases("training, reference, expected", {
    # twenty values in every second of ten bins, 0.2 or half a value of 20 against 0.1: large, and yet chance
    "small samples are stable by chance": (
        column(f1=np.repeat([0, 1, 4, 5, 8, 9, 12, 13, 16, 17], 2)), column(f1=np.arange(20)),
        {"psi": index_of(*DECILES, *[(0.025, 0.1)] * 5), "verdict": "stable",
         "psi_by_chance": pytest.approx(0.1 * 16.919, rel=1e-4)},
    ),
    # A 60 → 30, B 40 → 50, new levels 0 → 20 of 100: an empty bin counts as half a value
    "the index of a category is over its levels and all others": (
        levels(125, A=30, B=50, C=15, D=5), levels(100, A=60, B=40),
        {"psi": index_of((0.3, 0.6), (0.5, 0.4), (0.2, 0.005)), "ks": None, "mean": None, "reference_mean": None,
         "other": 0.2, "reference_other": 0.0, "present": 0.8, "reference_present": 1.0, "verdict": "large"},
    ),
    "a feature without values on one side": (
        column(f1=np.full(50, np.nan)), column(f1=np.arange(50)),
        {"psi": None, "ks": None, "mean": None, "present": 0.0, "verdict": "large"},
    ),
    "integers that the reference has not are counted": (
        column(f1=[0, 1, 2, 7] * 10), column(f1=[0, 1, 2, 3] * 10), {"other": 0.25, "reference_other": 0.0},
    ),
    "other numbers are not": (column(f1=[0.5, 1] * 10), column(f1=[0.5, 1] * 10), {"other": None}),
})  # fmt: skip
def test_drift_of_a_feature(training: ColumnSummary, reference: ColumnSummary, expected: dict[str, Any]) -> None:
    (drift,) = drift_between(training, reference, DriftConfig(), where="both").features
    assert {name: getattr(drift, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("training", "reference", "words"),
    [
        (column(f1=[1.0], f2=[1.0]), column(f3=[1.0]), "at least one common feature, got 1, 2"),
        # a feature is a text in both or in none
        (levels(30, A=30), column(f1=[0, 1] * 10), "both: feature 1: expected strings"),
    ],
)
def test_what_cannot_be_compared_is_refused(training: ColumnSummary, reference: ColumnSummary, words: str) -> None:
    with pytest.raises(DataError, match=words):
        drift_between(training, reference, DriftConfig(), where="both")
