"""Propensities, by hand arithmetic."""

import torch

from reagent_lite.rl.policies import epsilon_greedy_policy, likely_enough, softmax_policy

MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_softmax_is_over_allowed_choices_and_zero_where_none_is() -> None:
    q = torch.log(torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(softmax_policy(q, MASK, 1.0), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]))


def test_softmax_at_a_low_temperature_does_not_overflow() -> None:
    p = softmax_policy(torch.tensor([[500.0, 499.0]]), torch.ones(1, 2, dtype=torch.bool), 0.01)
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0]]))


def test_epsilon_greedy() -> None:
    p = epsilon_greedy_policy(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), MASK, 0.2)
    torch.testing.assert_close(p, torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.0, 0.0]]))


def test_likely_enough_compares_with_the_largest_allowed() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.45]])).repeat(2, 1)
    kept = likely_enough(logits, torch.tensor([[True, True, True], [True, False, False]]), 0.11)
    assert kept.tolist() == [[False, True, True], [True, False, False]]
