"""Differences of two policies on one log."""

import pytest
import torch
from oracles.pages import bandit_page

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, Estimate, differences, evaluate_page
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.evaluation.verdict import Verdict

VALUES = (3 + torch.randn(200, generator=torch.Generator().manual_seed(0))).tolist()


def evaluated(page: EvaluationPage, **limits: int) -> CPEResult:
    config = EvaluationConfig(bootstrap_resamples=200, **limits)
    return evaluate_page(page, gamma=0.9, config=config, generator=torch.Generator().manual_seed(7))


def compare(one: EvaluationPage, other: EvaluationPage, **limits: int) -> dict[str, Estimate]:
    found = differences(evaluated(one, **limits), evaluated(other, **limits))
    return {difference.name: difference for difference in found["Reward"]}


def test_a_policy_does_not_differ_from_itself():
    page = bandit_page(VALUES, episode=sorted([i % 50 for i in range(200)]))
    for difference in compare(page, page, max_episodes=30).values():
        assert (difference.figure.value, difference.figure.low, difference.figure.high) == (0, 0, 0)


def test_differences_are_resampled_in_pairs():
    # weights 1.1 and .9 of the same rows: IPS differs by .2 of the mean, in every resample
    one, other = (bandit_page(VALUES, model_propensity=p) for p in (0.55, 0.45))
    ips = compare(one, other)["IPS_Reward"]
    mean = sum(VALUES) / len(VALUES)
    assert ips.figure.value == pytest.approx(0.2 * mean)
    single = evaluated(one).outcomes[0].one_step.logged
    # the same resamples as evaluate_page's: the interval is .2 of the logged mean's
    assert ips.figure.high - ips.figure.low == pytest.approx(0.2 * (single.high - single.low))
    assert ips.verdict is Verdict.TRUSTWORTHY
    assert ips.reason == "model is better"


def test_pages_without_rows_have_no_differences():
    empty = evaluated(bandit_page([1.0]).rows(torch.zeros(1, dtype=torch.bool)))
    assert differences(empty, empty) == {}
