"""Estimates from simulated logs against exact values."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import gridworld
from oracles.batches import make_batch
from oracles.pages import gridworld_page, noisy_q
from torch import Tensor

from reagent_lite.algorithms.cpe_heads import build_cpe_heads, fit_heads
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import evaluate_page
from reagent_lite.evaluation.page import build_page, held_out
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.models.q_networks import NetworkSettings
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

# epsilon of the evaluated policy: exact value at the start, epsilon of the log
VALUES = {
    1.0: (0.332371, 0.9),
    0.8: (1.028097, 0.9),
    0.5: (2.588442, 0.6),
    0.2: (4.003114, 0.4),
    0.05: (4.552028, 0.2),
    0.0: (4.711349, 0.2),
}


def test_optimal_values_are_the_published_ones():
    values = gridworld.optimal_values()
    np.testing.assert_allclose(values[:5], [4.7250, 5.2554, 5.8457, 6.5084, 7.2047], atol=5e-5)
    np.testing.assert_allclose(values[20:24], [7.2107, 8.0356, 8.9551, 9.9704], atol=5e-5)


def test_values_of_the_random_policy_are_the_published_ones():
    values = gridworld.policy_values(gridworld.random_policy())
    np.testing.assert_allclose(values[:5], [0.3324, 0.4027, 0.6512, 1.0473, 1.2433], atol=5e-5)
    np.testing.assert_allclose(values[[15, 16, 18, 19]], [0.6345, 0.7575, 4.0237, 5.4001], atol=5e-5)


def test_transitions_and_both_kinds_of_q_are_consistent():
    p, mask = gridworld.transition_matrix(), gridworld.allowed()
    np.testing.assert_allclose(p.sum(2), mask)
    # greedy in the optimal q is a policy whose own q is the optimal one
    q = gridworld.optimal_q()
    greedy = np.eye(4)[np.where(mask, q, -np.inf).argmax(1)] * mask.any(1, keepdims=True)
    np.testing.assert_allclose(gridworld.policy_q(greedy), q, atol=1e-9)


@pytest.mark.parametrize("epsilon", VALUES)
def test_exact_value_of_epsilon_greedy(epsilon: float):
    values = gridworld.policy_values(gridworld.epsilon_greedy(epsilon))
    assert values[gridworld.START] == pytest.approx(VALUES[epsilon][0], abs=1e-6)


@pytest.mark.parametrize("epsilon", VALUES)
def test_estimates_from_a_log_cover_the_exact_value(epsilon: float):
    truth, logged = VALUES[epsilon]
    rng = np.random.default_rng(round(100 * epsilon))
    policy = gridworld.epsilon_greedy(epsilon)
    log = gridworld.simulate(gridworld.epsilon_greedy(logged), 2000, rng)
    page = gridworld_page(log, policy, noisy_q(policy, 0.1, rng))
    config = EvaluationConfig(confidence_level=0.99, bootstrap_resamples=500)
    result = evaluate_page(page, gamma=gridworld.GAMMA, config=config, generator=torch.Generator().manual_seed(0))
    family = result.outcomes[0].sequential
    checked = [e for e in family.estimates if e.name != "Fitted_Q_Evaluation" and e.verdict is not Verdict.DO_NOT_USE]
    assert "Weighted_Sequential_Doubly_Robust" in [e.name for e in checked]
    for estimate in checked:
        assert estimate.figure.low <= truth <= estimate.figure.high, estimate
    assert result.overlap is not None
    assert abs(result.overlap.mean_weight.value - 1) < 0.05
    behaviour = gridworld.policy_values(gridworld.epsilon_greedy(logged))[gridworld.START]
    assert family.logged.low <= behaviour <= family.logged.high


def test_a_log_too_far_from_the_policy_is_not_used():
    # random decisions: hardly an episode follows the policy to the goal, and weighted estimates miss by far
    rng = np.random.default_rng(0)
    policy = gridworld.epsilon_greedy(0.1)
    page = gridworld_page(gridworld.simulate(gridworld.random_policy(), 300, rng), policy, noisy_q(policy, 0.1, rng))
    config = EvaluationConfig(bootstrap_resamples=200)
    result = evaluate_page(page, gamma=gridworld.GAMMA, config=config, generator=torch.Generator().manual_seed(0))
    for estimate in result.outcomes[0].sequential.estimates:
        if estimate.name != "Fitted_Q_Evaluation":
            assert estimate.verdict is Verdict.DO_NOT_USE, estimate
            assert "effective episodes" in estimate.reason


def test_fitted_models_and_estimates_work_together():
    # heads fitted on some episodes, page and estimates from others, as a workflow joins them
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    log = gridworld.simulate(gridworld.epsilon_greedy(0.5), 1000, rng)
    table = torch.from_numpy(gridworld.epsilon_greedy(0.3)).float()
    scored = held_out(log.episode.astype(np.uint64), 0.3)
    spec = SourceSpec(num_state_features=25, action_names=gridworld.ACTIONS)
    heads = build_cpe_heads(
        spec, NetworkSettings(hidden=(), activations=()), gamma=gridworld.GAMMA, target_update_rate=0.05
    )
    fitting = np.flatnonzero(~scored)
    passes = np.concatenate([rng.permutation(fitting) for _ in range(20)])
    batches = (rows_of(log, pick) for pick in np.array_split(passes, len(passes) // 256))
    heads.set_scales(heads.scale_sums(rows_of(log, fitting)))

    def policy(state: Tensor, actions: Actions) -> Tensor:
        return state @ table

    fit_heads(heads, batches, policy, torch.optim.Adam(heads.parameters(), lr=0.01))
    page = build_page([rows_of(log, np.flatnonzero(scored))], log.episode[scored], policy=policy, models=heads)
    config = EvaluationConfig(bootstrap_resamples=500)
    result = evaluate_page(page, gamma=gridworld.GAMMA, config=config, generator=torch.Generator().manual_seed(0))
    by_name = {e.name: e for e in result.outcomes[0].sequential.estimates}
    # 3.576 is the exact value; the standard error of WDR with 300 episodes is about 0.04
    assert by_name["Weighted_Sequential_Doubly_Robust"].figure.value == pytest.approx(3.5762, abs=0.12)
    assert by_name["MAGIC"].figure.value == pytest.approx(3.5762, abs=0.15)
    assert by_name["Fitted_Q_Evaluation"].figure.value == pytest.approx(3.5762, abs=0.3)
    assert by_name["Weighted_Sequential_Doubly_Robust"].verdict is Verdict.TRUSTWORTHY


def rows_of(log: gridworld.Log, rows: NDArray[np.int64]) -> TransitionBatch:
    """Rows of a log with one-hot states."""
    eye, mask = torch.eye(25), torch.from_numpy(gridworld.allowed())
    return make_batch(
        eye[log.state[rows]],
        eye[log.next_state[rows]],
        log.action[rows],
        log.reward[rows],
        actions=Actions(mask=mask[log.state[rows]]),
        next_actions=Actions(mask=mask[log.next_state[rows]]),
        bootstrap=torch.from_numpy(1.0 - log.terminal[rows]).float(),
        propensity=torch.from_numpy(log.propensity[rows]).float(),
    )
