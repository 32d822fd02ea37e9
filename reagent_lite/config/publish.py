"""`publish_if`: what an estimate must show before a model is exported."""

from collections.abc import Iterator
from typing import Literal

from reagent_lite.config.section import Section
from reagent_lite.errors import Problem, nearest

ESTIMATOR_NAMES = (
    "Direct_Method_Reward", "IPS_Reward", "Self_Normalized_IPS_Reward", "Doubly_Robust_Reward",
    "Self_Normalized_Doubly_Robust_Reward", "Switch_Doubly_Robust_Reward", "Shrunk_Doubly_Robust_Reward",
    "Fitted_Q_Evaluation", "Per_Decision_Importance_Sampling", "Weighted_Per_Decision_Importance_Sampling",
    "Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust", "MAGIC",
)  # fmt: skip
"""Keys of rl.estimators.ESTIMATORS, which imports torch; a test holds one against the other."""


class PublishConfig(Section):
    """The model is exported only if the lower bound of an estimate of its policy's value is high enough."""

    estimator: str = "Sequential_Doubly_Robust"
    """Whose estimate; one whose verdict is `do not use` holds the model back."""
    outcome: str = "Reward"
    """Reward, or the name of a metric."""
    lower_bound_above: Literal["logged"] | float = "logged"
    """A number: the lower bound of the estimate's interval lies above it. logged: the lower bound of the difference to
    the logged policy, resampled in pairs, lies above 0."""

    def rules(self) -> Iterator[Problem]:
        """Yields an unknown estimator, with the nearest known one."""
        if self.estimator not in ESTIMATOR_NAMES:
            known = f"Known: {', '.join(ESTIMATOR_NAMES)}"
            yield self.wrong("estimator", "an estimator", nearest(self.estimator, ESTIMATOR_NAMES, otherwise=known))
