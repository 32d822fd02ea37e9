"""The evaluation of a page: intervals, normalised values, differences, diagnostics and verdicts."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from oracles import gridworld
from oracles.pages import bandit_page, gridworld_page, noisy_q

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation import cpe
from reagent_lite.evaluation.cpe import CPEResult, Estimate, evaluate_page, limit
from reagent_lite.evaluation.document import scalars
from reagent_lite.evaluation.page import BY_OUTCOME, EvaluationPage
from reagent_lite.evaluation.verdict import Verdict

CONFIG = EvaluationConfig(bootstrap_resamples=400)


def evaluate(page: EvaluationPage, gamma: float = 0.9, config: EvaluationConfig = CONFIG) -> CPEResult:
    return evaluate_page(page, gamma=gamma, config=config, generator=torch.Generator().manual_seed(0))


def estimate(result: CPEResult, name: str, outcome: int = 0) -> Estimate:
    return next(e for e in result.outcomes[outcome].estimates if e.name == name)


def rewards(mean: float, n: int = 200, seed: int = 0) -> list[float]:
    return (mean + np.random.default_rng(seed).standard_normal(n)).tolist()


def test_a_continued_estimate_is_compared_with_the_logged_value_continued_alike():
    # episodes of one row, reward 3 and a record cut before a state of value 10, gamma .9; what was logged is evaluated
    page = bandit_page(rewards(3.0))
    page = dataclasses.replace(page, next_value=torch.full((200, 1), 10.0, dtype=torch.float64))
    result = evaluate(page)
    logged = result.outcomes[0].sequential.logged.value
    for name, tail in (("Sequential_Doubly_Robust", 9.0), ("Per_Decision_Importance_Sampling", 0.0)):
        found = estimate(result, name)
        assert found.figure.value == pytest.approx(logged + tail)
        assert (found.difference.value, found.normalized) == pytest.approx((0, 1), abs=1e-12)


def test_negative_returns_are_normalised_by_their_ratio():
    # half the probability of the logged action: IPS is half the mean, and so is its ratio, not 0
    result = evaluate(bandit_page(rewards(-3.0), model_propensity=0.25))
    ips = estimate(result, "IPS_Reward")
    assert ips.figure.value < -1
    assert ips.normalized == pytest.approx(0.5)


def test_nothing_is_normalised_by_a_value_that_may_be_zero():
    result = evaluate(bandit_page(rewards(0.0)))
    logged = result.outcomes[0].one_step.logged
    assert logged.low < 0 < logged.high
    assert math.isnan(estimate(result, "IPS_Reward").normalized)
    assert math.isfinite(estimate(result, "IPS_Reward").figure.value)


def test_difference_is_resampled_in_pairs():
    # the estimate is half of each logged value: the difference varies half as much as the logged mean does
    result = evaluate(bandit_page(rewards(3.0), model_propensity=0.25))
    ips, logged = estimate(result, "IPS_Reward"), result.outcomes[0].one_step.logged
    assert ips.difference.value == pytest.approx(-logged.value / 2)
    assert ips.difference.high - ips.difference.low == pytest.approx((logged.high - logged.low) / 2, rel=1e-9)


@pytest.mark.parametrize(("level", "quantile"), [(0.95, 1.96), (0.5, 0.6745)])
def test_episodes_are_resampled_and_not_rows(level: float, quantile: float):
    # every episode repeats one number 25 times: the interval is that of 16 numbers, not of 400
    numbers = np.random.default_rng(1).standard_normal(16) + 3
    page = bandit_page(np.repeat(numbers, 25).tolist(), episode=np.repeat(np.arange(16), 25).tolist())
    config = EvaluationConfig(bootstrap_resamples=4000, confidence_level=level)
    logged = evaluate(page, config=config).outcomes[0].one_step.logged
    theory = 2 * quantile * numbers.std() / 4
    assert logged.high - logged.low == pytest.approx(theory, rel=0.1)


def test_each_metric_has_its_own_figures():
    values = rewards(3.0)
    result = evaluate(bandit_page(values, metric=[2 * v for v in values]))
    assert [outcome.name for outcome in result.outcomes] == ["Reward", "clicks"]
    assert estimate(result, "IPS_Reward", 1).figure.value == pytest.approx(2 * np.mean(values))


def test_outcomes_are_the_same_however_many_are_worked_on_together(monkeypatch: pytest.MonkeyPatch):
    values = rewards(3.0)
    page = bandit_page(values, metric=[v**2 for v in values])
    draw = torch.Generator().manual_seed(0)
    models = {
        name: torch.rand(getattr(page, name).shape, generator=draw).double() for name in BY_OUTCOME - {"outcomes"}
    }
    page = dataclasses.replace(page, **models)
    together = evaluate(page)
    monkeypatch.setattr(cpe, "_OUTCOMES_AT_ONCE", 1)
    apart = evaluate(page)
    assert [one.name for one in apart.outcomes] == ["Reward", "clicks"]
    assert scalars(apart) == pytest.approx(scalars(together), nan_ok=True)


def test_a_log_without_propensities_is_not_used():
    result = evaluate(bandit_page(rewards(3.0), propensity=1.0))
    assert result.overlap is not None
    assert result.overlap.unsupported_share == 1
    for name in ("IPS_Reward", "Doubly_Robust_Reward", "Sequential_Doubly_Robust", "MAGIC"):
        assert estimate(result, name).verdict is Verdict.DO_NOT_USE
        assert "no propensities" in estimate(result, name).reason


def test_a_deterministic_log_of_the_same_policy_is_supported():
    result = evaluate(bandit_page(rewards(3.0), propensity=1.0, model_propensity=1.0))
    assert result.overlap is not None
    assert result.overlap.unsupported_share == 0
    assert estimate(result, "IPS_Reward").verdict is Verdict.TRUSTWORTHY


def test_wrong_propensities_show_in_the_mean_weight():
    result = evaluate(bandit_page(rewards(3.0), propensity=0.3, model_propensity=0.5))
    assert result.overlap is not None
    assert result.overlap.mean_weight.value == pytest.approx(5 / 3)
    assert estimate(result, "IPS_Reward").verdict is Verdict.DO_NOT_USE
    assert "should be 1" in estimate(result, "IPS_Reward").reason


def test_few_effective_episodes_are_not_used():
    config = EvaluationConfig(bootstrap_resamples=100, min_effective_episodes=201)
    ips = estimate(evaluate(bandit_page(rewards(3.0)), config=config), "IPS_Reward")
    assert (ips.verdict, ips.reason) == (Verdict.DO_NOT_USE, "weights leave 200.0 effective rows, less than 201")


def test_many_rows_of_few_episodes_are_no_sound_interval():
    values = rewards(3.0)
    three = estimate(evaluate(bandit_page(values, episode=sorted([i % 3 for i in range(200)]))), "IPS_Reward")
    assert three.verdict is Verdict.WIDE
    assert three.reason.startswith("3 episodes: ")
    many = estimate(evaluate(bandit_page(values)), "IPS_Reward")
    assert many.verdict is Verdict.TRUSTWORTHY


def test_a_wide_interval_is_called_wide():
    # 12 values of standard deviation 10 around 0: the interval is about as wide as their spread
    ips = estimate(evaluate(bandit_page([10.0 * v for v in rewards(0.0, 12)])), "IPS_Reward")
    assert ips.verdict is Verdict.WIDE
    assert "wide where figures" in ips.reason


def test_a_model_that_disagrees_with_the_log_is_not_used():
    # models say 0, the log says 3
    result = evaluate(bandit_page(rewards(3.0)))
    for name in ("Direct_Method_Reward", "Fitted_Q_Evaluation"):
        assert estimate(result, name).verdict is Verdict.DO_NOT_USE
        assert "outside the weighted estimate's interval" in estimate(result, name).reason
    assert result.outcomes[0].one_step.disagreement.high < 0


def test_a_model_that_agrees_says_so_and_is_not_trusted_by_its_own_interval():
    page = bandit_page(rewards(3.0))
    right = torch.full_like(page.q_values, float(page.outcomes.mean()))
    page = dataclasses.replace(page, q_values=right, reward_model=right)
    agreed = estimate(evaluate(page), "Fitted_Q_Evaluation")
    assert agreed.figure.high - agreed.figure.low < 1e-9  # a constant has no spread, however wrong it is
    assert agreed.verdict is Verdict.WIDE
    assert agreed.reason.startswith("agrees with the weighted estimate, ")
    assert agreed.reason.endswith("; its own interval leaves out the model's error")
    unchecked = dataclasses.replace(page, propensity=torch.ones_like(page.propensity))
    fqe = estimate(evaluate(unchecked), "Fitted_Q_Evaluation")
    assert fqe.verdict is Verdict.WIDE
    assert "cannot be checked" in fqe.reason


def test_order_of_episodes_changes_nothing():
    rng = np.random.default_rng(0)
    log = gridworld.simulate(gridworld.epsilon_greedy(0.5), 30, rng)
    page = gridworld_page(log, gridworld.epsilon_greedy(0.3), noisy_q(gridworld.epsilon_greedy(0.3), 0.3, rng))
    backwards = dataclasses.replace(page, episode=29 - page.episode)
    backwards = backwards.rows(torch.argsort(backwards.episode, stable=True))
    one, other = evaluate(page), evaluate(backwards)
    for a, b in zip(one.outcomes[0].estimates, other.outcomes[0].estimates, strict=True):
        # MAGIC's blend rests on the resamples, which are others
        assert b.figure.value == pytest.approx(a.figure.value, rel=1e-2 if a.name == "MAGIC" else 1e-10)
    assert one.overlap is not None
    assert other.overlap is not None
    assert other.overlap.effective_episodes == pytest.approx(one.overlap.effective_episodes)


def test_limits_leave_out_whole_episodes_and_late_rows():
    page = bandit_page([1.0] * 12, episode=[0] * 3 + [1] * 4 + [2] * 5)
    config = EvaluationConfig(max_episodes=2, max_horizon=3)
    rows, left_out, beyond = limit(page, config, torch.Generator().manual_seed(0))
    scored = page.rows(rows)
    assert (left_out, beyond) == (1, 3)  # rows 4 of episode 1, and 4 and 5 of episode 2
    assert len(scored) == 6
    assert int(scored.rank[-1]) == 1
    assert len(limit(page, CONFIG, torch.Generator())[0]) == 12


def test_diagnostics_by_hand():
    # two episodes of two rows; weights .5 each row (pi .25, mu .5), the second episode's last row 1.5 (pi .75)
    page = bandit_page([1.0, 1.0, 1.0, 1.0], episode=[0, 0, 1, 1], model_propensity=0.25)
    pi = page.model_propensities
    pi[3] = torch.tensor([0.75, 0.25])
    overlap = evaluate(page, gamma=1.0).overlap
    assert overlap is not None
    assert overlap.num_rows == 4
    assert overlap.mean_weight.value == pytest.approx(3 / 4)
    assert overlap.effective_rows == pytest.approx(9 / 3)  # 3^2 / (.25 * 3 + 2.25)
    assert overlap.largest_row_share == pytest.approx(0.5)
    # rho: .5, .25 and .5, .75
    assert overlap.effective_episodes_by_step == pytest.approx((2.0, 1 / (0.0625 + 0.5625)))
    assert overlap.mean_weight_by_step == pytest.approx((0.5, 0.5))
    assert overlap.judged_step == 1
    assert overlap.largest_episode_share == pytest.approx(0.75)
    assert overlap.horizon == 2
    assert overlap.horizon_reached == 0
    assert overlap.cut_share == 0
    generous = EvaluationConfig(bootstrap_resamples=100, min_effective_episodes=1.7)
    reached = evaluate(page, gamma=1.0, config=generous).overlap
    assert reached is not None
    assert reached.horizon_reached == 1


def test_far_steps_of_a_discounted_return_are_not_judged():
    # 100 rows at gamma .5: 95 % of 2 have passed once 2 - .5^t > 1.9, at t = 4 (1.9375)
    overlap = evaluate(bandit_page([1.0] * 200, episode=[0] * 100 + [1] * 100), gamma=0.5).overlap
    assert overlap is not None
    assert (overlap.judged_step, overlap.horizon) == (4, 100)
