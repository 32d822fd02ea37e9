"""Estimators of a policy's value from episodes logged by another policy.

Notation: n episodes, L steps, R samples; w_t = pi(a_t) / mu(a_t), rho_t = w_0 ... w_t, held constant after an episode
ends; omega_t^i = rho_t^i / sum_j rho_t^j over all n episodes; v = sum_a pi(a) q(a); D_t the discount from the start.
Where the record of an episode is cut, estimators with a value model continue with v of the next state, as FQE does.

Every estimator is a function of sums over the episodes of each sample (rl.sums) and returns the estimate in each, [R];
row 0 is the sample itself. What a sample leaves undefined is NaN. It can be called with Episodes and counts [R, n]
(rl.bootstrap) too, one estimator alone. One-step forms estimate the mean reward of a row, sequential forms the mean
discounted return of an episode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from reagent_lite.rl.episodes import Episodes
from reagent_lite.rl.magic import blend
from reagent_lite.rl.sums import Settings, Sums, sample_sums, table_of


@dataclass(frozen=True)
class Estimator:
    """An estimator of a policy's value.

    Attributes:
        of: the estimate in each sample, [R], from its sums.
    """

    of: Callable[[Sums], Tensor]

    def __call__(self, episodes: Episodes, counts: Tensor, settings: Settings | None = None) -> Tensor:
        """Returns the estimate in each sample, [R], given how often each episode is in it, counts [R, n]."""
        return self.of(sample_sums(table_of([[episodes]], settings), [counts], settings)[0])


@Estimator
def mean_reward(s: Sums) -> Tensor:
    """Returns the logged policy's mean reward of a row."""
    return s.reward / s.rows


@Estimator
def mean_return(s: Sums) -> Tensor:
    """Returns the logged policy's mean discounted return of an episode."""
    return s.discounted_reward / s.episodes


@Estimator
def direct_method(s: Sums) -> Tensor:
    """Returns mean(sum_a pi r_hat); Dudik, Langford & Li (2011), section 2.1."""
    return s.reward_expected / s.rows


@Estimator
def inverse_propensity(s: Sums) -> Tensor:
    """Returns mean(w r); Horvitz & Thompson (1952), as in Dudik, Langford & Li (2011), section 2.1."""
    return s.weighted_reward / s.rows


@Estimator
def self_normalized_inverse_propensity(s: Sums) -> Tensor:
    """Returns sum(w r) / sum(w); Swaminathan & Joachims (2015)."""
    return s.weighted_reward / s.weight


@Estimator
def doubly_robust(s: Sums) -> Tensor:
    """Returns DM + mean(w (r - r_hat)); Dudik, Langford & Li (2011), section 3."""
    return direct_method.of(s) + s.residual / s.rows


@Estimator
def self_normalized_doubly_robust(s: Sums) -> Tensor:
    """Returns DM + sum(w (r - r_hat)) / sum(w): the correction is normalized as in SNIPS."""
    return direct_method.of(s) + s.residual / s.weight


@Estimator
def switch_doubly_robust(s: Sums) -> Tensor:
    """Returns DM + mean(w (r - r_hat) [w <= tau]); Wang, Agarwal & Dudik (2017), SWITCH-DR."""
    return direct_method.of(s) + s.switched_residual / s.rows


@Estimator
def shrunk_doubly_robust(s: Sums) -> Tensor:
    """Returns DM + mean(s (r - r_hat)), s = lambda w / (w^2 + lambda); Su et al. (2020), DRos."""
    return direct_method.of(s) + s.shrunk_residual / s.rows


@Estimator
def fitted_value(s: Sums) -> Tensor:
    """Returns mean(v_0): the value model alone; Le, Voloshin & Yue (2019), FQE."""
    return s.first_value / s.episodes


@Estimator
def per_decision(s: Sums) -> Tensor:
    """Returns mean(sum_t D_t rho_t r_t): PDIS; Precup, Sutton & Singh (2000)."""
    return s.per_decision / s.episodes


@Estimator
def weighted_per_decision(s: Sums) -> Tensor:
    """Returns sum_t sum_i omega_t D_t r_t: CWPDIS; Thomas & Brunskill (2016), after Thomas (2015)."""
    return _defined(s.weighted_per_decision, s)


@Estimator
def sequential_doubly_robust(s: Sums) -> Tensor:
    """Returns mean(sum_t D_t [rho_t (r_t - q_t) + rho_{t-1} v_t]), rho_{-1} = 1; Jiang & Li (2016)."""
    return s.doubly_robust / s.episodes


@Estimator
def weighted_doubly_robust(s: Sums) -> Tensor:
    """Returns sequential DR with omega_t for rho_t / n, and 1 / n at t = -1: WDR; Thomas & Brunskill (2016)."""
    return _defined(s.step_returns[:, -1], s)


@Estimator
def magic(s: Sums) -> Tensor:
    """Returns the blend of j-step returns of least estimated error: MAGIC; Thomas & Brunskill (2016).

    x minimizes x' (Omega + b b' + eps I) x over the simplex; Omega = n Cov of the per-episode contributions, b_j the
    distance of g_j from WDR's bootstrap interval. The interval comes from all R samples; in sample r
    it is shifted to that sample's WDR, and Omega is that of row 0: to bootstrap both again inside every sample would
    square the cost.
    """
    return _defined(blend(s.step_returns, s.omega), s)


def _defined(estimates: Tensor, s: Sums) -> Tensor:
    """NaN where a sample has no weight at the first step: nothing in it tells of the evaluated policy."""
    return torch.where(s.first_weight > 0, estimates, torch.nan)


ONE_STEP_ESTIMATORS: Final[dict[str, Estimator]] = {
    "Direct_Method_Reward": direct_method,
    "IPS_Reward": inverse_propensity,
    "Self_Normalized_IPS_Reward": self_normalized_inverse_propensity,
    "Doubly_Robust_Reward": doubly_robust,
    "Self_Normalized_Doubly_Robust_Reward": self_normalized_doubly_robust,
    "Switch_Doubly_Robust_Reward": switch_doubly_robust,
    "Shrunk_Doubly_Robust_Reward": shrunk_doubly_robust,
}
SEQUENTIAL_ESTIMATORS: Final[dict[str, Estimator]] = {
    "Fitted_Q_Evaluation": fitted_value,
    "Per_Decision_Importance_Sampling": per_decision,
    "Weighted_Per_Decision_Importance_Sampling": weighted_per_decision,
    "Sequential_Doubly_Robust": sequential_doubly_robust,
    "Weighted_Sequential_Doubly_Robust": weighted_doubly_robust,
    "MAGIC": magic,
}
CONTINUED: Final = frozenset(
    {"Fitted_Q_Evaluation", "Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust", "MAGIC"}
)
"""Estimators that count what the value model expects after the cut of a record."""
ESTIMATORS: Final[dict[str, Estimator]] = {**ONE_STEP_ESTIMATORS, **SEQUENTIAL_ESTIMATORS}
