"""`publish_if`: condition on an estimate for the export of a model."""

from collections.abc import Iterator
from typing import Literal

from reagent_lite.config.section import Section
from reagent_lite.errors import Problem, suggest_nearest
from reagent_lite.estimator_names import ESTIMATORS_IN_WORDS


class PublishConfig(Section):
    """The model is exported only if the lower bound of an estimate of its policy's value is high enough."""

    estimator: str = "Sequential_Doubly_Robust"
    """Name of the estimator; the verdict `do not use` blocks the export."""
    outcome: str = "Reward"
    """Reward, or the name of a metric."""
    lower_bound_above: Literal["logged"] | float = "logged"
    """A number: the lower bound of the estimate's interval must exceed it. logged: the lower bound of the difference to
    the logged policy, resampled in pairs, must exceed 0."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for an unknown estimator, with the nearest known one."""
        if self.estimator not in ESTIMATORS_IN_WORDS:
            advice = f"Known: {', '.join(ESTIMATORS_IN_WORDS)}"
            yield self.wrong(
                "estimator",
                "an estimator",
                suggest_nearest(self.estimator, list(ESTIMATORS_IN_WORDS), otherwise=advice),
            )
