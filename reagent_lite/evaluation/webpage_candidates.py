"""What the report page says of choices among candidates, which have features in place of names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateFeature:
    """A feature of candidates that are chosen.

    Attributes:
        name: its id.
        logged, policy: mean and standard deviation over the log's choices and over the policy's.
        difference: of the means, in standard deviations; None where nothing varies.
    """

    name: str
    logged: tuple[float | None, float | None]
    policy: tuple[float | None, float | None]
    difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PropensityBin:
    """Rows whose logged propensity lies in (low, high].

    Attributes:
        low, high: ends.
        rows: share of all.
        propensity, policy: mean probability of the logged candidate under the log and under the policy.
    """

    low: float
    high: float
    rows: float
    propensity: float
    policy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What the policy chooses where candidates have no names.

    Attributes:
        rows: counted.
        same: share of rows in which the policy's likeliest candidate is the logged one.
        propensity, policy: mean probability of the logged candidate under the log, None where it does not say, and
            under the policy.
        bins: the same by propensity.
        lengths: (number of candidates, share of rows).
        features: the largest differences first.
    """

    rows: int
    same: float | None
    propensity: float | None
    policy: float | None
    bins: tuple[PropensityBin, ...]
    lengths: tuple[tuple[str, float], ...]
    features: tuple[CandidateFeature, ...]


def chosen_candidates(document: Mapping[str, Any] | None) -> Candidates | None:
    """Returns what candidates.CandidateTally.document gives, for the page; None where nothing was counted."""
    if not document or not document["rows"]:
        return None
    features = tuple(
        CandidateFeature(name=name, logged=(one["logged"]["mean"], one["logged"]["stddev"]),
                         policy=(one["policy"]["mean"], one["policy"]["stddev"]), difference=one["difference"])
        for name, one in document["features"].items()
    )  # fmt: skip
    return Candidates(
        rows=document["rows"],
        same=document["same"],
        propensity=document["propensity"],
        policy=document["probability"],
        bins=tuple(PropensityBin(**one) for one in document["by_propensity"]),
        lengths=tuple(sorted(document["candidates"].items(), key=lambda one: int(one[0].split()[0]))),
        features=tuple(sorted(features, key=lambda one: -abs(one.difference or 0.0))),
    )
