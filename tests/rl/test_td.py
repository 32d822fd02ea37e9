"""Targets, by hand arithmetic."""

import math
from functools import partial

import pytest
import torch

from reagent_lite.rl.td import (
    chosen,
    discount,
    double_q_value,
    expected_value,
    greedy_choice,
    greedy_value,
    td_target,
    value_bounds,
)

Q = torch.tensor([[3.0, 4.0]])
Q_TARGET = torch.tensor([[2.0, 1.0]])
TARGET = partial(chosen, Q_TARGET)
BOTH = torch.tensor([[True, True]])
FIRST = torch.tensor([[True, False]])
SECOND = torch.tensor([[False, True]])


def test_double_q_takes_the_online_choice_and_the_target_value() -> None:
    assert greedy_choice(Q, BOTH).item() == 1
    assert double_q_value(Q, TARGET, BOTH).item() == 1
    assert greedy_choice(Q, FIRST).item() == 0
    assert double_q_value(Q, TARGET, FIRST).item() == 2


def test_single_q_takes_the_largest_allowed_target_value() -> None:
    assert greedy_choice(Q_TARGET, BOTH).item() == 0
    assert greedy_value(Q_TARGET, Q_TARGET, BOTH).item() == 2
    assert greedy_choice(Q_TARGET, SECOND).item() == 1
    assert greedy_value(Q_TARGET, Q_TARGET, SECOND).item() == 1


def test_a_row_without_choices_has_value_zero() -> None:
    none = torch.tensor([[False, False]])
    assert greedy_value(Q, Q, none).item() == 0
    assert double_q_value(Q, TARGET, none).item() == 0


def test_values_of_distributions_keep_their_outputs() -> None:
    outputs = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    mask = torch.tensor([[True, True], [False, False]])
    assert greedy_value(outputs.mean(2), outputs, mask).tolist() == [[3.0, 4.0], [0.0, 0.0]]


def test_discount_is_gamma_to_the_steps_and_zero_after_the_end() -> None:
    d = discount(0.9, torch.tensor([4.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(d, torch.tensor([0.6561, 0.729, 0.0]))
    assert discount(0.0, torch.tensor([1.0, 2.0]), torch.ones(2)).tolist() == [0.0, 0.0]


def test_target_and_expectation() -> None:
    reward = torch.tensor([1.0])
    half = torch.tensor([0.5])
    assert td_target(reward, half, torch.tensor([6.0])).item() == 4.0
    assert td_target(reward, half, torch.tensor([[6.0, -9.0]]), (-3.0, 3.5)).tolist() == [[3.5, -3.0]]
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
