"""What only the live predictors can be asked; that a bundle's values are right, test_bundle.py computes by hand."""

import math

import pytest
import torch

from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, decide
from reagent_lite.rl.policies import Softmax

NAN, INF = float("nan"), float("inf")


def run(predictor: DiscretePredictor, rows: list[list[float]], mask: list[list[bool]]) -> list[torch.Tensor]:
    values = torch.tensor(rows)
    with torch.inference_mode():
        return list(predictor(values, ~torch.isnan(values), torch.tensor(mask)))


def test_small_temperature_is_stable() -> None:
    # difference 0.5 at temperature 0.01: the second has exp(-50) of the first; 1e6 / 0.01 alone has no float32 digits
    q = torch.tensor([[1e6, 1e6 - 0.5, -1e30], [0.011, 0.001, 3.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    _, greedy, propensities, _ = decide(q, mask, torch.zeros(2, dtype=torch.bool), Softmax(0.01))
    assert greedy.tolist() == [0, 0]
    assert propensities[0].tolist() == pytest.approx([1, math.exp(-50), 0], rel=1e-5)
    # (0.011 - 0.001) / 0.01 = 1
    assert propensities[1].tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e), 0], rel=1e-5)


def test_infinity_gives_no_answer(discrete_predictor: DiscretePredictor) -> None:
    q, greedy, propensities, _ = run(discrete_predictor, [[1, -INF], [1, 5]], [[True] * 3] * 2)
    assert q[0].isnan().all()
    assert q[1].tolist() == [3, 4, 0]
    assert greedy.tolist() == [-1, 1]
    assert propensities[0].tolist() == [0, 0, 0]


def test_parametric_mean_is_over_allowed_candidates(parametric_predictor: ParametricPredictor) -> None:
    state = torch.tensor([[10.0], [NAN]])
    candidates = torch.tensor([[[1.0], [2.0], [6.0]], [[4.0], [NAN], [INF]]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    with torch.inference_mode():
        q, greedy, propensities, _ = parametric_predictor(state, ~state.isnan(), candidates, ~candidates.isnan(), mask)
    # row 0: 10 + (1, 2, 6) - 3; row 1: state missing -> 0, candidates 4 and 0 (missing), mean 2, infinity is padding
    assert q[0].tolist() == [8, 9, 13]
    assert q[1, :2].tolist() == [2, -2]
    assert greedy.tolist() == [2, 0]
    assert propensities[1].tolist() == pytest.approx([0.85, 0.15, 0])


def test_parametric_infinity_in_an_allowed_candidate_gives_no_answer(parametric_predictor: ParametricPredictor) -> None:
    candidates = torch.tensor([[[1.0], [INF]]])
    presence = torch.ones(1, 2, 1, dtype=torch.bool)
    state = (torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    with torch.inference_mode():
        q, greedy, *_ = parametric_predictor(*state, candidates, presence, torch.ones(1, 2, dtype=torch.bool))
    assert q.isnan().all()
    assert greedy.tolist() == [-1]
