"""Estimators against arithmetic by hand, identities that must hold exactly, and a slow NumPy transcription."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.tables import TWO_EPISODES, estimates, random_table, rows, some, table
from oracles.repeated import step_returns

from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.magic import step_contributions
from reagent_lite.rl.sums import EpisodeSums, EpisodeTable, shrunk, switch_weights

LENGTHS = (3, 1, 5, 2)


def value(name: str, e: EpisodeTable) -> float:
    return float(estimates(ESTIMATORS[name], e, torch.ones(1, len(e.reward)))[0])


def assert_values(e: EpisodeTable, expected: dict[str, float]) -> None:
    assert {name: value(name, e) for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def test_three_rows_by_hand():
    # propensities .2 .5 .4; the greedy policy agrees in row 2 only: weights 0, 1 / .5, 0
    assert_values(rows([0, 2, 0], [4, 5, 7], [2, 4, 6], [1, 4, 5]), {
        "Direct_Method_Reward": 10 / 3,  # (1 + 4 + 5) / 3
        "IPS_Reward": 10 / 3,  # 2 * 5 / 3
        "Doubly_Robust_Reward": 4.0,  # (1 + 4 + 2 * (5 - 4) + 5) / 3
        "Self_Normalized_IPS_Reward": 5.0,  # 2 * 5 / 2
        "Self_Normalized_Doubly_Robust_Reward": 13 / 3,  # 10 / 3 + 2 / 2
    })  # fmt: skip


def test_switch_and_shrinkage_by_hand():
    e = rows([2, 0.5], [4, 6], [1, 4], [3, 5])
    # residuals 2 * 3 and .5 * 2; with threshold 1 the first is left out
    assert [switch_weights(limit)(e).sum(1).tolist() for limit in (2.0, 1.0)] == [[6, 1], [0, 1]]
    # lambda 4: 4 * 2 / (4 + 4) = 1 and 4 * .5 / (.25 + 4) = 2 / 4.25; lambda 0 is DM, infinity DR
    assert [shrunk(strength)(e).sum(1).tolist() for strength in (4.0, 0.0, 1e12)] == [
        pytest.approx([1 * 3, 2 / 4.25 * 2]), [0, 0], pytest.approx([6, 1])
    ]  # fmt: skip
    assert_values(e, {
        "Switch_Doubly_Robust_Reward": (3 + 6 + 5 + 1) / 2,  # both weights are below 10
        "Shrunk_Doubly_Robust_Reward": (8 + 200 / 104 * 3 + 50 / 100.25 * 2) / 2,  # lambda 100: 200 / 104, 50 / 100.25
    })  # fmt: skip
    assert_values(rows([10.5, 0.5], [4, 6], [1, 4], [3, 5]), {"Switch_Doubly_Robust_Reward": (3 + 5 + 1) / 2})


def test_two_step_table_by_hand():
    # omega_0 = 2/5, 3/5; omega_1 = 1/4, 3/4
    assert_values(TWO_EPISODES, {
        "Per_Decision_Importance_Sampling": (2 * 1 + 0.5 * 1 * 4 + 3 * 2) / 2,
        "Weighted_Per_Decision_Importance_Sampling": 2 / 5 * 1 + 3 / 5 * 2 + 1 / 4 * 0.5 * 4,
        # A and B
        "Sequential_Doubly_Robust": (2 * (1 - 2) + 4 + 0.5 * (1 * (4 - 3) + 2 * 5) + 3 * (2 - 1) + 6) / 2,
        "Weighted_Sequential_Doubly_Robust":
            (4 + 6) / 2 + 2 / 5 * (1 - 2) + 3 / 5 * (2 - 1) + 0.5 * (2 / 5 * 5 + 1 / 4 * (4 - 3)),
        "Fitted_Q_Evaluation": (4 + 6) / 2,
    })  # fmt: skip


def checked_step_returns(e: EpisodeTable) -> list[float]:
    """The j-step returns of the log itself; asserts that the contributions of its episodes sum to them."""
    returns = step_returns(e, torch.ones(1, len(e.reward)))[0]
    torch.testing.assert_close(torch.cat(list(step_contributions(EpisodeSums.of([[e]]), 0))).sum(0), returns)
    return returns.tolist()


def test_the_value_model_continues_where_the_record_is_cut():
    # g_-1 = DM; g_0 adds the first correction and the value after it; g_1 the second correction
    g0 = 5 + 2 / 5 * (1 - 2) + 3 / 5 * (2 - 1) + 0.5 * 2 / 5 * 5
    assert checked_step_returns(TWO_EPISODES) == pytest.approx([5.0, g0, g0 + 0.5 * 1 / 4])
    # as above, but the record of A ends in a state of value 8: its D is .25, rho A at the last row 1, omega 1/4
    e = replace(TWO_EPISODES, tail=torch.tensor([[0, 0.25 * 8], [0, 0]], dtype=torch.float64))
    added = {"Sequential_Doubly_Robust": 2 / 2, "Weighted_Sequential_Doubly_Robust": 1 / 4 * 2,
             "Per_Decision_Importance_Sampling": 0.0, "Fitted_Q_Evaluation": 0.0}  # fmt: skip
    assert_values(e, {name: value(name, TWO_EPISODES) + more for name, more in added.items()})
    assert checked_step_returns(e) == pytest.approx([5, g0, g0 + 0.5 * 1 / 4 + 1 / 4 * 2])


@pytest.mark.parametrize("seed", range(3))
def test_same_policy_gives_the_mean_return_of_unequal_episodes(seed: int):
    # an ended episode whose weight fell to 0 would lift this, by 1.467 in the system this guards against
    e = random_table(LENGTHS, seed, spread=0)
    of_episode = sum(0.95**t * float(e.reward[i, t]) for i, length in enumerate(LENGTHS) for t in range(length)) / 4
    of_row = float(e.reward.sum()) / sum(LENGTHS)
    assert_values(e, {
        "Per_Decision_Importance_Sampling": of_episode, "Weighted_Per_Decision_Importance_Sampling": of_episode,
        "IPS_Reward": of_row, "Self_Normalized_IPS_Reward": of_row,
    })  # fmt: skip


DRAWN = random_table(LENGTHS, 1)


@pytest.mark.parametrize(
    ("pairs", "e"),
    [
        ({
            "Sequential_Doubly_Robust": "Per_Decision_Importance_Sampling",
            "Weighted_Sequential_Doubly_Robust": "Weighted_Per_Decision_Importance_Sampling",
            "Doubly_Robust_Reward": "IPS_Reward",
            "Self_Normalized_Doubly_Robust_Reward": "Self_Normalized_IPS_Reward",
         }, table(LENGTHS, 0.9, weight=DRAWN.weight, reward=DRAWN.reward)),
        ({
            "Fitted_Q_Evaluation": "Direct_Method_Reward",
            "Per_Decision_Importance_Sampling": "IPS_Reward",
            "Weighted_Per_Decision_Importance_Sampling": "Self_Normalized_IPS_Reward",
            "Sequential_Doubly_Robust": "Doubly_Robust_Reward",
            "Weighted_Sequential_Doubly_Robust": "Self_Normalized_Doubly_Robust_Reward",
         }, rows([2, 0.6, 1.75], [4, 5, 7], [2, 4, 6], [1, 4, 5])),
    ],
    ids=["no model", "horizon 1"],
)  # fmt: skip
def test_one_form_becomes_another(pairs: dict[str, str], e: EpisodeTable):
    assert_values(e, {name: value(other, e) for name, other in pairs.items()})


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "MAGIC"])
def test_counts_are_repeated_episodes(name: str):
    e = random_table(LENGTHS, 4)
    counts = torch.tensor([[1, 1, 1, 1], [1, 0, 2, 1]], dtype=torch.float64)
    assert_values(some(e, torch.tensor([3, 2, 0, 2])), {name: float(estimates(ESTIMATORS[name], e, counts)[1])})


def test_after_the_last_supported_step_the_value_model_continues():
    # both episodes leave the policy at step 1: WDR is r_0 plus the discounted value there
    e = table((2, 2), 0.5, weight=[[1, 0], [1, 0]], reward=[[2, 9], [4, 9]], value_expected=[[0, 6], [0, 8]])
    assert_values(e, {
        "Weighted_Sequential_Doubly_Robust": 3 + 0.5 * 7, "Weighted_Per_Decision_Importance_Sampling": 3,
    })  # fmt: skip


def test_without_any_weight_the_estimate_is_undefined():
    undefined = ("Self_Normalized_IPS_Reward", "Weighted_Per_Decision_Importance_Sampling",
                 "Weighted_Sequential_Doubly_Robust", "MAGIC")  # fmt: skip
    assert_values(rows([0, 0], [4, 5], [2, 4], [1, 4]), dict.fromkeys(undefined, math.nan))


def test_magic_is_exact_where_all_lengths_agree():
    # a perfect model: q = r + gamma v', v = sum pi q, so that every g_j is the same number
    ones = torch.ones(3, 2)
    q = torch.tensor([[1.5, 1.0]] * 3)
    e = table((2, 2, 2), 0.5, weight=[[2, 0.5], [1, 3], [0.25, 1]], reward=ones, reward_taken=ones,
              reward_expected=ones, value_taken=q, value_expected=q)  # fmt: skip
    assert_values(e, {"MAGIC": 1.5})
