"""The estimated behavior policy, by hand and against scipy."""

import re

import numpy as np
import pytest
import torch
from oracles.hidden_loggers import behavior_of
from scipy.optimize import minimize
from scipy.special import expit, softmax

from reagent_lite.evaluation import behavior
from reagent_lite.evaluation.behavior import FOLDS, FoldedSoftmax, LoggedChoices, fold_of
from reagent_lite.evaluation.calibration import Calibration, Tally
from reagent_lite.evaluation.estimates import ALONE
from reagent_lite.types import SourceSpec


def rows_of(state: list[float], action: list[int], fold: list[int]) -> LoggedChoices:
    return LoggedChoices(
        state=torch.tensor([[value, 1.0] for value in state], dtype=torch.float64),
        mask=torch.ones(len(action), 2, dtype=torch.bool),
        features=None,
        action=torch.tensor(action),
        reward=torch.zeros(len(action), dtype=torch.float64),
        fold=torch.tensor(fold),
        weight=torch.ones(len(action), dtype=torch.float64),
    )


def test_two_actions_with_known_log_odds() -> None:
    """Log odds log 3 of b in state 1, and of a in state -1: 3/4. A fifth of uniform choices: 0.8 * 0.75 + 0.2 / 2."""
    policy = FoldedSoftmax(torch.tensor([[0.0, 0.0, np.log(3), 0.0, np.log(0.2 / 0.8)]] * FOLDS, dtype=torch.float64))
    rows = rows_of([1.0, -1.0, 0.0], [1, 1, 0], [0, 1, 2])
    expected = [[0.3, 0.7], [0.7, 0.3], [0.5, 0.5]]
    torch.testing.assert_close(policy.probabilities(rows), torch.tensor(expected, dtype=torch.float64))
    # each row is left out of the loss of one of the five policies
    assert float(policy.loss(rows)[0]) == pytest.approx(-4 * np.log([0.7, 0.3, 0.5]).sum())


@pytest.mark.parametrize("parametric", [False, True])
def test_the_gradient_is_that_of_autograd(parametric: bool) -> None:
    torch.manual_seed(0)
    mask = torch.rand(20, 4) < 0.7
    mask[:, 1] = True
    rows = LoggedChoices(
        state=torch.cat((torch.randn(20, 2), torch.ones(20, 1)), 1).double(),
        mask=mask,
        features=torch.randn(20, 4, 3, dtype=torch.float64) if parametric else None,
        action=torch.ones(20, dtype=torch.int64),
        reward=torch.zeros(20, dtype=torch.float64),
        fold=torch.arange(20) % FOLDS,
        weight=torch.rand(20, dtype=torch.float64),
    )
    uniform = FoldedSoftmax.uniform(SourceSpec(
        num_state_features=2, num_action_features=3 * parametric, metric_names=(),
        action_names=() if parametric else tuple("abcd"),
    ))  # fmt: skip
    parameters = torch.randn_like(uniform.parameters).requires_grad_()
    loss, gradient = FoldedSoftmax(parameters).loss(rows)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters)[0], gradient.detach())
    probability = FoldedSoftmax(parameters).probabilities(rows)
    assert (probability[~mask] == 0).all()
    torch.testing.assert_close(probability.sum(1), torch.ones(20, dtype=torch.float64))


def test_the_fit_is_the_optimum_that_scipy_finds_on_the_other_folds() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=400)
    action = (rng.random(400) < 1 / (1 + np.exp(-state - 0.5))).astype(int)
    fold = np.arange(400) % FOLDS
    rows = rows_of(state.tolist(), action.tolist(), fold.tolist())
    spec = SourceSpec(num_state_features=1, num_action_features=0, action_names=("a", "b"), metric_names=())
    fitted = behavior._minimize(FoldedSoftmax.uniform(spec).parameters, 1.0, [rows], ALONE)[3].numpy()

    def loss(values: np.ndarray) -> float:
        chosen = softmax(state[:, None] * values[[0, 2]] + values[[1, 3]], 1)[np.arange(400), action]
        mixed = (1 - expit(values[4])) * chosen + expit(values[4]) / 2
        return float(-np.log(mixed[fold != 3]).sum() + ((values - [0, 0, 0, 0, -4]) ** 2).sum() / 2)

    best = minimize(loss, np.array([0.0, 0.0, 0.0, 0.0, -4.0]), method="BFGS")
    np.testing.assert_allclose(fitted, best.x, atol=0.02)
    assert loss(fitted) == pytest.approx(best.fun, abs=1e-3)


def test_folds_of_episodes_are_alike() -> None:
    # five deviations of 40
    assert np.abs(np.bincount(fold_of(np.arange(10_000, dtype=np.uint64)), minlength=FOLDS) - 2000).max() < 200


def calibration(probability: list[float], *taken: int) -> Calibration:
    """Returns that of rows with these probabilities, 0 if not allowed, of which so many have each action."""
    tally = Tally(("a", "b", "c")[: len(taken)])
    chances = torch.tensor([probability] * sum(taken), dtype=torch.float64)
    action = torch.arange(len(taken)).repeat_interleave(torch.tensor(taken))
    tally.add(chances, chances > 0, action, torch.zeros(sum(taken), 1, 0, dtype=torch.int64), torch.ones(sum(taken)))
    return tally.calibration(ALONE)


def test_calibration_by_hand() -> None:
    """30, 50 and 20 are expected, with variances 21, 25 and 16."""
    fine = calibration([0.3, 0.5, 0.2], 40, 45, 15)
    assert [(group.expected, group.observed, group.z) for group in fine.groups] == [
        pytest.approx(figures) for figures in ((30, 40, 10 / 21**0.5), (50, 45, -1.0), (20, 15, -1.25))
    ]
    # 1 % of three groups and two sides: 2.935 deviations
    assert fine.resolution == pytest.approx(2.935 * (21**0.5 + 5 + 4) / 100, rel=1e-3)
    assert re.search(r"; calibrated in 3 groups of choices \(largest z = 2\.2\).* 39\.9%$", str(fine))
    wrong = str(calibration([0.3, 0.5, 0.2], 50, 35, 15))
    assert re.search(r"not calibrated \(action 'a' of .* 50 logged, 30 expected, z = 4\.4\)$", wrong)


def test_rows_with_a_single_choice_say_nothing_about_calibration() -> None:
    single = calibration([1.0, 0.0], 50, 0)
    assert (single.rows, single.groups, single.calibrated) == (50, (), False)
    assert "too few rows have a choice" in str(single)


def test_a_logger_that_never_errs_has_no_support() -> None:
    """It takes b in state 1 and a in state -1; choices expected less than ten times count as impossible."""
    action = np.arange(4000) % 2
    assert (behavior_of(2.0 * action[:, None] - 1, action, np.arange(4000), 2).propensity == 1).all()


def test_an_action_that_is_logged_once_has_a_small_probability() -> None:
    """No other fold has it; its weight is large, which the diagnostics of weights show, but finite."""
    rng = np.random.default_rng(0)
    action = rng.integers(2, size=500)
    action[7] = 2
    assert 0 < behavior_of(rng.normal(size=(500, 1)), action, np.arange(500), 3).propensity[7] < 0.02


@pytest.mark.parametrize(
    ("actions", "episodes", "words"), [(1, 50, "every row of the log has the action 'a0'"), (2, 1, "no other episode")]
)
def test_a_single_action_or_episode_gives_no_policy(actions: int, episodes: int, words: str) -> None:
    estimated = behavior_of(np.zeros((50, 1)), np.arange(50) % actions, np.arange(50) % episodes, 2)
    assert words in estimated.problem
    assert (estimated.calibration, set(estimated.propensity)) == (None, {1})
