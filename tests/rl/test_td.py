"""Targets, by hand arithmetic."""

import math
from functools import partial

import pytest
import torch

from reagent_lite.rl.td import (
    discount,
    double_q_value,
    expected_value,
    greedy_value,
    select_choice,
    td_target,
    value_bounds,
)

Q = torch.tensor([[3.0, 4.0]])
Q_TARGET = torch.tensor([[2.0, 1.0]])


@pytest.mark.parametrize(
    ("mask", "double", "single"),
    [([True, True], 1, 2), ([True, False], 2, 2), ([False, True], 1, 1), ([False, False], 0, 0)],
)
def test_double_q_takes_the_online_choice_and_single_q_the_largest_target_value(
    mask: list[bool], double: float, single: float
) -> None:
    """Of the allowed choices; a row without any has value 0."""
    allowed = torch.tensor([mask])
    assert double_q_value(Q, partial(select_choice, Q_TARGET), allowed).item() == double
    assert greedy_value(Q_TARGET, Q_TARGET, allowed).item() == single


def test_values_of_distributions_keep_their_outputs() -> None:
    outputs = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    allowed = torch.tensor([[True, True], [False, False]])
    assert greedy_value(outputs.mean(2), outputs, allowed).tolist() == [[3.0, 4.0], [0.0, 0.0]]


def test_discount_is_gamma_to_the_steps_and_zero_after_the_end() -> None:
    assert discount(0.9, torch.tensor([4.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])).tolist() == pytest.approx(
        [0.6561, 0.729, 0.0]
    )
    assert discount(0.0, torch.tensor([1.0, 2.0]), torch.ones(2)).tolist() == [0.0, 0.0]


def test_target_and_expectation() -> None:
    step = (torch.tensor([1.0]), torch.tensor([0.5]))  # reward and discount
    assert td_target(*step, torch.tensor([6.0])).item() == 4.0
    assert td_target(*step, torch.tensor([[6.0, -9.0]]), (-3.0, 3.5)).tolist() == [[3.5, -3.0]]
    assert expected_value(Q, torch.tensor([[0.25, 0.75]])).item() == 3.75


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1.0, 0.99)], (0, 100)),
        ([(-1.0, 0.9), (-1.0, 0.0)], (-10, 0)),  # each step costs 1 until an end
        ([(0.0, 0.9), (5.0, 0.0), (-2.0, 0.0)], (-2, 5)),  # only ends pay, once
        ([(0.0, 1.0), (1.0, 0.0)], (0, 1)),  # the same without a discount
        ([(2.0, 0.5), (6.0, 0.0)], (0, 6)),  # 2 / (1 - 1/2) = 4 without end
        ([(-1.0, 0.0), (2.0, 0.0)], (-1, 2)),  # gamma 0
        ([(1.0, 1.0)], (0, math.inf)),
        ([(1.0, 1.0), (-1.0, 1.0)], (-math.inf, math.inf)),
        ([(1.75, 0.125)], (0, 2)),  # 1 + 1/2 + 1/4 in a row of three steps, gamma 1/2
        ([(3.0, 0.25), (3.0, 0.5)], (0, 6)),  # time differences 2 and 1: the shorter pays more often
        ([], (0, 0)),
    ],
)
def test_what_rewards_can_pay(rows: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    reward, discount = torch.tensor(rows, dtype=torch.float64).view(-1, 2).unbind(1)
    assert value_bounds(reward, discount) == pytest.approx(expected)
