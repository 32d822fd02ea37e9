"""Estimators against arithmetic by hand, identities that must hold exactly, and a slow NumPy transcription."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from oracles.repeated import step_returns
from torch import Tensor

from reagent_lite.rl.estimators import ESTIMATORS, shrunk, switched
from reagent_lite.rl.magic import step_contributions
from reagent_lite.rl.sums import Episodes, Log

LENGTHS = (3, 1, 5, 2)
GAMMA = 0.9


def sample(n: int) -> Tensor:
    return torch.ones(1, n, dtype=torch.float64)


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def one_step(weight: list[float], reward: list[float], taken: list[float], expected: list[float]) -> Episodes:
    column = {
        name: torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        for name, values in (("w", weight), ("r", reward), ("t", taken), ("e", expected))
    }
    ones = torch.ones_like(column["w"])
    return Episodes(
        running=ones, weight=column["w"], discount=ones, reward=column["r"],
        reward_taken=column["t"], reward_expected=column["e"],
        value_taken=column["t"], value_expected=column["e"], tail=column["e"] * 0,
    )  # fmt: skip


def random_episodes(seed: int, *, on_policy: bool = False, zero_model: bool = False) -> Episodes:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    running = (torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)).double()

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * running

    weight = torch.where(running > 0, draw().exp(), 1.0)
    values = {name: draw() for name in ("reward_taken", "reward_expected", "value_taken", "value_expected", "tail")}
    return Episodes(
        running=running,
        weight=torch.ones(shape, dtype=torch.float64) if on_policy else weight,
        discount=GAMMA ** torch.arange(shape[1], dtype=torch.float64) * running,
        reward=draw(),
        **{name: value * 0 if zero_model else value for name, value in values.items()},
    )


def some(e: Episodes, rows: Tensor) -> Episodes:
    return Episodes(**{field.name: getattr(e, field.name)[rows] for field in fields(Episodes)})


def value(name: str, e: Episodes) -> float:
    return float(ESTIMATORS[name](e, sample(len(e.reward)))[0])


def test_three_rows_by_hand():
    # propensities .2 .5 .4; the greedy policy agrees in row 2 only: weights 0, 1 / .5, 0
    e = one_step([0, 2, 0], [4, 5, 7], [2, 4, 6], [1, 4, 5])
    assert value("Direct_Method_Reward", e) == pytest.approx(10 / 3, abs=1e-6)  # (1 + 4 + 5) / 3
    assert value("IPS_Reward", e) == pytest.approx(10 / 3, abs=1e-6)  # 2 * 5 / 3
    assert value("Doubly_Robust_Reward", e) == pytest.approx(4.0, abs=1e-6)  # (1 + 4 + 2 * (5 - 4) + 5) / 3
    assert value("Self_Normalized_IPS_Reward", e) == pytest.approx(5.0, abs=1e-6)  # 2 * 5 / 2
    assert value("Self_Normalized_Doubly_Robust_Reward", e) == pytest.approx(13 / 3, abs=1e-6)  # 10 / 3 + 2 / 2


def test_switch_and_shrinkage_by_hand():
    e = one_step([2, 0.5], [4, 6], [1, 4], [3, 5])
    # residuals 2 * 3 and .5 * 2; with threshold 1 the first is left out
    assert switched(2.0)(e).sum(1).tolist() == pytest.approx([6, 1])
    assert switched(1.0)(e).sum(1).tolist() == pytest.approx([0, 1])
    # lambda 4: 4 * 2 / (4 + 4) = 1 and 4 * .5 / (.25 + 4) = 2 / 4.25; lambda 0 is DM, infinity DR
    assert shrunk(4.0)(e).sum(1).tolist() == pytest.approx([1 * 3, 2 / 4.25 * 2])
    assert shrunk(0.0)(e).sum(1).tolist() == [0, 0]
    assert shrunk(1e12)(e).sum(1).tolist() == pytest.approx([6, 1])
    assert value("Switch_Doubly_Robust_Reward", e) == pytest.approx((3 + 6 + 5 + 1) / 2)  # both weights are below 10
    # lambda 100: 200 / 104 and 50 / 100.25
    assert value("Shrunk_Doubly_Robust_Reward", e) == pytest.approx((8 + 200 / 104 * 3 + 50 / 100.25 * 2) / 2)


TWO_EPISODES = Episodes(
    # episode A: two steps with w 2, .5; episode B: one step with w 3; gamma .5
    running=tensor([[1, 1], [1, 0]]),
    weight=tensor([[2, 0.5], [3, 1]]),
    discount=tensor([[1, 0.5], [1, 0]]),
    reward=tensor([[1, 4], [2, 0]]),
    reward_taken=tensor([[0, 0], [0, 0]]),
    reward_expected=tensor([[0, 0], [0, 0]]),
    value_taken=tensor([[2, 3], [1, 0]]),
    value_expected=tensor([[4, 5], [6, 0]]),
    tail=tensor([[0, 0], [0, 0]]),
)


def test_two_step_table_by_hand():
    # rho A: 2, 1; rho B: 3, then held at 3
    e = TWO_EPISODES
    assert value("Per_Decision_Importance_Sampling", e) == pytest.approx((2 * 1 + 0.5 * 1 * 4 + 3 * 2) / 2)
    # omega_0 = 2/5, 3/5; omega_1 = 1/4, 3/4
    assert value("Weighted_Per_Decision_Importance_Sampling", e) == pytest.approx(
        2 / 5 * 1 + 3 / 5 * 2 + 1 / 4 * 0.5 * 4
    )
    a = 2 * (1 - 2) + 4 + 0.5 * (1 * (4 - 3) + 2 * 5)
    b = 3 * (2 - 1) + 6
    assert value("Sequential_Doubly_Robust", e) == pytest.approx((a + b) / 2)
    wdr = (4 + 6) / 2 + 2 / 5 * (1 - 2) + 3 / 5 * (2 - 1) + 0.5 * (2 / 5 * 5 + 1 / 4 * (4 - 3))
    assert value("Weighted_Sequential_Doubly_Robust", e) == pytest.approx(wdr)
    assert value("Fitted_Q_Evaluation", e) == pytest.approx((4 + 6) / 2)


def checked_step_returns(e: Episodes) -> list[float]:
    """The j-step returns of the log itself; what its episodes contribute adds up to them."""
    returns = step_returns(e, sample(len(e.reward)))[0]
    contributions = torch.cat(list(step_contributions(Log.of([[e]], [ESTIMATORS["MAGIC"]]), 0)))
    torch.testing.assert_close(contributions.sum(0), returns)
    return returns.tolist()


def test_the_value_model_continues_where_the_record_is_cut():
    # g_-1 = DM; g_0 adds the first correction and the value after it; g_1 the second correction
    g0 = 5 + 2 / 5 * (1 - 2) + 3 / 5 * (2 - 1) + 0.5 * 2 / 5 * 5
    assert checked_step_returns(TWO_EPISODES) == pytest.approx([5.0, g0, g0 + 0.5 * 1 / 4])
    # as above, but the record of A ends in a state of value 8: its D is .25, rho A at the last row 1, omega 1/4
    e = replace(TWO_EPISODES, tail=tensor([[0, 0.25 * 8], [0, 0]]))
    for name, added in (("Sequential_Doubly_Robust", 2 / 2), ("Weighted_Sequential_Doubly_Robust", 1 / 4 * 2)):
        assert value(name, e) == pytest.approx(value(name, TWO_EPISODES) + added), name
    for name in ("Per_Decision_Importance_Sampling", "Fitted_Q_Evaluation"):
        assert value(name, e) == value(name, TWO_EPISODES), name
    assert checked_step_returns(e) == pytest.approx([5, g0, g0 + 0.5 * 1 / 4 + 1 / 4 * 2])


IMPORTANCE = (
    "Per_Decision_Importance_Sampling",
    "Weighted_Per_Decision_Importance_Sampling",
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", IMPORTANCE)
def test_same_policy_gives_the_mean_return_of_unequal_episodes(name: str, seed: int):
    # an ended episode whose weight fell to 0 would lift this, by 1.467 in the system this guards against
    e = random_episodes(seed, on_policy=True)
    mean = sum(sum(GAMMA**t * float(e.reward[i, t]) for t in range(length)) for i, length in enumerate(LENGTHS)) / len(
        LENGTHS
    )
    assert value(name, e) == pytest.approx(mean, abs=1e-12)


def test_no_model_makes_doubly_robust_forms_importance_sampling():
    e = random_episodes(1, zero_model=True)
    pairs = (
        ("Sequential_Doubly_Robust", "Per_Decision_Importance_Sampling"),
        ("Weighted_Sequential_Doubly_Robust", "Weighted_Per_Decision_Importance_Sampling"),
        ("Doubly_Robust_Reward", "IPS_Reward"),
        ("Self_Normalized_Doubly_Robust_Reward", "Self_Normalized_IPS_Reward"),
    )
    for robust, plain in pairs:
        assert value(robust, e) == pytest.approx(value(plain, e), abs=1e-12)


def test_horizon_one_makes_sequential_forms_one_step():
    e = one_step([2, 0.6, 1.75], [4, 5, 7], [2, 4, 6], [1, 4, 5])
    pairs = (
        ("Fitted_Q_Evaluation", "Direct_Method_Reward"),
        ("Per_Decision_Importance_Sampling", "IPS_Reward"),
        ("Weighted_Per_Decision_Importance_Sampling", "Self_Normalized_IPS_Reward"),
        ("Sequential_Doubly_Robust", "Doubly_Robust_Reward"),
        ("Weighted_Sequential_Doubly_Robust", "Self_Normalized_Doubly_Robust_Reward"),
    )
    for sequential, single in pairs:
        assert value(sequential, e) == pytest.approx(value(single, e), abs=1e-12)


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "MAGIC"])
def test_counts_are_repeated_episodes(name: str):
    e = random_episodes(4)
    repeated = some(e, torch.tensor([0, 2, 2, 3]))
    counts = torch.tensor([[1, 1, 1, 1], [1, 0, 2, 1]], dtype=torch.float64)
    assert float(ESTIMATORS[name](e, counts)[1]) == pytest.approx(value(name, repeated), abs=1e-12)


def numpy_wdr(e: Episodes) -> float:
    """Transcribed with loops from the paper's definition: nothing shared with the implementation."""
    w, d, r, tail = (getattr(e, name).numpy() for name in ("weight", "discount", "reward", "tail"))
    q, v = e.value_taken.numpy(), e.value_expected.numpy()
    n, steps = w.shape
    total = 0.0
    for t in range(steps):
        rho = [np.prod(w[i, : t + 1]) for i in range(n)]
        before = [np.prod(w[i, :t]) for i in range(n)]
        for i in range(n):
            total += d[i, t] * (rho[i] / sum(rho) * (r[i, t] - q[i, t]) + before[i] / sum(before) * v[i, t])
            total += rho[i] / sum(rho) * tail[i, t]
    return total


@pytest.mark.parametrize("seed", range(4))
def test_weighted_doubly_robust_equals_the_loops(seed: int):
    e = random_episodes(seed)
    assert value("Weighted_Sequential_Doubly_Robust", e) == pytest.approx(numpy_wdr(e), rel=1e-10)


def test_after_the_last_supported_step_the_value_model_continues():
    # both episodes leave the policy at step 1: WDR is r_0 plus the discounted value there
    e = Episodes(
        running=tensor([[1, 1], [1, 1]]), weight=tensor([[1, 0], [1, 0]]), discount=tensor([[1, 0.5], [1, 0.5]]),
        reward=tensor([[2, 9], [4, 9]]), reward_taken=torch.zeros(2, 2), reward_expected=torch.zeros(2, 2),
        value_taken=torch.zeros(2, 2, dtype=torch.float64), value_expected=tensor([[0, 6], [0, 8]]),
        tail=torch.zeros(2, 2, dtype=torch.float64),
    )  # fmt: skip
    assert value("Weighted_Sequential_Doubly_Robust", e) == pytest.approx(3 + 0.5 * 7)
    assert value("Weighted_Per_Decision_Importance_Sampling", e) == pytest.approx(3)


@pytest.mark.parametrize(
    "name",
    [
        "Self_Normalized_IPS_Reward",
        "Weighted_Per_Decision_Importance_Sampling",
        "Weighted_Sequential_Doubly_Robust",
        "MAGIC",
    ],
)
def test_without_any_weight_the_estimate_is_undefined(name: str):
    assert np.isnan(value(name, one_step([0, 0], [4, 5], [2, 4], [1, 4])))


def test_magic_is_exact_where_all_lengths_agree():
    # a perfect model: q = r + gamma v', v = sum pi q, so that every g_j is the same number
    ones = torch.ones(3, 2, dtype=torch.float64)
    e = Episodes(
        running=ones, weight=torch.tensor([[2, 0.5], [1, 3], [0.25, 1]], dtype=torch.float64),
        discount=ones * torch.tensor([1.0, 0.5], dtype=torch.float64), reward=ones,
        reward_taken=ones, reward_expected=ones,
        value_taken=ones * torch.tensor([1.5, 1.0], dtype=torch.float64),
        value_expected=ones * torch.tensor([1.5, 1.0], dtype=torch.float64), tail=ones * 0,
    )  # fmt: skip
    assert value("MAGIC", e) == pytest.approx(1.5, abs=1e-9)
