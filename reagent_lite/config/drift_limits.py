"""`drift`: thresholds for the difference between two data sets."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from reagent_lite.config.section import Positive, PositiveShare, Section
from reagent_lite.errors import Problem


class DriftConfig(Section):
    """Thresholds of drift; a feature's drift is the largest of its three figures."""

    num_bins: Annotated[int, Field(ge=2, le=100)] = 10
    """Bins of the population stability index, each with the same share of the reference."""
    psi_moderate: Positive = 0.1
    """Population stability index at which drift is moderate; 0.1 and 0.25 are the customary limits (Siddiqi, Credit
    Risk Scorecards, 2006)."""
    psi_large: Positive = 0.25
    """Population stability index at which drift is large."""
    ks_moderate: PositiveShare = 0.1
    """Two-sample Kolmogorov-Smirnov statistic, the largest distance between the distribution functions, at which drift
    is moderate."""
    ks_large: PositiveShare = 0.2
    """Kolmogorov-Smirnov statistic at which drift is large."""
    present_moderate: PositiveShare = 0.05
    """Difference between the shares of rows with the feature at which drift is moderate."""
    present_large: PositiveShare = 0.2
    """Difference between these shares at which drift is large."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each moderate limit that is not below the large one."""
        for name in ("psi", "ks", "present"):
            large = f"{name}_large"
            if getattr(self, f"{name}_moderate") >= getattr(self, large):
                yield self.wrong(f"{name}_moderate", f"a number below {large} ({getattr(self, large):g})")
