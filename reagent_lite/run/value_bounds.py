"""The range of values that the rewards of the training data allow, and warnings about the learner's values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reagent_lite.algorithms.policy_learner import PolicyLearner, reward_boost
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.data.sampling.source import LoggedRows
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.rl.td import discount, value_bounds

_SLACK = 0.01  # of the larger bound: the mean of estimates may lie a little beyond a bound that is reached
_ROWS_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnBounds:
    """The range of discounted returns that the rewards of the training data allow, reward boosts included.

    Attributes:
        bounds: the lowest value, at most 0, and the highest, at least 0.
        vary: whether there is anything to learn: rows differ in reward, or in discount if rewards are not 0.
    """

    bounds: tuple[float, float]
    vary: bool = True

    def excess(self, mean: float) -> float:
        """Returns the distance of a mean value from the range; 0 if it is inside, or beyond by a small tolerance."""
        outside = max(mean - self.bounds[1], self.bounds[0] - mean)
        size = max((abs(bound) for bound in self.bounds if math.isfinite(bound)), default=0.0)
        return outside if outside > _SLACK * size > 0 else 0.0

    def warning(self, mean: float) -> str:
        """Returns the warning for a mean value outside the range."""
        low, high = self.bounds
        return (
            f"the policy's choices have a mean value of {mean:.4g}, but the rewards of the training data only allow "
            f'values from {low:.4g} to {high:.4g}: do not rely on the values. Try rl.value_bounds "rewards" '
            "(with rainbow.categorical: qmin and qmax), a larger rl.cql_alpha, rainbow.bcq, or a smaller "
            "rl.target_update_rate"
        )

    def warn(self, mean: float, before: float = 0.0) -> float:
        """Logs the warning for a mean value more than twice as far outside as before; returns the distance logged."""
        excess = self.excess(mean)
        if excess <= 2 * before:
            return before
        logger.warning(self.warning(mean))
        return excess

    def document(self, mean: float) -> dict[str, Any]:
        """Returns the entries of evaluation.json for a mean value: the range, null for no bound, and the warning."""
        low, high = (bound if math.isfinite(bound) else None for bound in self.bounds)
        warnings = [f"{self.warning(mean)}."] if self.excess(mean) else []
        return {"values": {"mean": mean, "low": low, "high": high}, "warnings": warnings}

    def no_better_than_constant(self, figures: Mapping[str, float], learner: PolicyLearner) -> str | None:
        """Returns a warning if one value for all rows has no larger TD loss than the learner's values, or None.

        None as well if there is nothing to learn, and for losses of distributions.

        Args:
            figures: figures of the learner on evaluated rows, by TensorBoard tag.
            learner: the learner, which has the loss.
        """
        mean = figures.get("td_target/mean")
        variance = figures.get("td_target/variance")
        if mean is None or variance is None or not self.vary or not variance:
            return None
        constant = learner.constant_loss(mean, variance)
        loss = figures["td_loss/mean"]
        if constant is None or loss < constant:
            return None
        return (
            f"the learned values are no better than one value for all rows: they have a TD loss of {loss:.4g} on "
            f"evaluated rows, and that value has {constant:.4g}. {learner.advice} that the rewards depend on the "
            "state features and the actions"
        )


def return_bounds(config: WorkflowConfig, rows: LoggedRows, group: Group) -> ReturnBounds | None:
    """Returns the range of values that the rewards of all machines' rows allow; every rank calls it.

    None if rows are simulated, as their rewards are not known in advance.

    Raises:
        ConfigError: rl.value_bounds is "rewards", but there are no bounds, as gamma is 1.
    """
    if config.simulated_share:
        return None
    boost = reward_boost(config)
    extremes = torch.tensor([0.0, 0.0, *[-torch.inf] * 4], dtype=torch.float64)
    for start in range(0, max(rows.count, 1), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, rows.count)
        numbers = rows.numbers(torch.arange(start, stop, device=rows.device))
        reward, steps, bootstrap = (column[numbers].double() for column in (rows.reward, rows.steps, rows.bootstrap))
        if boost is not None:
            reward = reward + boost.to(reward)[rows.action[numbers].long().clamp(min=0)]
        factor = discount(config.rl.gamma, steps, bootstrap)
        if rows.count:
            least, most = value_bounds(reward, factor)
            of_part = (-least, most, -reward.amin(), reward.amax(), -factor.amin(), factor.amax())
            extremes = torch.maximum(extremes, torch.tensor(of_part, dtype=torch.float64))
    minus_low, high, minus_least_reward, most_reward, minus_least_factor, most_factor = group.all_reduce_max(
        extremes
    ).tolist()
    low = -minus_low
    if config.rl.value_bounds == "rewards" and math.isinf(low) and math.isinf(high):
        raise ConfigError(
            Problem(
                "rl.value_bounds",
                "[low, high] or null, as rewards of both signs have no bound without a discount",
                '"rewards"',
            )
        )
    rewards_vary = most_reward > -minus_least_reward
    return ReturnBounds(
        bounds=(low, high), vary=rewards_vary or (most_factor > -minus_least_factor and most_reward != 0)
    )
