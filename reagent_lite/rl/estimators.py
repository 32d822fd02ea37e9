"""Estimators of a policy's value from episodes logged by another policy.

Notation: n episodes, L steps, R samples; w_t = pi(a_t) / mu(a_t), rho_t = w_0 ... w_t, held constant after an episode
ends; omega_t^i = rho_t^i / sum_j rho_t^j over all n episodes; v = sum_a pi(a) q(a); D_t the discount from the start.

Every estimator is a function of the episodes and of counts [R, n] (rl.bootstrap): how often each episode is in each
sample. It returns the estimate in each sample, [R]; row 0 is the sample itself. What a sample leaves undefined is NaN.
One-step forms estimate the mean reward of a row, sequential forms the mean discounted return of an episode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from reagent_lite.rl.magic import blend, covariance
from reagent_lite.rl.weights import log_cumulative_weights, relative_weights, safe_divide, weighted_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Logged episodes beside each other, float64; past an episode's end weight is 1 and everything else 0.

    Attributes:
        running: [n, L] 1 where the episode has a row, else 0.
        weight: [n, L] pi / mu of the logged action.
        discount: [n, L] gamma to the power of the time since the episode's start.
        reward: [n, L].
        reward_taken: [n, L] reward model at the logged action.
        reward_expected: [n, L] reward model, mean over the evaluated policy.
        value_taken: [n, L] q of the logged action.
        value_expected: [n, L] v, mean of q over the evaluated policy.
    """

    running: Tensor
    weight: Tensor
    discount: Tensor
    reward: Tensor
    reward_taken: Tensor
    reward_expected: Tensor
    value_taken: Tensor
    value_expected: Tensor


def mean_reward(e: Episodes, counts: Tensor) -> Tensor:
    """Returns the logged policy's mean reward of a row, [R]."""
    return _row_mean(e.reward, e, counts)


def mean_return(e: Episodes, counts: Tensor) -> Tensor:
    """Returns the logged policy's mean discounted return of an episode, [R]."""
    return _episode_mean((e.discount * e.reward).sum(1), counts)


def direct_method(e: Episodes, counts: Tensor) -> Tensor:
    """Returns mean(sum_a pi r_hat); Dudik, Langford & Li (2011), section 2.1."""
    return _row_mean(e.reward_expected, e, counts)


def inverse_propensity(e: Episodes, counts: Tensor) -> Tensor:
    """Returns mean(w r); Horvitz & Thompson (1952), as in Dudik, Langford & Li (2011), section 2.1."""
    return _row_mean(e.weight * e.reward, e, counts)


def self_normalized_inverse_propensity(e: Episodes, counts: Tensor) -> Tensor:
    """Returns sum(w r) / sum(w); Swaminathan & Joachims (2015)."""
    return _weighted_row_mean(e.reward, e, counts)


def doubly_robust(e: Episodes, counts: Tensor) -> Tensor:
    """Returns DM + mean(w (r - r_hat)); Dudik, Langford & Li (2011), section 3."""
    return _corrected(e.weight, e, counts)


def self_normalized_doubly_robust(e: Episodes, counts: Tensor) -> Tensor:
    """Returns DM + sum(w (r - r_hat)) / sum(w): the correction is normalized as in SNIPS."""
    return direct_method(e, counts) + _weighted_row_mean(e.reward - e.reward_taken, e, counts)


def switch_doubly_robust(e: Episodes, counts: Tensor, threshold: float = 10.0) -> Tensor:
    """Returns DM + mean(w (r - r_hat) [w <= threshold]); Wang, Agarwal & Dudik (2017), SWITCH-DR."""
    return _corrected(torch.where(e.weight <= threshold, e.weight, 0), e, counts)


def shrunk_doubly_robust(e: Episodes, counts: Tensor, strength: float = 100.0) -> Tensor:
    """Returns DM + mean(s (r - r_hat)), s = lambda w / (w^2 + lambda); Su et al. (2020), DRos.

    `strength` is lambda: 0 gives DM, infinity DR.
    """
    return _corrected(strength * e.weight / (e.weight.square() + strength), e, counts)


def fitted_value(e: Episodes, counts: Tensor) -> Tensor:
    """Returns mean(v_0): the value model alone; Le, Voloshin & Yue (2019), FQE."""
    return _episode_mean(e.value_expected[:, 0], counts)


def per_decision(e: Episodes, counts: Tensor) -> Tensor:
    """Returns mean(sum_t D_t rho_t r_t): PDIS; Precup, Sutton & Singh (2000)."""
    return _episode_mean((e.discount * _weights(e) * e.reward).sum(1), counts)


def weighted_per_decision(e: Episodes, counts: Tensor) -> Tensor:
    """Returns sum_t sum_i omega_t D_t r_t: CWPDIS; Thomas & Brunskill (2016), after Thomas (2015)."""
    return _defined(weighted_sums(_relative(e), e.discount * e.reward, counts).sum(1), e, counts)


def sequential_doubly_robust(e: Episodes, counts: Tensor) -> Tensor:
    """Returns mean(sum_t D_t [rho_t (r_t - q_t) + rho_{t-1} v_t]), rho_{-1} = 1; Jiang & Li (2016)."""
    rho = _weights(e)
    previous = torch.cat((torch.ones_like(rho[:, :1]), rho[:, :-1]), 1)
    terms = e.discount * (rho * (e.reward - e.value_taken) + previous * e.value_expected)
    return _episode_mean(terms.sum(1), counts)


def weighted_doubly_robust(e: Episodes, counts: Tensor) -> Tensor:
    """Returns sequential DR with omega_t for rho_t / n, and 1 / n at t = -1: WDR; Thomas & Brunskill (2016)."""
    return _defined(step_returns(e, counts)[:, -1], e, counts)


def magic(e: Episodes, counts: Tensor, max_lengths: int = 32) -> Tensor:
    """Returns the blend of j-step returns of least estimated error: MAGIC; Thomas & Brunskill (2016).

    x minimizes x' (Omega + b b' + eps I) x over the simplex; Omega = n Cov of the per-episode contributions, b_j the
    distance of g_j from WDR's bootstrap interval. The interval comes from the samples of `counts`; in sample r
    it is shifted to that sample's WDR, and Omega is that of row 0: to bootstrap both again inside every sample would
    square the cost. At most `max_lengths` return lengths take part, DM (j = -1) and WDR (all steps) among them.
    """
    count = min(max_lengths, e.reward.shape[1] + 1)
    lengths = torch.linspace(0, e.reward.shape[1], count, dtype=torch.float64).round().long()
    returns = step_returns(e, counts)[:, lengths]
    omega = covariance(step_contributions(e)[:, lengths])
    return _defined(blend(returns, omega), e, counts)


def step_returns(e: Episodes, counts: Tensor) -> Tensor:
    """Returns the j-step returns g_j for j = -1 ... L - 1, [R, L + 1]; Thomas & Brunskill (2016).

    g_j = sum_{t<=j} sum_i D_t omega_t (r_t - q_t) + sum_{t<=j+1} sum_i D_t omega_{t-1} v_t.
    """
    relative = _relative(e)
    corrections = weighted_sums(relative, e.discount * (e.reward - e.value_taken), counts)
    values = e.discount * e.value_expected
    first = _episode_mean(values[:, 0], counts).unsqueeze(1)
    later = weighted_sums(relative[:, :-1], values[:, 1:], counts)
    later = torch.cat((later, torch.zeros_like(first)), 1)
    return torch.cat((first, first + (corrections + later).cumsum(1)), 1)


def step_contributions(e: Episodes) -> Tensor:
    """Returns what each episode adds to each g_j of the whole sample, [n, L + 1]; their sum over n is g_j."""
    relative = _relative(e)
    omega = safe_divide(relative, relative.sum(0))
    values = e.discount * e.value_expected
    first = values[:, :1] / len(values)
    later = torch.cat((omega[:, :-1] * values[:, 1:], torch.zeros_like(first)), 1)
    corrections = omega * e.discount * (e.reward - e.value_taken)
    return torch.cat((first, first + (corrections + later).cumsum(1)), 1)


def _weights(e: Episodes) -> Tensor:
    """Returns rho, [n, L], at most e^600 so that sums stay finite."""
    return log_cumulative_weights(e.weight).clamp(max=600).exp()


def _relative(e: Episodes) -> Tensor:
    return relative_weights(log_cumulative_weights(e.weight))


def _episode_mean(values: Tensor, counts: Tensor) -> Tensor:
    return counts @ values / counts.sum(1)


def _row_mean(values: Tensor, e: Episodes, counts: Tensor) -> Tensor:
    return counts @ (values * e.running).sum(1) / (counts @ e.running.sum(1))


def _weighted_row_mean(values: Tensor, e: Episodes, counts: Tensor) -> Tensor:
    weight = e.weight * e.running
    return counts @ (weight * values).sum(1) / (counts @ weight.sum(1))


def _corrected(weight: Tensor, e: Episodes, counts: Tensor) -> Tensor:
    return _row_mean(e.reward_expected + weight * (e.reward - e.reward_taken), e, counts)


def _defined(estimates: Tensor, e: Episodes, counts: Tensor) -> Tensor:
    """NaN where a sample has no weight at the first step: nothing in it tells of the evaluated policy."""
    return torch.where(counts @ e.weight[:, 0] > 0, estimates, torch.nan)


Estimator = Callable[[Episodes, Tensor], Tensor]

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
ESTIMATORS: Final[dict[str, Estimator]] = {**ONE_STEP_ESTIMATORS, **SEQUENTIAL_ESTIMATORS}
