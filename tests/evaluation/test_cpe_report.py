"""Reports say what the result says: as JSON, as dashboard tags, as lines."""

import json

import torch
from oracles.pages import bandit_page

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page
from reagent_lite.evaluation.document import as_json, lines, reward_model_scalars, scalars
from reagent_lite.evaluation.page import EvaluationPage

TAGS = (
    "Direct_Method_Reward",
    "IPS_Reward",
    "Doubly_Robust_Reward",
    "Sequential_Doubly_Robust",
    "Weighted_Sequential_Doubly_Robust",
    "MAGIC",
)


def evaluate(page: EvaluationPage) -> CPEResult:
    config = EvaluationConfig(bootstrap_resamples=200)
    return evaluate_page(page, gamma=0.9, config=config, generator=torch.Generator().manual_seed(0))


PAGE = bandit_page([1.0, 2.0, 3.0, 4.0] * 10, metric=[5.0] * 40, model_propensity=0.25)


def test_json_has_no_nan():
    result = evaluate(bandit_page([0.0] * 20, model_propensity=0.0))
    text = json.dumps(as_json(result), allow_nan=False)
    read = json.loads(text)
    snips = next(e for e in read["outcomes"][0]["one_step"]["estimates"] if e["name"] == "Self_Normalized_IPS_Reward")
    assert snips["figure"]["value"] is None
    assert snips["verdict"] == "do not use"
    assert read["overlap"]["num_episodes"] == 20
    assert all(value == value for value in scalars(result).values())


def test_lines_name_each_estimate_with_its_own_numbers():
    result = evaluate(PAGE)
    text = list(lines(result))
    for estimate in result.outcomes[0].estimates:
        line = next(line for line in text if line.strip().startswith(f"{estimate.name}:"))
        assert f": {estimate.figure} = " in line
        assert str(estimate.verdict) in line
    assert any("40 held-out episodes, 40 rows" in line for line in text)


def test_an_empty_result_is_reported():
    empty = evaluate(PAGE.rows(torch.zeros(40, dtype=torch.bool)))
    assert list(lines(empty)) == ["CPE: no held-out rows to evaluate on"]
    assert scalars(empty) == {}
    assert as_json(empty)["overlap"] is None


def test_reward_model_means_are_over_rows_that_allow_the_action():
    page = bandit_page([1.0, 2.0])
    page.reward_model[:, :, 0] = torch.tensor([[1.0, 5.0], [3.0, 9.0]], dtype=torch.float64)
    page.mask[1, 1] = False
    assert reward_model_scalars(page, ("a", "b")) == {"reward/model/a/mean": 2.0, "reward/model/b/mean": 5.0}
