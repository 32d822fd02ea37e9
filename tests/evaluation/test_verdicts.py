"""Verdicts on weighted estimates of rows and of episodes, and on models by the weighted estimates."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import bandit_page, estimate_of, evaluated, weighing
from scipy.stats import sem

from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.overlap import measure_untried
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.likelihood import Alternatives

WEIGHTED = ("Per_Decision_Importance_Sampling", "Weighted_Per_Decision_Importance_Sampling",
            "Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust")  # fmt: skip
REWARDS = [3.0 + (-1) ** n for n in range(200)]
STEADY = [1.0] * 70 + [2.0] * 60 + [3.0] * 65
THREE = torch.full((200, 2, 1), 3.0, dtype=torch.float64)
RIGHT = dataclasses.replace(bandit_page(REWARDS), q_values=THREE, reward_model=THREE)
TRUSTWORTHY = Verdict.TRUSTWORTHY
SUPPORT = Verdict.SUPPORT
UNUSABLE = Verdict.DO_NOT_USE


@pytest.mark.parametrize(
    ("page", "keys", "names", "verdict", "reason"),
    [
        (bandit_page(REWARDS), {}, ("IPS_Reward",), TRUSTWORTHY, "200 effective rows, mean weight 1"),
        (bandit_page(REWARDS, propensity=1.0), {},
         ("IPS_Reward", "Doubly_Robust_Reward", "Sequential_Doubly_Robust", "MAGIC"), UNUSABLE,
         "100.0% of rows were logged with probability 1"),
        # a deterministic log of the same policy
        (bandit_page(REWARDS, propensity=1.0, model_propensity=1.0), {}, ("IPS_Reward",), TRUSTWORTHY, "200 effective"),
        (bandit_page(REWARDS, propensity=0.3), {}, ("IPS_Reward",), UNUSABLE,
         "logged propensities are too small (the mean weight of a row is 1.67 instead of 1)"),
        (bandit_page(REWARDS, propensity=0.8), {}, ("IPS_Reward",), UNUSABLE,
         "state features reveal the logged ones (the mean weight of a row is 0.625 instead of 1)"),
        (bandit_page(REWARDS), {"min_effective_episodes": 201}, ("IPS_Reward",), UNUSABLE,
         "weights leave 200 effective rows, fewer than 201"),
        # 200^2 / (150^2 + 50)
        (bandit_page(REWARDS, episode=[0] * 150 + list(range(1, 51))), {}, ("IPS_Reward",), SUPPORT,
         "1.77 effective episodes: "),
        # a wide interval says so itself
        (bandit_page([10.0 * (-1) ** n for n in range(12)]), {}, ("IPS_Reward",), TRUSTWORTHY, "12 effective rows"),
        # the median is 2, four outcomes lie 10 from it: 16 is more than one and a half times 10, 15 is not
        *((bandit_page(STEADY + [2 + sign * far] + [2 + 10.0 * sign] * 4), keys, ("IPS_Reward", "Doubly_Robust_Reward"),
           verdict, reason) for far, sign, keys, verdict, reason in (
            (15.0, -1, {}, TRUSTWORTHY, "200 effective rows"),
            (16.0, -1, {}, SUPPORT, "the 5 lowest outcomes, -14 to -8, lie farther out than the others suggest"),
            (16.0, 1, {}, SUPPORT, "the 5 highest outcomes, 18 to 12, lie farther out than the others suggest"),
            (16.0, -1, {"reward_range": (-100.0, 4.0)}, TRUSTWORTHY, "200 effective rows"),
        )),
        # 100 / k: 100 * 2 is about 14.3^2; 200 * 2 is twice that
        *((bandit_page([first] + [-100.0 / k for k in range(2, 51)] + [0.0] * 60 + [1.0] * 90), {}, ("IPS_Reward",),
           verdict, reason) for first, verdict, reason in (
            (-100.0, TRUSTWORTHY, "200 effective rows"),
            (-200.0, SUPPORT, "the 5 lowest outcomes, -200 to -20, lie farther out"),
        )),
        (bandit_page([1.0] * 197 + [2.0] * 3), {}, ("IPS_Reward",), TRUSTWORTHY,
         "200 effective rows, mean weight 1, 3 rare outcomes in matching decisions, 3 expected by chance"),
        # equal sizes that are no flags: 1.5^2 is more than 0.5^2 times the 5 % quantile of chi-square up to 17 of them
        *((bandit_page([1.0] * (200 - count) + [size] * count), keys, ("IPS_Reward",), verdict, reason)
          for count, size, keys, verdict, reason in (
            (1, 37.2, {}, SUPPORT, "1 of the log's rare outcomes are too few"),
            (17, 1e6, {}, SUPPORT, "17 of the log's rare outcomes are too few, for how their sizes differ, to show"),
            (17, 1e6, {"reward_range": (0.0, 1e6)}, TRUSTWORTHY, "200 effective rows"),
            (18, 1e6, {}, TRUSTWORTHY, "18 rare outcomes in matching decisions"),
        )),
        # sizes of 1 and 1 + d, 10 each, deviate by d / (2 + d); 20 times its square may be 10.851 / 4 - 2.25
        *((bandit_page([0.0] * 180 + [1.0] * 10 + [1 + d] * 10), {}, ("IPS_Reward",), verdict, reason)
          for d, verdict, reason in (
            (0.35, TRUSTWORTHY, "20 rare outcomes"),
            (0.37, SUPPORT, "20 of the log's rare outcomes are too few, for how their sizes differ"),
        )),
        # 120 events of one size, and larger ones on the other side
        *((bandit_page([0.0] * 250 + [-sign] * 120 + [sign * size] * count), {}, ("IPS_Reward",), verdict,
           reason) for sign, size, count, verdict, reason in (
            (-1.0, 20.0, 18, TRUSTWORTHY, "388 effective rows"),
            (-1.0, 20.0, 17, SUPPORT, "17 of the log's rare outcomes are too few"),
            (1.0, 20.0, 17, SUPPORT, "17 of the log's rare outcomes are too few"),
            (-1.0, 1.5, 2, TRUSTWORTHY, "372 effective rows"),
        )),
        # 40 of 200 rows weigh 0, the others 1.25 = 0.625 / 0.5
        (weighing(bandit_page(REWARDS), [1.25] * 160 + [0.0] * 40), {}, ("Switch_Doubly_Robust_Reward",), SUPPORT,
         "a model replaces outcomes with weights above 10: 0 of 160"),
        # 100 w / (w^2 + 100) of w = 1.25: 1.2308, 1.54 % less
        (weighing(bandit_page(REWARDS), [1.25] * 160 + [0.0] * 40), {}, ("Shrunk_Doubly_Robust_Reward",), SUPPORT,
         "a model replaces 1.54% of the weights"),
        (bandit_page(REWARDS), {}, ("MAGIC",), SUPPORT, "blends in a model"),
        (bandit_page([1.0] * 200), {}, ("IPS_Reward", "Sequential_Doubly_Robust"), UNUSABLE,
         "all scored outcomes are equal"),
        (bandit_page([0.0] * 200), {"reward_range": (0.0, 1.0)}, ("IPS_Reward", "Doubly_Robust_Reward"), TRUSTWORTHY,
         "200 effective rows, mean weight 1"),
        # models say 0, the log says 3
        (bandit_page(REWARDS), {}, ("Direct_Method_Reward", "Fitted_Q_Evaluation"), UNUSABLE,
         "the model says 0, outside the weighted estimate's interval"),
        (bandit_page([3.0]), {}, ("Fitted_Q_Evaluation",), UNUSABLE, "one episode has no interval"),
        (dataclasses.replace(bandit_page(REWARDS), bootstrap=torch.ones(200).double()), {}, ("Fitted_Q_Evaluation",),
         UNUSABLE, "the model says 0, outside the weighted estimate's interval"),
        # 3, and 0.9 * 10 after the cut, which the log cannot have
        (dataclasses.replace(RIGHT, bootstrap=torch.ones(200).double(), q_values=THREE + 9,
                             next_value=torch.full((200, 1), 10.0).double()), {}, ("Fitted_Q_Evaluation",),
         SUPPORT, "agrees with the weighted estimate, "),
        # models say 3, without any spread: they are not trusted by their own interval
        (RIGHT, {}, ("Fitted_Q_Evaluation",), SUPPORT, "agrees with the weighted estimate, "),
        (dataclasses.replace(RIGHT, propensity=torch.ones(200).double()), {}, ("Fitted_Q_Evaluation",), SUPPORT,
         "cannot be checked"),
    ],
)  # fmt: skip
def test_verdicts(page: EvaluationRows, keys: dict[str, Any], names: tuple[str, ...], verdict: Verdict, reason: str
) -> None:  # fmt: skip
    result = evaluated(page, **keys)
    estimates = [estimate_of(result, name) for name in names]
    assert [each for each in estimates if each.verdict is not verdict or reason not in each.reason] == []


# ---- whole episodes: their mean weight should be 1, and products hide what rows do not show


def alike(weights: list[float]) -> EvaluationRows:
    """30 episodes whose rows have these weights, in order, and rewards of 3 plus or minus 1."""
    number = [n for n in range(30) for _ in weights]
    return weighing(bandit_page([3.0 + (-1) ** n for n in number], episode=number), weights * 30)


@pytest.mark.parametrize(
    ("weights", "step", "mean", "product", "verdict", "says"),
    [
        # 40 rows, of which 95 % are 38: the first step by which so many have passed is number 37, with 38 weights
        *(([weight] * 40, 37, weight, weight**38, verdict, says) for weight, verdict, says in (
            (1.0, TRUSTWORTHY, ""),
            (0.95, UNUSABLE, "the log lacks episodes that the policy makes likely (the {} is 0.142 instead of 1"),
            (0.995, SUPPORT, "the log lacks episodes that the policy makes likely (the {} is 0.827 instead of 1"),
            (1.01, SUPPORT, "logged propensities are too small (the {} is 1.46 instead of 1"),
            (1.05, UNUSABLE, "logged propensities are too small (the {} is 6.39 instead of 1"),
        )),
        # 1.9 and 0.1 in turn: 1 in the mean, and (1.9 * 0.1)^475 = 10^-342 up to step 949 of 1000, below 10^-323
        ([1.9, 0.1] * 500, 949, 1.0, 0, UNUSABLE, "the {} is 0, or too small for a number, instead of 1"),
    ],
)  # fmt: skip
def test_rows_that_are_a_little_off_multiply(
    weights: list[float], step: int, mean: float, product: float, verdict: Verdict, says: str
) -> None:
    result = evaluated(alike(weights), gamma=1.0)
    assert (result.overlap.effective_horizon, result.overlap.mean_weight.value) == (step, pytest.approx(mean))
    assert dataclasses.astuple(result.overlap.mean_episode_weight) == pytest.approx([product] * 3)  # none varies
    estimates = [estimate_of(result, name) for name in WEIGHTED]
    reason = says.format(f"mean weight of an episode up to step {step}")
    assert [each for each in estimates if each.verdict is not verdict or reason not in each.reason] == []
    assert estimate_of(result, "IPS_Reward").verdict is TRUSTWORTHY  # of rows, 0.95 and 1.05 are within a tenth of 1


@pytest.mark.parametrize(
    ("base", "weights", "verdict"),
    [
        # 1.145 in the mean, give or take twice 0.14
        (3.0, [2.0] * 21 + [0.2] * 19, None),
        # too little is a doubt whatever its interval holds: 0.8 give or take 0.2; three more of the latter: 0.891
        (30.0, [1.5] * 23 + [0.1] * 23, SUPPORT),
        (30.0, [1.5] * 26 + [0.1] * 20, TRUSTWORTHY),
    ],
)
def test_a_mean_weight_that_may_be_one(base: float, weights: list[float], verdict: Verdict | None) -> None:
    result = evaluated(weighing(bandit_page([base + (-1) ** n for n in range(len(weights))]), weights), gamma=1.0)
    mean = np.mean(weights)
    half = 1.959964 * sem(weights)
    assert dataclasses.astuple(result.overlap.mean_episode_weight) == pytest.approx(
        (mean, mean - half, mean + half), rel=1e-5
    )
    assert not result.overlap.mean_episode_weight.excludes(1.0)
    estimate = estimate_of(result, "Weighted_Per_Decision_Importance_Sampling")
    assert estimate.verdict is verdict if verdict else "mean weight of an episode" not in estimate.reason


def test_a_range_is_asked_for_rewards_only() -> None:
    result = evaluated(bandit_page([1.0] * 200, metric=[1.0] * 200))
    reward, metric = (estimate_of(result, "IPS_Reward", outcome).reason for outcome in (0, 1))
    assert reward == f"{metric}, or say in evaluation.reward_range which rewards are possible"


# ---- decisions that the log hardly tries


def hardly_tried(rewards: list[float], rows: int) -> EvaluationRows:
    """The policy does what was logged, but in the first rows, where the log tries its action in 0.2 %."""
    page = bandit_page(rewards, propensity=0.998, model_propensity=1.0)
    page.model_propensities[:rows] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return page


@pytest.mark.parametrize(
    ("page", "keys", "verdict", "reason"),
    [
        (hardly_tried(REWARDS, 10), {}, TRUSTWORTHY, "190 effective rows"),  # two sizes of rewards
        (hardly_tried([*REWARDS[:-1], 3.0], 10), {}, SUPPORT,
         "5% of the policy's decisions are hardly tried by the log "
         "(0.02 tries expected in 200 rows, 5 would take 50,000 rows)"),
        (hardly_tried([*REWARDS[:-1], 3.0], 10), {"reward_range": (0.0, 9.0)}, TRUSTWORTHY, "190 effective rows"),
        (hardly_tried([*REWARDS[:-1], 3.0], 0), {}, TRUSTWORTHY, "200 effective rows"),
    ],
)  # fmt: skip
def test_rewards_that_no_row_has_may_be_earned_where_the_log_hardly_tries(
    page: EvaluationRows, keys: dict[str, Any], verdict: Verdict, reason: str
) -> None:
    estimate = estimate_of(evaluated(page, **keys), "IPS_Reward")
    assert estimate.verdict is verdict
    assert reason in estimate.reason
    assert estimate.difference.side == 0


def test_enough_tries_of_similar_weights_show_what_is_earned() -> None:
    """Weights of 100: 0.01 tries a row; 400 rows have 4, 600 have 6. Those of 20 are 50 tries in 1,000 rows."""

    def share(rows: int, probability: float = 0.01) -> tuple[float, float]:
        others = torch.tensor([0.01] * rows + [probability] * 1000, dtype=torch.float64)
        return measure_untried(Alternatives.of(torch.zeros_like(others), 1 - others))

    assert share(400, 0.05) == pytest.approx((400 / 1400, 4.0))
    assert share(600, 0.05) == (0.0, 0.0)
    assert share(400, 0.015) == (0.0, 0.0)
