"""Terms of curved logging policies, by hand and against numpy; logs whose logger is curved."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.curved_loggers import CurvedLogger
from oracles.hidden_loggers import behavior_of
from oracles.regimes import outcome_of

from reagent_lite.evaluation import cpe
from reagent_lite.evaluation.calibration import Tally
from reagent_lite.evaluation.curvature import Terms, quantiles
from reagent_lite.evaluation.decision import Choice
from reagent_lite.evaluation.estimates import ALONE
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.verdict import reliance_on_propensities


def test_quantiles_are_values_of_the_rows() -> None:
    column = torch.tensor([[3.0], [1.0], [2.0], [5.0], [4.0]], dtype=torch.float64)
    assert quantiles(column, torch.tensor([0.0, 0.5, 0.99]), ALONE).tolist() == [[1, 3, 4]]


def test_terms_that_residuals_depend_on() -> None:
    """Residuals that are the product of two of three features: that pair has the largest statistic."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2_000, 3))
    residual = 0.3 * (x[:, 0] * x[:, 2])[:, None] + rng.normal(size=(2_000, 1))
    terms = Terms.best([(torch.from_numpy(x), torch.from_numpy(residual))], (3, 1), 1, ALONE)
    assert terms.pairs.tolist() == [[0, 2]]
    product = x[:, 0] * x[:, 2]
    expected = (product - product.mean()) / product.std()
    np.testing.assert_allclose(terms.of(torch.from_numpy(x))[:, 0], expected, rtol=1e-9)


def test_a_step_is_found_at_the_nearest_of_nineteen_quantiles() -> None:
    x = np.arange(4_000) / 4_000
    residual = np.where(x > 0.71, 1.0, -0.4)[:, None]
    terms = Terms.best([(torch.from_numpy(x[:, None]), torch.from_numpy(residual))], (1, 1), 1, ALONE)
    assert (len(terms.pairs), terms.steps.tolist()) == (0, [0])
    assert terms.limits[0] == pytest.approx(0.7, abs=0.001)


def test_residuals_of_chance_have_no_terms_beyond_chance() -> None:
    rng = np.random.default_rng(1)
    parts = [(torch.from_numpy(rng.normal(size=(3_000, 4))), torch.from_numpy(rng.normal(size=(3_000, 2))))]
    assert len(Terms.best(parts, (4, 2), 40, ALONE)) < 15  # 5 % of 86, most of them correlated


def test_a_logger_with_a_threshold_is_not_calibrated_by_its_mean() -> None:
    """Half of the rows take b, all of them above the median: their number is as expected, but not by the feature."""
    feature = torch.arange(400, dtype=torch.float64).unsqueeze(1)
    tally = Tally(("a", "b"), ("feature age",))
    edges = quantiles(feature, (torch.arange(20, dtype=torch.float64) + 0.5) / 20, ALONE)
    between = torch.searchsorted(edges, feature.T.contiguous()).T.unsqueeze(1)
    action = (feature.squeeze(1) >= 200).long()
    tally.add(
        torch.full((400, 2), 0.5, dtype=torch.float64),
        torch.ones(400, 2, dtype=torch.bool),
        action,
        between,
        torch.ones(400),
    )
    result = tally.calibration(ALONE)
    by_probability = [group for group in result.groups if "probability" in group.rows]
    assert [(group.observed, group.expected) for group in by_probability] == [(200, 200), (200, 200)]
    assert not result.calibrated
    assert re.search(
        r"action '[ab]' between the .* quantile of feature age: 0 logged, 10 expected|20 logged", str(result)
    )


@pytest.mark.parametrize("curve", ["square", "product", "category"])
def test_propensities_of_curved_loggers(curve: str) -> None:
    """Estimated log odds follow the true ones, which a linear function cannot."""
    rng = np.random.default_rng(3)
    number = rng.normal(size=(3_000, 2))
    level = rng.integers(2, size=3_000)
    log_odds = {
        "square": number[:, 0] ** 2 - 1,
        "product": number[:, 0] * number[:, 1],
        "category": (2.0 * level - 1) * number[:, 0],
    }[curve]
    chance = 1 / (1 + np.exp(-log_odds))
    action = (rng.random(3_000) < chance).astype(int)
    estimated = behavior_of(np.column_stack((number, level)), action, np.arange(3_000), 2)
    assert estimated.calibration is not None
    assert estimated.calibration.calibrated
    of_second = np.where(action == 1, estimated.propensity, 1 - estimated.propensity)
    assert np.corrcoef(of_second, chance)[0, 1] > 0.97


def test_a_column_of_numbers_decides_nothing_without_a_model_of_the_reward() -> None:
    misses, choice = outcome_of(CurvedLogger(curve="square", rows=1_000, model="none"), 0)
    assert (misses, choice) == ({}, Choice.NOT_ENOUGH)


def test_a_difference_that_rests_on_estimated_propensities() -> None:
    """Its interval lies beside the estimate, or the state's rewards make it: without both, 0 is inside."""
    centered = Interval(value=0.5, low=0.1, high=0.9)
    assert reliance_on_propensities(centered, 0.0) == ""
    assert reliance_on_propensities(centered, 0.05) == ""
    assert "it is 0.30 (-0.10 to 0.70)" in reliance_on_propensities(centered, 0.2)
    beside = Interval(value=0.3, low=0.1, high=0.9)  # half the width is 0.4
    assert "rests on estimated propensities" in reliance_on_propensities(beside, 0.0)
    assert reliance_on_propensities(Interval(value=-0.5, low=-0.9, high=-0.1), 0.05) == ""


def test_what_propensities_add_through_predicted_rewards() -> None:
    """Weights 3/2, 1/2, 3/2, 1/2 and rewards 1, 0, 1, 0, which features predict: (1/2 - 1/2 * 0) / 2 = 1/4."""
    half = torch.full((4,), 0.5, dtype=torch.float64)
    model = torch.tensor([[0.75, 0.25], [0.25, 0.75]] * 2, dtype=torch.float64)
    reward = torch.tensor([[1.0], [0.0]] * 2, dtype=torch.float64)
    page = EvaluationRows(
        names=("Reward",), episode=torch.arange(4), action=torch.zeros(4, dtype=torch.int64),
        mask=torch.ones(4, 2, dtype=torch.bool), steps=torch.ones(4).double(), bootstrap=torch.zeros(4).double(),
        propensity=half, model_propensities=model, outcomes=reward, q_values=torch.zeros(4, 2, 1).double(),
        reward_model=torch.zeros(4, 2, 1).double(), next_value=torch.zeros(4, 1).double(),
    )  # fmt: skip
    assert cpe._measure_unexplained(page, 0) == {}
    predicted = replace(page, predicted_reward=reward[:, 0])
    assert cpe._measure_unexplained(predicted, 0) == pytest.approx({False: 0.25, True: 0.25})
    # a model that knows the rewards leaves nothing to predict
    known = replace(predicted, reward_model=reward.unsqueeze(1).expand(-1, 2, -1))
    assert cpe._measure_unexplained(known, 0) == pytest.approx({False: 0.25, True: 0.0})
