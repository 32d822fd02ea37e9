"""Propensities, by hand arithmetic."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from helpers.runs import ALONE
from scipy.optimize import brentq

from reagent_lite.evaluation.entropy import PolicyEntropy, SoftmaxRows
from reagent_lite.rl.policies import (
    EpsilonGreedy,
    Softmax,
    likely_enough,
    policy_json,
    policy_of,
)

MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_softmax_is_over_allowed_choices_and_zero_where_none_is() -> None:
    q = torch.log(torch.tensor([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(Softmax(1.0).propensities(q, MASK), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]))
    large = torch.tensor([[500.0, 499.0, 501.0]])  # e^50000 is beyond a number
    torch.testing.assert_close(Softmax(0.01).propensities(large, MASK[:1]), torch.tensor([[1.0, 0.0, 0.0]]))


def test_epsilon_greedy() -> None:
    # the only allowed choice is certain, and the first of equals is taken
    mask = torch.tensor([*MASK.tolist(), [True, False, False], [True, True, True]])
    p = EpsilonGreedy(0.3).propensities(torch.tensor([[1.0, 2.0, 2.0]] * 4), mask)
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


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_the_temperature_that_scipy_finds(scale: float) -> None:
    values = scale * np.random.default_rng(0).normal(size=(50, 4))
    mask = (np.arange(50)[:, None] >= 20) | (np.arange(4) < 3)

    def mean_entropy(temperature: float) -> float:
        powers = np.exp((values - values.max(1, keepdims=True)) / temperature) * mask
        return float(scipy.stats.entropy(powers, axis=1).mean())

    expected = brentq(lambda t: mean_entropy(t * scale) - 0.6, 0.01, 100) * scale
    rows = SoftmaxRows([(torch.from_numpy(values[:30]), torch.from_numpy(mask[:30])),
                        (torch.from_numpy(values[30:]), torch.from_numpy(mask[30:]))], ALONE)  # fmt: skip
    assert rows.temperature(0.6) == pytest.approx(expected, rel=1e-6)
    assert [rows.mean_entropy(expected), rows.largest_entropy()] == pytest.approx(
        [0.6, (20 * math.log(3) + 30 * math.log(4)) / 50]
    )


def test_entropies_that_no_temperature_has() -> None:
    rows = SoftmaxRows([(torch.tensor([[2.0, 1.0]]), MASK[:1, :2])], ALONE)
    assert [rows.temperature(1.0), rows.temperature(-1.0)] == pytest.approx([1e6, 1e-6])
    alike = [(torch.ones(1, 2), MASK[:1, :2])]
    assert [SoftmaxRows(rows, ALONE).temperature(0.3) for rows in (alike, [])] == [1.0, 1.0]


def test_a_policy_that_is_nearly_greedy_or_uniform_says_so() -> None:
    """Values 0 and log 3: at temperature 1 shares of 1/4 and 3/4, entropy 0.562; log 2 = 0.693 is the largest."""
    rows = SoftmaxRows([(torch.tensor([[0.0, math.log(3)]], dtype=torch.float64), MASK[:1, :2])], ALONE)

    def notes(temperature: float, logged: float | None) -> tuple[str, ...]:
        return PolicyEntropy.of(rows, Softmax(temperature), logged).notes

    assert notes(1.0, 0.5) == notes(0.01, 0.01) == ()
    assert notes(0.01, 0.562335) == (
        "softmax of q at temperature 0.01 is nearly greedy: its mean entropy is 0.0% of that of uniform choices; at "
        'temperature 1 it is 81.1%, as in the log (rl.temperature "auto")',
    )
    # a log of uniform choices is nothing to keep to; half of log 2: shares of 0.11 and 0.89, odds of 8.09, and log 3 /
    # log 8.09
    assert (
        notes(100.0, 0.69)
        == notes(100.0, None)
        == (
            "softmax of q at temperature 100 is nearly uniform: its mean entropy is 100.0% of that of uniform choices; "
            "at temperature 0.526 it is 50.0%",
        )
    )
