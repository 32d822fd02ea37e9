"""Estimators of a policy's value from episodes logged by another policy.

An estimator is a function that combines the sums and means named by its parameters; rl.sums has their notation and
terms. One-step estimators estimate the mean reward per row, sequential estimators the mean discounted return per
episode. If an episode's record is cut, estimators with a value model continue with v of the next state.
"""

from collections.abc import Callable
from inspect import signature
from typing import Final

from torch import Tensor

from reagent_lite.rl.likelihood import Contributions
from reagent_lite.rl.magic import blend_returns, step_returns
from reagent_lite.rl.sums import EpisodeSums, Estimator, Evidence, Finish


def rewards_of_rows(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns w r of each row, and its weight as control, summed by episode."""
    rows = sums.per_episode("rows", outcome)
    return Contributions(
        total=sums.per_episode("weighted_reward", outcome),
        size=rows,
        weight=sums.per_episode("weight", outcome) / rows,
        outcome=sums.per_episode("reward", outcome) / rows,
    )


def residuals_of_rows(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns sum_a pi r_hat + w (r - r_hat) of each row, and its weight as control, summed by episode."""
    rows = sums.per_episode("rows", outcome)
    expected = sums.per_episode("reward_expected", outcome)
    return Contributions(
        total=expected + sums.per_episode("residual", outcome),
        size=rows,
        weight=sums.per_episode("weight", outcome) / rows,
        outcome=sums.per_episode("unweighted_residual", outcome) / rows,
        earned=sums.per_episode("reward", outcome) / rows,
        offset=float(expected.sum() / rows.sum()),
    )


def returns_of_episodes(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns sum_t D_t rho_t r_t of each episode, and its rho as control."""
    returns = sums.per_episode("discounted_reward", outcome)
    return _of_episodes(sums, sums.per_episode("decisions", outcome), returns, returns)


def corrected_returns_of_episodes(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns sum_t D_t [rho_t (r_t - q_t) + rho_{t-1} v_t] of each episode, and its rho as control."""
    return _of_episodes(
        sums,
        sums.per_episode("doubly_robust_steps", outcome),
        sums.per_episode("unweighted_corrections", outcome),
        sums.per_episode("discounted_reward", outcome),
        float(sums.per_episode("first_value", outcome).mean()),  # sample weights are 1 on average
    )


def _of_episodes(
    sums: EpisodeSums, total: Tensor, outcome: Tensor, returns: Tensor, offset: float = 0.0
) -> Contributions:
    size = sums.per_episode("episodes", 0)
    return Contributions(
        total=total,
        size=size,
        weight=sums.episode_weights,
        outcome=outcome / size,
        earned=returns / size,
        offset=offset,
    )


def logged_rewards(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns r of each row, summed by episode."""
    return _weigh_equally(sums.per_episode("reward", outcome), sums.per_episode("rows", outcome))


def logged_returns_of(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns sum_t D_t r_t of each episode."""
    return _weigh_equally(sums.per_episode("discounted_reward", outcome), sums.per_episode("episodes", outcome))


def continued_returns(sums: EpisodeSums, outcome: int) -> Contributions:
    """Returns sum_t D_t r_t of each episode, plus the value model's expectation after its cut."""
    returns = sums.per_episode("discounted_reward", outcome) + sums.per_episode("tail", outcome)
    return _weigh_equally(returns, sums.per_episode("episodes", outcome))


def simpler_evidence(sums: EpisodeSums, outcome: int) -> dict[Evidence, Evidence]:
    """Returns which contributions of episodes of one row each are those of another estimator, whose row is a return."""
    same: dict[Evidence, Evidence] = {logged_returns_of: logged_rewards, returns_of_episodes: rewards_of_rows}
    if not sums.per_episode("tail", outcome).any():
        same[continued_returns] = logged_rewards
    return same


def _weigh_equally(total: Tensor, size: Tensor) -> Contributions:
    return Contributions(total=total, size=size, weight=size.new_ones(()).expand_as(size), outcome=total / size)


def estimator(
    name: str,
    *,
    sequential: bool = False,
    model: bool = False,
    weighted: bool = False,
    finish: Finish | None = None,
    evidence: Evidence | None = None,
) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Returns a decorator that turns a function of sums and means into an Estimator.

    Args:
        name: name in reports.
        sequential: whether it estimates the mean discounted return per episode instead of the mean reward per row.
        model: whether the estimate rests on fitted models.
        weighted: whether the estimate rests on importance weights.
        finish: computes the estimate from the function's results of all samples.
        evidence: returns the contribution of each episode.
    """

    def decorate(combine: Callable[..., Tensor]) -> Estimator:
        return Estimator(
            name=name,
            takes=tuple(signature(combine).parameters),
            combine=combine,
            finish=finish,
            sequential=sequential,
            model=model,
            weighted=weighted,
            evidence=evidence,
        )

    return decorate


@estimator("mean_reward", evidence=logged_rewards)
def mean_reward(reward: Tensor, rows: Tensor) -> Tensor:
    """Returns the logged policy's mean reward per row."""
    return reward / rows


@estimator("mean_return", sequential=True, evidence=logged_returns_of)
def mean_return(discounted_reward: Tensor, episodes: Tensor) -> Tensor:
    """Returns the logged policy's mean discounted return per episode."""
    return discounted_reward / episodes


@estimator("continuation", sequential=True, model=True, evidence=continued_returns)
def continuation(tail: Tensor, episodes: Tensor) -> Tensor:
    """Returns mean(D_{t+1} v_{t+1} at the last row of a cut episode): the expected return after the record."""
    return tail / episodes


@estimator("mean_weight", weighted=True)
def mean_weight(weight: Tensor, rows: Tensor) -> Tensor:
    """Returns mean(w), which should be 1."""
    return weight / rows


@estimator("Direct_Method_Reward", model=True)
def direct_method(reward_expected: Tensor, rows: Tensor) -> Tensor:
    """Returns mean(sum_a pi r_hat); Dudik, Langford & Li (2011), section 2.1."""
    return reward_expected / rows


@estimator("IPS_Reward", weighted=True, evidence=rewards_of_rows)
def inverse_propensity(weighted_reward: Tensor, rows: Tensor) -> Tensor:
    """Returns mean(w r); Horvitz & Thompson (1952), as in Dudik, Langford & Li (2011), section 2.1."""
    return weighted_reward / rows


@estimator("Self_Normalized_IPS_Reward", weighted=True, evidence=rewards_of_rows)
def self_normalized_inverse_propensity(weighted_reward: Tensor, weight: Tensor) -> Tensor:
    """Returns sum(w r) / sum(w); Swaminathan & Joachims (2015)."""
    return weighted_reward / weight


@estimator("Doubly_Robust_Reward", model=True, weighted=True, evidence=residuals_of_rows)
def doubly_robust(reward_expected: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
    """Returns DM + mean(w (r - r_hat)); Dudik, Langford & Li (2011), section 3."""
    return (reward_expected + residual) / rows


@estimator("Self_Normalized_Doubly_Robust_Reward", model=True, weighted=True, evidence=residuals_of_rows)
def self_normalized_doubly_robust(reward_expected: Tensor, rows: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Returns DM + sum(w (r - r_hat)) / sum(w): the correction is normalized as in SNIPS."""
    return reward_expected / rows + residual / weight


@estimator("Switch_Doubly_Robust_Reward", model=True, weighted=True)
def switch_doubly_robust(reward_expected: Tensor, switched_residual: Tensor, rows: Tensor) -> Tensor:
    """Returns DM + mean(w (r - r_hat) [w <= tau]); Wang, Agarwal & Dudik (2017), SWITCH-DR."""
    return (reward_expected + switched_residual) / rows


@estimator("Shrunk_Doubly_Robust_Reward", model=True, weighted=True)
def shrunk_doubly_robust(reward_expected: Tensor, shrunk_residual: Tensor, rows: Tensor) -> Tensor:
    """Returns DM + mean(s (r - r_hat)), s = lambda w / (w^2 + lambda); Su et al. (2020), DRos."""
    return (reward_expected + shrunk_residual) / rows


@estimator("Fitted_Q_Evaluation", sequential=True, model=True)
def fitted_value(first_value: Tensor, episodes: Tensor) -> Tensor:
    """Returns mean(v_0): the value model alone; Le, Voloshin & Yue (2019), FQE."""
    return first_value / episodes


@estimator("Per_Decision_Importance_Sampling", sequential=True, weighted=True, evidence=returns_of_episodes)
def per_decision(decisions: Tensor, episodes: Tensor) -> Tensor:
    """Returns mean(sum_t D_t rho_t r_t): PDIS; Precup, Sutton & Singh (2000)."""
    return decisions / episodes


@estimator("Weighted_Per_Decision_Importance_Sampling", sequential=True, weighted=True, evidence=returns_of_episodes)
def weighted_per_decision(discounted_rewards: Tensor) -> Tensor:
    """Returns sum_t sum_i omega_t D_t r_t: CWPDIS; Thomas & Brunskill (2016), after Thomas (2015)."""
    return discounted_rewards.sum(1)


@estimator(
    "Sequential_Doubly_Robust", sequential=True, model=True, weighted=True, evidence=corrected_returns_of_episodes
)
def sequential_doubly_robust(doubly_robust_steps: Tensor, episodes: Tensor) -> Tensor:
    """Returns mean(sum_t D_t [rho_t (r_t - q_t) + rho_{t-1} v_t]), rho_{-1} = 1; Jiang & Li (2016)."""
    return doubly_robust_steps / episodes


@estimator(
    "Weighted_Sequential_Doubly_Robust",
    sequential=True,
    model=True,
    weighted=True,
    evidence=corrected_returns_of_episodes,
)
def weighted_doubly_robust(first_value: Tensor, episodes: Tensor, corrections: Tensor) -> Tensor:
    """Returns sequential DR with omega_t for rho_t / n, and 1 / n at t = -1: WDR; Thomas & Brunskill (2016)."""
    return first_value / episodes + corrections.sum(1)


@estimator("MAGIC", sequential=True, model=True, weighted=True, finish=blend_returns)
def magic(first_value: Tensor, episodes: Tensor, corrections: Tensor) -> Tensor:
    """Returns the blend of j-step returns with the least estimated error: MAGIC; Thomas & Brunskill (2016).

    x minimizes x' (Omega + b b' + eps I) x over the simplex; Omega is n Cov of the per-episode contributions, b_j the
    distance of g_j from WDR's bootstrap interval. The interval comes from all R samples and is shifted to the WDR of
    each; every sample uses the Omega of row 0. Bootstrapping both again inside each sample would square the cost.
    """
    return step_returns(first_value / episodes, corrections)


LOGGED: Final = (mean_reward, mean_return, continuation, mean_weight)
"""Figures of the log that estimates are compared with."""
ESTIMATORS: Final[dict[str, Estimator]] = {
    entry.name: entry
    for entry in (
        direct_method, inverse_propensity, self_normalized_inverse_propensity, doubly_robust,
        self_normalized_doubly_robust, switch_doubly_robust, shrunk_doubly_robust,
        fitted_value, per_decision, weighted_per_decision, sequential_doubly_robust, weighted_doubly_robust, magic,
    )
}  # fmt: skip
CHEAP_ESTIMATORS: Final = tuple(entry for entry in ESTIMATORS.values() if entry is not magic)
"""All estimators but MAGIC, whose quadratic programs are a third of the work."""
