"""The estimated behaviour policy, by hand and against scipy."""

import numpy as np
import pytest
import torch
from oracles.hidden_loggers import behavior_of
from scipy.optimize import minimize

from reagent_lite.evaluation import behavior
from reagent_lite.evaluation.behavior import FOLDS, FoldedSoftmax, LoggedChoices, fold_of
from reagent_lite.evaluation.calibration import Calibration, Tally
from reagent_lite.evaluation.estimates import ALONE
from reagent_lite.types import SourceSpec

NAMED = SourceSpec(num_state_features=1, num_action_features=0, action_names=("a", "b"), metric_names=())


def rows_of(state: list[float], action: list[int], fold: list[int]) -> LoggedChoices:
    count = len(action)
    return LoggedChoices(
        state=torch.tensor([[value, 1.0] for value in state], dtype=torch.float64),
        mask=torch.ones(count, 2, dtype=torch.bool),
        features=None,
        action=torch.tensor(action),
        fold=torch.tensor(fold),
    )


def policy_of(weight: list[float], bias: list[float], share: float) -> FoldedSoftmax:
    """The same policy in every fold."""
    values = [weight[0], bias[0], weight[1], bias[1], float(np.log(share / (1 - share)))]
    return FoldedSoftmax(torch.tensor([values] * FOLDS, dtype=torch.float64))


def test_two_actions_with_known_log_odds() -> None:
    """Log odds log 3 of b in state 1, and of a in state -1: 3/4. A fifth of uniform choices: 0.8 * 0.75 + 0.2 / 2."""
    policy = policy_of([0.0, float(np.log(3))], [0.0, 0.0], 0.2)
    rows = rows_of([1.0, -1.0, 0.0], [1, 1, 0], [0, 1, 2])
    expected = [[0.3, 0.7], [0.7, 0.3], [0.5, 0.5]]
    torch.testing.assert_close(policy.probabilities(rows), torch.tensor(expected, dtype=torch.float64))
    # each row is left out of the loss of one of the five policies
    loss, _ = policy.loss(rows)
    assert float(loss) == pytest.approx(-4 * np.log([0.7, 0.3, 0.5]).sum())


@pytest.mark.parametrize("parametric", [False, True])
def test_the_gradient_is_that_of_autograd(parametric: bool) -> None:
    torch.manual_seed(0)
    features = torch.randn(20, 4, 3, dtype=torch.float64) if parametric else None
    spec = SourceSpec(
        num_state_features=2,
        num_action_features=3 * parametric,
        action_names=() if parametric else tuple("abcd"),
        metric_names=(),
    )
    mask = torch.rand(20, 4) < 0.7
    mask[:, 1] = True
    state = torch.cat((torch.randn(20, 2), torch.ones(20, 1)), 1).double()
    rows = LoggedChoices(
        state=state,
        mask=mask,
        features=features,
        action=torch.ones(20, dtype=torch.int64),
        fold=torch.arange(20) % FOLDS,
    )
    parameters = torch.randn_like(FoldedSoftmax.uniform(spec).parameters).requires_grad_()
    loss, gradient = FoldedSoftmax(parameters).loss(rows)
    loss.backward()
    assert parameters.grad is not None
    torch.testing.assert_close(parameters.grad, gradient.detach())
    probability = FoldedSoftmax(parameters).probabilities(rows)
    assert (probability[~mask] == 0).all()
    torch.testing.assert_close(probability.sum(1), torch.ones(20, dtype=torch.float64))


def test_the_fit_is_the_optimum_that_scipy_finds_on_the_other_folds() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal(size=400)
    action = (rng.random(400) < 1 / (1 + np.exp(-state - 0.5))).astype(int)
    fold = np.arange(400) % FOLDS
    rows = rows_of(state.tolist(), action.tolist(), fold.tolist())
    fitted = behavior._minimized(FoldedSoftmax.uniform(NAMED).parameters, 1.0, [rows], ALONE)

    def loss(values: np.ndarray) -> float:
        weights, biases, odds = values[[0, 2]], values[[1, 3]], values[4]
        utility = state[:, None] * weights + biases
        softmax = np.exp(utility) / np.exp(utility).sum(1, keepdims=True)
        share = 1 / (1 + np.exp(-odds))
        mixed = (1 - share) * softmax[np.arange(400), action] + share / 2
        penalty = (values[:4] ** 2).sum() / 2 + (odds + 4) ** 2 / 2
        return float(-np.log(mixed[fold != 3]).sum() + penalty)

    best = minimize(loss, np.array([0.0, 0.0, 0.0, 0.0, -4.0]), method="BFGS")
    np.testing.assert_allclose(fitted[3], best.x, atol=0.02)
    assert loss(fitted[3].numpy()) == pytest.approx(best.fun, abs=1e-3)


def test_rows_of_an_episode_share_a_fold_and_folds_are_alike() -> None:
    folds = fold_of(np.arange(10_000, dtype=np.uint64))
    assert (folds == fold_of(np.arange(10_000, dtype=np.uint64))).all()
    assert np.abs(np.bincount(folds, minlength=FOLDS) - 2000).max() < 200  # five deviations of 40


def calibration(*taken: int) -> Calibration:
    """Returns that of 100 rows with probabilities 0.3, 0.5 and 0.2, of which so many have each action."""
    tally = Tally(("a", "b", "c"))
    probability = torch.tensor([[0.3, 0.5, 0.2]] * 100, dtype=torch.float64)
    tally.add(probability, torch.ones(100, 3, dtype=torch.bool), torch.arange(3).repeat_interleave(torch.tensor(taken)))
    return tally.calibration(ALONE)


def test_calibration_by_hand() -> None:
    """30, 50 and 20 are expected, with variances 21, 25 and 16."""
    fine = calibration(40, 45, 15)
    assert [group.expected for group in fine.groups] == pytest.approx([30, 50, 20])
    assert [group.observed for group in fine.groups] == [40, 45, 15]
    assert [group.z for group in fine.groups] == pytest.approx([10 / 21**0.5, -1.0, -1.25])
    # 1 % of three groups and two sides: 2.935 deviations
    assert fine.resolution == pytest.approx(2.935 * (21**0.5 + 5 + 4) / 100, rel=1e-3)
    assert "calibrated in 3 groups of choices (largest z = 2.2)" in str(fine)
    assert str(fine).endswith("39.9%")
    assert "not calibrated (action 'a' of" in str(calibration(50, 35, 15))
    assert str(calibration(50, 35, 15)).endswith("50 logged, 30 expected, z = 4.4)")


def test_rows_with_a_single_choice_say_nothing_about_calibration() -> None:
    tally = Tally(("a", "b"))
    mask = torch.tensor([[True, False]] * 50)
    tally.add(mask.double(), mask, torch.zeros(50, dtype=torch.int64))
    calibrated = tally.calibration(ALONE)
    assert (calibrated.rows, calibrated.groups, calibrated.calibrated) == (50, (), False)
    assert "too few rows have a choice" in str(calibrated)


def test_a_logger_that_never_errs_has_no_support() -> None:
    """It takes b in state 1 and a in state -1; choices expected less than ten times count as impossible."""
    state = np.where(np.arange(4000) % 2, 1.0, -1.0)[:, None]
    estimated = behavior_of(state, (np.arange(4000) % 2).astype(np.int64), np.arange(4000), 2)
    assert (estimated.propensity == 1).all()


def test_an_action_that_is_logged_once_has_a_small_probability() -> None:
    """No other fold has it; its weight is large, which the diagnostics of weights show, but finite."""
    rng = np.random.default_rng(0)
    action = rng.integers(2, size=500)
    action[7] = 2
    estimated = behavior_of(rng.normal(size=(500, 1)), action, np.arange(500), 3)
    assert 0 < estimated.propensity[7] < 0.02
    assert estimated.problem == ""


def test_a_single_action_or_episode_gives_no_policy() -> None:
    state = np.zeros((50, 1))
    alone = behavior_of(state, np.zeros(50, np.int64), np.arange(50), 2)
    assert "the action 'a0'" in alone.problem
    assert alone.calibration is None
    single = behavior_of(state, np.arange(50) % 2, np.zeros(50, np.int64), 2)
    assert "no other episode" in single.problem
    assert (single.propensity == 1).all()
