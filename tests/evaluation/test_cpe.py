"""The evaluation of a page: intervals, normalized values, differences and diagnostics; as JSON and tags."""

import dataclasses
import json
import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from helpers.pages import bandit_page, estimate_of, evaluated, weighing

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation import cpe
from reagent_lite.evaluation.cpe import Estimate, differences, limit
from reagent_lite.evaluation.document import as_json, reward_model_scalars, scalars
from reagent_lite.evaluation.evaluation_rows import BY_OUTCOME, EvaluationRows
from reagent_lite.evaluation.verdict import Verdict

REWARDS = (3 + np.random.default_rng(0).standard_normal(200)).tolist()


def test_a_continued_estimate_is_compared_with_the_logged_value_continued_alike() -> None:
    # episodes of one row, reward 3 and a record cut before a state of value 10, gamma .9; what was logged is evaluated
    cut = {"bootstrap": torch.ones(200).double(), "next_value": torch.full((200, 1), 10.0).double()}
    result = evaluated(replace(bandit_page(REWARDS), **cut))
    sequential = result.outcomes[0].sequential
    assert astuple(sequential.continued) == pytest.approx([figure + 9 for figure in astuple(sequential.logged)])
    assert evaluated(bandit_page(REWARDS)).outcomes[0].sequential.continued is None
    for name, tail in (("Sequential_Doubly_Robust", 9.0), ("Per_Decision_Importance_Sampling", 0.0)):
        estimate = estimate_of(result, name)
        assert (estimate.figure.value, estimate.difference.value, estimate.normalized) == pytest.approx(
            (sequential.logged.value + tail, 0, 1), rel=1e-9, abs=1e-12
        )


def test_negative_returns_are_normalized_by_their_ratio_and_nothing_by_what_may_be_zero() -> None:
    ips = estimate_of(evaluated(bandit_page([-r for r in REWARDS], model_propensity=0.25)), "IPS_Reward")
    assert (ips.figure.value, ips.normalized) == pytest.approx((-np.mean(REWARDS) / 2, 0.5))
    about_zero = estimate_of(evaluated(bandit_page([r - 3 for r in REWARDS])), "IPS_Reward")
    assert np.isnan([about_zero.figure.value, about_zero.normalized]).tolist() == [False, True]


def test_rounding_is_no_difference() -> None:
    # float32 has 0.3 as 0.30000001192
    page = bandit_page([0.1 + 0.1 * (i % 3) for i in range(4000)], episode=[i // 100 for i in range(4000)],
                       propensity=float(np.float32(0.3)), model_propensity=0.3)  # fmt: skip
    assert astuple(estimate_of(evaluated(page), "Per_Decision_Importance_Sampling").difference) == (0, 0, 0)


def normal_half(values: np.ndarray, quantile: float = 1.959964) -> float:
    """Half of a mean's interval by the central limit theorem, widened by the number of informative values."""
    beyond = values - values.mean()
    informative = (beyond**2).sum() ** 2 / (beyond**4).sum()
    return float(quantile * beyond.std() / len(values) ** 0.5 * (1 + 0.6 / (informative + 0.42) ** 0.5) ** 0.5)


def test_the_difference_to_the_log_is_of_the_same_episodes() -> None:
    # weights 1.5 and 0.5 in turn of rewards in [2, 4]: (w - 1) r less what w explains, which is (w - 1) (r - 3)
    rewards = np.random.default_rng(0).uniform(2, 4, 2000)
    weights = np.tile([1.5, 0.5], 1000)
    difference = estimate_of(evaluated(weighing(bandit_page(rewards.tolist()), weights)), "IPS_Reward").difference
    assert difference.value == pytest.approx(((weights - 1) * rewards).mean())
    assert difference.high - difference.low == pytest.approx(2 * normal_half((weights - 1) * (rewards - 3)), rel=0.02)


def test_an_interval_of_rewards_stays_in_their_range_and_one_of_returns_may_lie_beyond() -> None:
    """Models say 9 to 11, rewards are 2 and 4: no mean reward is above 4, but returns of longer episodes may be."""
    page = bandit_page(REWARDS)
    value = torch.full_like(page.q_values, 9.0) + torch.arange(len(page)).view(-1, 1, 1) % 3
    result = evaluated(replace(page, q_values=value, reward_model=value))
    fitted = estimate_of(result, "Fitted_Q_Evaluation").figure
    assert fitted.value < fitted.high == pytest.approx(2 * fitted.value - fitted.low, rel=0.01)  # not cut at 4
    doubly_robust = estimate_of(result, "Doubly_Robust_Reward").figure
    assert 2 <= doubly_robust.low <= doubly_robust.high <= 4


def test_an_interval_of_rewards_may_lie_beyond_the_means_of_all_episodes() -> None:
    # half of the rows earn 1, and the policy takes nine tenths of these: 40 episodes of 50 rows
    draw = np.random.default_rng(0)
    rewards = draw.integers(2, size=(40, 50))
    weights = np.where(rewards ^ (draw.random(rewards.shape) < 0.1), 2.0, 0.0)
    page = weighing(bandit_page(rewards.ravel().tolist(), episode=[i // 50 for i in range(2000)]), weights.ravel())
    figure = estimate_of(evaluated(page, gamma=0.0), "Self_Normalized_IPS_Reward").figure
    assert rewards.mean(1).max() < figure.low < figure.value < figure.high < 1


@pytest.mark.parametrize(("level", "quantile"), [(0.95, 1.96), (0.5, 0.6745)])
def test_an_interval_is_that_of_episodes_and_not_of_rows(level: float, quantile: float) -> None:
    # every episode repeats one number 25 times: the interval is that of 16 numbers, not of 400
    numbers = np.random.default_rng(1).standard_normal(16) + 3
    page = bandit_page(np.repeat(numbers, 25).tolist(), episode=np.repeat(np.arange(16), 25).tolist())
    logged = evaluated(page, confidence_level=level).outcomes[0].one_step.logged
    assert logged.high - logged.low == pytest.approx(2 * normal_half(numbers, quantile), rel=0.05)


def test_metrics_have_figures_of_their_own_however_many_are_worked_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    page = bandit_page(REWARDS, metric=[2 * v for v in REWARDS])
    draw = torch.Generator().manual_seed(0)
    models = {
        name: torch.rand(getattr(page, name).shape, generator=draw).double() for name in BY_OUTCOME - {"outcomes"}
    }
    together = evaluated(replace(page, **models))
    assert {outcome.name: outcome.one_step.logged.value for outcome in together.outcomes} == pytest.approx(
        {"Reward": np.mean(REWARDS), "clicks": 2 * np.mean(REWARDS)}
    )
    monkeypatch.setattr(cpe, "_OUTCOMES_AT_ONCE", 1)
    assert scalars(evaluated(replace(page, **models))) == pytest.approx(scalars(together), nan_ok=True)


def test_late_rows_are_left_out() -> None:
    page = bandit_page([1.0] * 12, episode=[0] * 3 + [1] * 4 + [2] * 5)
    page = dataclasses.replace(page, number=torch.arange(12))
    limited, beyond = limit(page, EvaluationConfig(max_horizon=3))
    assert limited.number is not None
    # rows 4 of episode 1, and 4 and 5 of episode 2 are beyond the horizon
    assert (limited.number.tolist(), beyond) == ([0, 1, 2, 3, 4, 5, 7, 8, 9], 3)
    assert len(limit(page, EvaluationConfig())[0]) == 12


def test_many_episodes_are_drawn_in_bags() -> None:
    draw = np.random.default_rng(0)
    weights = draw.exponential(1.0, 12_000)
    page = weighing(bandit_page([1.0] * 12_000), weights.tolist())
    mean = evaluated(page, bootstrap_resamples=2000).overlap.mean_weight
    half = 1.96 * weights.std() / 12_000**0.5
    assert mean.value == pytest.approx(weights.mean())
    # the quantiles of 2 000 resamples deviate by 3 % of the half width
    assert (mean.low, mean.high) == pytest.approx((weights.mean() - half, weights.mean() + half), abs=0.1 * half)


def test_diagnostics_by_hand() -> None:
    # two episodes of two rows; weights .5 each row (pi .25, mu .5), the second episode's last row 1.5 (pi .75)
    page = bandit_page([1.0, 1.0, 1.0, 1.0], episode=[0, 0, 1, 1], model_propensity=0.25)
    page.model_propensities[3] = torch.tensor([0.75, 0.25])
    overlap = evaluated(page, gamma=1.0).overlap
    expected = {
        "num_rows": 4, "horizon": 2, "horizon_reached": 0, "effective_horizon": 1, "cut_share": 0,
        "effective_rows": 3,  # 3^2 / (.25 * 3 + 2.25)
        "effective_groups": 1.8,  # 3^2 / (1^2 + 2^2)
        "largest_row_share": 0.5, "largest_episode_share": 0.75,  # rho: .5, .25 and .5, .75
    }  # fmt: skip
    assert {name: getattr(overlap, name) for name in expected} == pytest.approx(expected)
    assert (*overlap.effective_episodes_by_step, overlap.mean_weight.value, *overlap.mean_weight_by_step) == (
        pytest.approx((2.0, 1 / (0.0625 + 0.5625), 3 / 4, 0.5, 0.5))
    )
    assert evaluated(page, gamma=1.0, min_effective_episodes=1.7).overlap.horizon_reached == 1


def test_weights_are_taken_where_95_percent_of_discounted_time_has_passed() -> None:
    # 100 rows at gamma .5: 95 % of 2 have passed once 2 - .5^t > 1.9, at t = 4 (1.9375)
    overlap = evaluated(bandit_page([1.0] * 200, episode=[0] * 100 + [1] * 100), gamma=0.5).overlap
    assert (overlap.effective_horizon, overlap.horizon) == (4, 100)


# ---- two policies


def compared(first: EvaluationRows, other: EvaluationRows, **limits: int) -> dict[str, Estimate]:
    return {each.name: each for each in differences(evaluated(first, **limits), evaluated(other, **limits))["Reward"]}


def test_a_policy_does_not_differ_from_itself() -> None:
    page = bandit_page(REWARDS, episode=sorted([i % 50 for i in range(200)]))
    assert {astuple(each.figure) for each in compared(page, page).values()} == {(0, 0, 0)}


def test_two_policies_are_compared_on_the_same_episodes() -> None:
    # weights 1.5 and 0.5 in turn, and the other way round, of rewards 4 and 2: IPS differs by 1
    first, other = (weighing(bandit_page([4.0, 2.0] * 100), weights * 100) for weights in ([1.5, 0.5], [0.5, 1.5]))
    ips = compared(first, other)["IPS_Reward"]
    assert (ips.figure.value, ips.verdict, ips.reason) == (
        pytest.approx(1.0), Verdict.TRUSTWORTHY, "model is better"
    )  # fmt: skip
    assert compared(other, first)["IPS_Reward"].reason == "against is better"
    # the worse verdict of both counts: a quarter of the probability is too little
    worse = compared(first, bandit_page(REWARDS, model_propensity=0.25))["IPS_Reward"]
    assert (worse.verdict, worse.reason.split(" (")[0]) == (
        Verdict.DO_NOT_USE, "against: the log rarely has the policy's choices, or state features reveal the logged ones"
    )  # fmt: skip


# ---- JSON and tags


def test_what_is_undefined_is_null_in_json_and_has_no_tag() -> None:
    result = evaluated(bandit_page([0.0] * 20, model_propensity=0.0))
    (outcome,) = json.loads(json.dumps(as_json(result), allow_nan=False))["outcomes"]
    (snips,) = (e for e in outcome["one_step"]["estimates"] if e["name"] == "Self_Normalized_IPS_Reward")
    undefined = {"value": None, "low": None, "high": None}
    assert snips | {"reason": ""} == {
        "name": "Self_Normalized_IPS_Reward", "figure": undefined, "normalized": None, "difference": undefined,
        "verdict": "do not use", "reason": "",
    }  # fmt: skip
    assert all(map(math.isfinite, scalars(result).values()))


def test_a_page_without_rows() -> None:
    result = evaluated(bandit_page([1.0]).rows(torch.zeros(0, dtype=torch.int64)))
    assert (scalars(result), as_json(result)["overlap"], differences(result, result)) == ({}, None, {})


def test_reward_model_means_are_over_rows_that_allow_the_action() -> None:
    page = bandit_page([1.0, 2.0])
    page.reward_model[:, :, 0] = torch.tensor([[1.0, 5.0], [3.0, 9.0]], dtype=torch.float64)
    page.mask[1, 1] = False
    assert reward_model_scalars(page, ("a", "b")) == {"reward/model/a/mean": 2.0, "reward/model/b/mean": 5.0}
