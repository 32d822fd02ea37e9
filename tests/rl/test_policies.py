"""Propensities, by hand arithmetic."""

import torch

from reagent_lite.rl.policies import EpsilonGreedy, Softmax, likely_enough, policy_json, policy_of

MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_softmax_is_over_allowed_choices_and_zero_where_none_is() -> None:
    q = torch.log(torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(Softmax(1.0).propensities(q, MASK), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]))


def test_softmax_at_a_low_temperature_does_not_overflow() -> None:
    p = Softmax(0.01).propensities(torch.tensor([[500.0, 499.0]]), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(p, torch.tensor([[1.0, 0.0]]))


def test_epsilon_greedy() -> None:
    # the only allowed choice is certain, and the first of equals is taken
    q = torch.tensor([[1.0, 2.0, 2.0]]).repeat(4, 1)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    p = EpsilonGreedy(0.3).propensities(q, torch.cat((MASK, mask)))
    torch.testing.assert_close(p, torch.tensor([[0.15, 0.85, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.1, 0.8, 0.1]]))


def test_a_policy_as_json_and_in_words() -> None:
    documents = {str(policy): policy_json(policy) for policy in (Softmax(0.01), EpsilonGreedy(0.05), EpsilonGreedy())}
    assert documents == {
        "softmax of q at temperature 0.01": {"kind": "softmax", "temperature": 0.01},
        "epsilon-greedy at epsilon 0.05": {"kind": "epsilon_greedy", "epsilon": 0.05},
        "greedy": {"kind": "epsilon_greedy", "epsilon": 0.0},
    }
    assert [str(policy_of(document)) for document in documents.values()] == list(documents)


def test_likely_enough_compares_with_the_largest_allowed() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.45]])).repeat(2, 1)
    kept = likely_enough(logits, torch.tensor([[True, True, True], [True, False, False]]), 0.11)
    assert kept.tolist() == [[False, True, True], [True, False, False]]
