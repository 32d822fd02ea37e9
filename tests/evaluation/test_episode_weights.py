"""Verdicts on weights of whole episodes: their mean should be 1, and products hide what rows do not show."""

import dataclasses
import math

import pytest
import torch
from oracles.pages import bandit_page

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.evaluation.verdict import Verdict

CONFIG = EvaluationConfig(bootstrap_resamples=100, max_horizon=1000)
WEIGHTED = (
    "Per_Decision_Importance_Sampling",
    "Weighted_Per_Decision_Importance_Sampling",
    "Weighted_Sequential_Doubly_Robust",
    "MAGIC",
)


def weighing(page: EvaluationPage, weights: list[float]) -> EvaluationPage:
    """The page with these weights of rows, 0 to 2; the log chose with probability 1/2."""
    taken = torch.tensor(weights, dtype=torch.float64) / 2
    return dataclasses.replace(page, model_propensities=torch.stack((taken, 1 - taken), 1))


def judged(weights: list[float], episodes: int = 30) -> CPEResult:
    """Evaluates episodes all of whose rows have these weights, in turn, and rewards 3 give or take 1."""
    rows = len(weights)
    page = bandit_page([3.0 + (-1) ** n for n in range(episodes) for _ in range(rows)],
                       episode=[n for n in range(episodes) for _ in range(rows)])  # fmt: skip
    return evaluate_page(
        weighing(page, weights * episodes), gamma=1.0, config=CONFIG, generator=torch.Generator().manual_seed(0)
    )


def reasons(result: CPEResult) -> dict[str, tuple[Verdict, str]]:
    return {one.name: (one.verdict, one.reason) for one in result.outcomes[0].estimates if one.name in WEIGHTED}


# 40 rows, of which 95 % are 38: the first step by which so many have passed is number 37, with a product of 38 weights
@pytest.mark.parametrize(
    ("weight", "verdict", "says"),
    [
        (1.0, Verdict.TRUSTWORTHY, None),
        (0.95, Verdict.DO_NOT_USE, "is 0.142 instead of 1, as episodes that the policy makes likely are missing"),
        (0.995, Verdict.WIDE, "is 0.827 instead of 1, as episodes that the policy makes likely are missing"),
        (1.01, Verdict.WIDE, "is 1.46 instead of 1, as logged propensities are too small"),  # 1.01^38
        (1.05, Verdict.DO_NOT_USE, "is 6.39 instead of 1, as logged propensities are too small"),  # 1.05^38
    ],
)
def test_rows_that_are_a_little_off_multiply(weight: float, verdict: Verdict, says: str | None) -> None:
    result = judged([weight] * 40)
    overlap = result.overlap
    assert overlap is not None
    assert overlap.judged_step == 37
    assert overlap.mean_weight.value == pytest.approx(weight)
    assert overlap.mean_episode_weight.value == pytest.approx(weight**38)
    assert overlap.mean_episode_weight.low == pytest.approx(weight**38)  # all alike: nothing varies
    for found, reason in reasons(result).values():
        assert found is verdict
        assert says is None or f"the mean weight of an episode up to step 37 {says}" in reason
    one_step = {one.name: one for one in result.outcomes[0].one_step.estimates}
    assert one_step["IPS_Reward"].verdict is Verdict.TRUSTWORTHY  # of rows, 0.95 and 1.05 are within a tenth of 1


def test_weights_that_vanish_are_named() -> None:
    # rows weigh 1.9 and 0.1 in turn: 1 in the mean, and (1.9 * 0.1)^475 = 10^-342 up to step 949 of 1000
    result = judged([1.9, 0.1] * 500, episodes=12)
    assert result.overlap is not None
    assert result.overlap.mean_weight.value == pytest.approx(1.0)
    assert 475 * math.log10(0.19) < -323  # below the smallest number
    assert result.overlap.mean_episode_weight.value == 0
    for found, reason in reasons(result).values():
        assert found is Verdict.DO_NOT_USE
        assert "up to step 949 is 0, or too small for a number, instead of 1" in reason


def test_a_mean_weight_that_may_be_one_is_no_reason() -> None:
    # 21 weights of 2 and 19 of 0.2, one row each: 1.145 in the mean, give or take twice 0.14
    page = bandit_page([3.0 + (-1) ** n for n in range(40)])
    page = weighing(page, [2.0] * 21 + [0.2] * 19)
    result = evaluate_page(page, gamma=1.0, config=CONFIG, generator=torch.Generator().manual_seed(0))
    assert result.overlap is not None
    mean = result.overlap.mean_episode_weight
    values = [2.0] * 21 + [0.2] * 19
    centre = sum(values) / 40  # 1.145
    error = math.sqrt(sum((one - centre) ** 2 for one in values) / 39 / 40)
    assert (mean.value, mean.low, mean.high) == pytest.approx(
        (centre, centre - 1.959964 * error, centre + 1.959964 * error), rel=1e-5
    )
    assert mean.low < 1 < mean.high
    assert all("mean weight of an episode" not in reason for _, reason in reasons(result).values())


@pytest.mark.parametrize(("ones", "verdict"), [(23, Verdict.WIDE), (26, Verdict.TRUSTWORTHY)])
def test_too_little_is_a_doubt_whatever_its_interval_holds(ones: int, verdict: Verdict) -> None:
    # 46 episodes: of 0.1 and of 1.5 each 23: 0.8 give or take 0.2; three more of the latter: 0.891
    page = bandit_page([30.0 + (-1) ** n for n in range(46)])
    page = weighing(page, [1.5, 0.1] * (46 - ones) + [1.5] * (2 * ones - 46))
    result = evaluate_page(page, gamma=1.0, config=CONFIG, generator=torch.Generator().manual_seed(0))
    assert result.overlap is not None
    mean = result.overlap.mean_episode_weight
    assert mean.value == pytest.approx((1.5 * ones + 0.1 * (46 - ones)) / 46)
    assert mean.low < 1 < mean.high
    found, _ = reasons(result)["Weighted_Per_Decision_Importance_Sampling"]
    assert found is verdict
