"""`drift`: from where on the distributions of two data sets count as different."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from reagent_lite.config.section import Positive, PositiveShare, Section
from reagent_lite.errors import Problem


class DriftConfig(Section):
    """Thresholds: a feature is moderate or large as soon as one of its three figures is."""

    num_bins: Annotated[int, Field(ge=2, le=100)] = 10
    """Bins of the population stability index, at equal shares of the reference."""
    psi_moderate: Positive = 0.1
    """Population stability index; 0.1 and 0.25 are the customary limits (Siddiqi, Credit Risk Scorecards, 2006)."""
    psi_large: Positive = 0.25
    """Population stability index from which the shift is large."""
    ks_moderate: PositiveShare = 0.1
    """Two-sample Kolmogorov-Smirnov statistic: the largest distance between the two distribution functions."""
    ks_large: PositiveShare = 0.2
    """Kolmogorov-Smirnov statistic from which the shift is large."""
    present_moderate: PositiveShare = 0.05
    """Difference between the shares of rows in which the feature is present."""
    present_large: PositiveShare = 0.2
    """Difference of these shares from which the shift is large."""

    def rules(self) -> Iterator[Problem]:
        """Yields limits that are not below each other."""
        for name in ("psi", "ks", "present"):
            large = f"{name}_large"
            if getattr(self, f"{name}_moderate") >= getattr(self, large):
                yield self.wrong(f"{name}_moderate", f"a number below {large} ({getattr(self, large):g})")
