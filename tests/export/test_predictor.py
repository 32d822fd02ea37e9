"""Live predictors against values computed by hand; see conftest.py for the formulas."""

import copy
import math

import pytest
import torch
from oracles.bundles import Habit

from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, decide
from reagent_lite.models.restrictions import LikelyInTheLog
from reagent_lite.rl.policies import Softmax

NAN, INF = float("nan"), float("inf")


def run(predictor: DiscretePredictor, rows: list[list[float]], mask: list[list[bool]]) -> list[torch.Tensor]:
    values = torch.tensor(rows)
    with torch.inference_mode():
        return list(predictor(values, ~torch.isnan(values), torch.tensor(mask)))


def test_q_is_of_the_normalized_features_and_missing_is_zero(discrete_predictor: DiscretePredictor) -> None:
    # b = 1, z = (5 - 1) / 2 = 2: q = (3, 4, 0). Second row: b missing -> 0, z = 0: q = (0, 0, 1).
    q, greedy, *_ = run(discrete_predictor, [[1, 5], [NAN, 1]], [[True] * 3] * 2)
    assert q.tolist() == [[3, 4, 0], [0, 0, 1]]
    assert greedy.tolist() == [1, 2]


def test_absent_by_presence_is_missing_whatever_the_value(discrete_predictor: DiscretePredictor) -> None:
    with torch.inference_mode():
        q, greedy, *_ = discrete_predictor(
            torch.tensor([[1.0, INF]]), torch.tensor([[True, False]]), torch.ones(1, 3, dtype=torch.bool)
        )
    assert q.tolist() == [[1, 0, 0]]
    assert greedy.tolist() == [0]


def test_mask_moves_the_choice_but_not_q_and_ties_go_to_the_lowest_index(discrete_predictor: DiscretePredictor) -> None:
    mask = [[True, False, True], [True, True, False], [False, True, False], [False, False, False]]
    q, greedy, propensities, _ = run(discrete_predictor, [[1, 5], [NAN, 1], [1, 5], [1, 5]], mask)
    assert q.tolist() == [[3, 4, 0], [0, 0, 1], [3, 4, 0], [3, 4, 0]]
    assert greedy.tolist() == [0, 0, 1, -1]
    # epsilon 0.3 over two; a tie goes to the first; one action has all; none has nothing
    expected = [[0.85, 0, 0.15], [0.85, 0.15, 0], [0, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(propensities, torch.tensor(expected))


def test_what_the_log_hardly_takes_is_not_chosen(discrete_predictor: DiscretePredictor) -> None:
    restricted = copy.deepcopy(discrete_predictor)
    restricted.restriction = LikelyInTheLog(Habit([0.5, 0.04, 0.46]), 0.1)
    q, greedy, propensities, choices = run(restricted, [[1, 5]] * 3, [[True] * 3, [False, True, True], [False] * 3])
    assert q.tolist() == [[3, 4, 0]] * 3
    # 0.04 / 0.5 = 0.08 and 0.04 / 0.46 = 0.087 are below 0.1, 0.46 / 0.5 is not
    assert choices.tolist() == [[True, False, True], [False, False, True], [False] * 3]
    assert greedy.tolist() == [0, 2, -1]
    torch.testing.assert_close(propensities, torch.tensor([[0.85, 0, 0.15], [0, 0, 1], [0, 0, 0]]))


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
