"""Drift: how much the features of a data set differ from those of another.

    reference ─► bins at equal shares ─┐
    training  ─► shares of these bins ─┴─► population stability index ─┐
    both samples ─► largest distance of distribution functions ────────┼─► verdict of the worst
    both, all rows ─► difference of the shares present ────────────────┘

The bins of a category are the reference's most frequent levels, and one bin for all other strings, counted over all
rows; it has no distribution function.

Two samples of one distribution differ by chance: a figure below the limit that 95 % of such pairs do not exceed counts
as stable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.drift_limits import DriftConfig
from reagent_lite.data.features.summary import ColumnSummary, Floats
from reagent_lite.data.rows.levels import most_frequent
from reagent_lite.errors import DataError, Problem, join_names, raise_any
from reagent_lite.feature_ids import write_ids

Verdict = Literal["stable", "moderate", "large"]
VERDICTS: tuple[Verdict, ...] = ("stable", "moderate", "large")
Figure = tuple[float, float] | tuple[None, None]
"""(figure, limit that it rarely exceeds by chance), or (share in the training data, share in the reference)."""
_UNKNOWN: Figure = (None, None)
CHANCE = 0.95
MOST_TABLE_ROWS = 40
MAX_LEVEL_BINS = 100
"""Largest number of levels of a category that get a bin of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDrift:
    """One feature in both data sets.

    Attributes:
        feature_id: id of a feature of states or candidates.
        verdict: the verdict on the worst of the three figures.
        psi, psi_by_chance: population stability index, and the limit that it rarely exceeds by chance; None if one of
            the data sets has no value.
        ks, ks_by_chance: two-sample Kolmogorov-Smirnov statistic, and its limit.
        present, reference_present: share of rows in which the feature is present.
        mean, reference_mean: mean over all rows; None without a value, and for categories.
        other, reference_other: share of a one-hot feature's values that the reference does not have: strings beyond its
            MAX_LEVEL_BINS most frequent ones, or integers that it lacks; None for other features.
    """

    feature_id: int
    verdict: Verdict
    psi: float | None
    psi_by_chance: float | None
    ks: float | None
    ks_by_chance: float | None
    present: float
    reference_present: float
    mean: float | None
    reference_mean: float | None
    other: float | None
    reference_other: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The drift of features that both data sets have, the largest first, and the features that only one of them has."""

    features: tuple[FeatureDrift, ...]
    only_in_training: tuple[int, ...]
    only_in_reference: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """Returns the column's part of drift.json."""
        return {
            "features": [
                {**asdict(feature), "feature_id": write_ids([feature.feature_id])[0]} for feature in self.features
            ],
            "only_in_training": write_ids(self.only_in_training),
            "only_in_reference": write_ids(self.only_in_reference),
        }


def drift_between(training: ColumnSummary, reference: ColumnSummary, settings: DriftConfig, *, where: str) -> Drift:
    """Returns the drift of every feature that both have.

    Args:
        training: the data in question.
        reference: the data it is compared with; its quantiles are the bins.
        settings: bins and thresholds.
        where: the two data sets, for errors.

    Raises:
        DataError: no feature in common; a feature with strings in one of them and numbers in the other.
    """
    both = sorted(set(training.features) & set(reference.features))
    if not both:
        ids = [join_names(summary.features) or "none" for summary in (training, reference)]
        raise DataError(Problem(where, "data sets with at least one common feature", f"{ids[0]} against {ids[1]}"))
    raise_any(
        [
            Problem(
                f"{where}: feature {feature}", "strings in both, or numbers in both", "strings in one of them alone"
            )
            for feature in both
            if (feature in training.levels) != (feature in reference.levels)
            and training.features[feature].moments.count
            and reference.features[feature].moments.count
        ]
    )
    drifts = [_feature_drift(feature, training, reference, settings) for feature in both]
    return Drift(
        features=tuple(
            sorted(drifts, key=lambda drift: (-VERDICTS.index(drift.verdict), -(drift.psi or 0.0), drift.feature_id))
        ),
        only_in_training=tuple(sorted(set(training.features) - set(reference.features))),
        only_in_reference=tuple(sorted(set(reference.features) - set(training.features))),
    )


def _feature_drift(
    feature_id: int, training: ColumnSummary, reference: ColumnSummary, settings: DriftConfig
) -> FeatureDrift:
    texts = [feature_id in summary.levels for summary in (training, reference)]
    psi = ks = other = _UNKNOWN
    if all(texts):
        psi, other = _of_levels(training.levels[feature_id], reference.levels[feature_id])
    elif not any(texts):
        psi, ks, other = _of_numbers(feature_id, training, reference, settings)
    new = training.features[feature_id].moments
    old = reference.features[feature_id].moments
    present = new.count / max(training.rows, 1)
    before = old.count / max(reference.rows, 1)
    severities = (
        _severity((abs(present - before), 0.0), settings.present_moderate, settings.present_large),
        _severity(psi, settings.psi_moderate, settings.psi_large),
        _severity(ks, settings.ks_moderate, settings.ks_large),
    )
    return FeatureDrift(
        feature_id=feature_id,
        verdict=VERDICTS[max(severities)],
        psi=psi[0],
        psi_by_chance=psi[1],
        ks=ks[0],
        ks_by_chance=ks[1],
        present=present,
        reference_present=before,
        mean=new.mean if new.count and not any(texts) else None,
        reference_mean=old.mean if old.count and not any(texts) else None,
        other=other[0],
        reference_other=other[1],
    )


def _of_numbers(
    feature_id: int, training: ColumnSummary, reference: ColumnSummary, settings: DriftConfig
) -> tuple[Figure, Figure, Figure]:
    """Returns (psi, ks, shares of values that the reference lacks, in the training data and in the reference)."""
    ours = training.sample_values(feature_id)
    theirs = reference.sample_values(feature_id)
    if not len(ours) or not len(theirs):
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    before = reference.features[feature_id]
    other: Figure = _UNKNOWN
    if before.low >= 0 and before.high > 1 and before.whole and before.distinct is not None:
        other = float((~np.isin(ours, np.array(before.distinct))).mean()), 0.0
    return stability_index(ours, theirs, settings.num_bins), distance(ours, theirs), other


def _of_levels(training: Mapping[str, int], reference: Mapping[str, int]) -> tuple[Figure, Figure]:
    """Returns (psi, shares of values that the reference lacks, in the training data and in the reference)."""
    levels = [text for text, _ in most_frequent(reference, MAX_LEVEL_BINS)]
    counts = []
    for counts_by_text in (training, reference):
        of_levels = [counts_by_text.get(text, 0) for text in levels]
        counts.append(np.array([*of_levels, sum(counts_by_text.values()) - sum(of_levels)]))
    if not all(of_bins.sum() for of_bins in counts):
        return _UNKNOWN, _UNKNOWN
    ours, theirs = (float(of_bins[-1] / of_bins.sum()) for of_bins in counts)
    return _index(*counts), (ours, theirs)


def _severity(figure: Figure, moderate: float, large: float) -> int:
    """Returns the index in VERDICTS."""
    value, chance = figure
    if value is None or chance is None or value < moderate or value <= chance:
        return 0
    return 1 if value < large else 2


def stability_index(values: Floats, reference: Floats, num_bins: int) -> tuple[float, float]:
    """Returns (population stability index of values [n] against a reference [m], limit that chance rarely exceeds).

    The index is Σ (a − e) ln(a / e) over the bins in which either has values; a and e are their shares. An empty bin
    counts as half a value. By chance the index is about (1/n + 1/m) χ², with one degree of freedom less than there are
    bins (Yurdakul 2018, Statistical Properties of Population Stability Index).
    """
    edges = _edges(reference, num_bins)
    bins = [np.searchsorted(edges, sample, side="left") for sample in (values, reference)]
    return _index(*(np.bincount(of_sample, minlength=len(edges) + 1) for of_sample in bins))


def _index(values: NDArray[np.int64], reference: NDArray[np.int64]) -> tuple[float, float]:
    """Returns `stability_index` for counts by bin."""
    from scipy import stats

    used = (values + reference) > 0
    actual, expected = (np.maximum(of_bins[used], 0.5) / of_bins.sum() for of_bins in (values, reference))
    index = float(((actual - expected) * np.log(actual / expected)).sum())
    freedom = int(used.sum()) - 1
    chance = stats.chi2.ppf(CHANCE, freedom) * (1 / values.sum() + 1 / reference.sum()) if freedom else 0.0
    return index, float(chance)


def _edges(reference: Floats, num_bins: int) -> Floats:
    """Returns the inner bounds of the bins, ascending; a bin has the values above the previous bound, up to its own.

    A value that is several quantiles at once gets a bin of its own: 0 and 1 of a binary feature are never in one bin.
    """
    quantiles = np.quantile(reference, np.arange(num_bins + 1) / num_bins, method="inverted_cdf")
    distinct, times = np.unique(quantiles, return_counts=True)
    return np.unique(np.concatenate((quantiles[1:-1], np.nextafter(distinct[times > 1], -np.inf))))


def distance(values: Floats, reference: Floats) -> tuple[float, float]:
    """Returns (two-sample Kolmogorov-Smirnov statistic of values [n] and [m], limit that chance rarely exceeds)."""
    at = np.concatenate((values, reference))
    ours, theirs = (np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (values, reference))
    # the asymptotic point of Kolmogorov's distribution, by its first term
    chance = np.sqrt(-np.log((1 - CHANCE) / 2) / 2 * (1 / len(values) + 1 / len(reference)))
    return float(np.abs(ours - theirs).max()), float(chance)


def drift_lines(name: str, drift: Drift) -> list[str]:
    """Returns a column's drift as a table, most drifted features first."""
    shown = drift.features[:MOST_TABLE_ROWS]
    width = max(12, *(len(str(feature.feature_id)) for feature in shown))
    heading = f"{'feature':>{width}}  verdict   {'PSI':>8} {'KS':>7}  present             mean"
    lines = [f"drift of {name} against the reference", heading, *(_drift_line(feature, width) for feature in shown)]
    if len(drift.features) > MOST_TABLE_ROWS:
        lines.append(f"{len(drift.features) - MOST_TABLE_ROWS} more in drift.json")
    for what, ids in (("training data", drift.only_in_training), ("reference", drift.only_in_reference)):
        if ids:
            lines.append(f"only in the {what}: {join_names(ids)}")
    return lines


def _drift_line(feature: FeatureDrift, width: int) -> str:
    figures = [("n/a" if figure is None else f"{figure:.4f}") for figure in (feature.psi, feature.ks)]
    means = ["n/a" if mean is None else f"{mean:.4g}" for mean in (feature.reference_mean, feature.mean)]
    others = (
        ""
        if not feature.other and not feature.reference_other
        else f"  other {feature.reference_other:.2%} → {feature.other:.2%}"
    )
    return (
        f"{feature.feature_id!s:>{width}}  {feature.verdict:<8}  {figures[0]:>8} {figures[1]:>7}  "
        f"{feature.reference_present:7.2%} → {feature.present:7.2%}  {means[0]} → {means[1]}{others}"
    )
