"""Intervals of returns in simulation: by the normal approximation, by the chance of an unseen event, by simulation."""

from collections.abc import Callable
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from reagent_lite.evaluation.played import MODEL, RANDOM, Played

LOGS = 100
MOST_FALSE = 8  # what a decision that is false in 2.5 % exceeds once in a thousand times


def played(model: Tensor, *others: Tensor) -> Played:
    """Returns policies with these returns, half as large when discounted; the second one is RANDOM."""
    tables = {
        key: torch.stack((total, total / 2, torch.ones_like(total), torch.zeros_like(total)))
        for key, total in zip((MODEL, RANDOM, *map(str, range(1, len(others)))), (model, *others), strict=False)
    }
    return Played.of(cast(Any, SimpleNamespace(name="events", parameters={})), 200, tables, level=0.95)


def test_the_interval_of_many_episodes_is_that_of_a_normal_mean() -> None:
    total = torch.linspace(0, 10, 500, dtype=torch.float64)
    policy = played(total).policies[MODEL]
    half = 1.96 * float(total.std()) / 500**0.5
    assert astuple(policy.total) == pytest.approx((5, 5 - half, 5 + half), abs=0.02)
    assert astuple(policy.discounted) == pytest.approx([figure / 2 for figure in astuple(policy.total)])


def test_differences_are_taken_episode_by_episode() -> None:
    """Returns differ from episode to episode a hundred times as much as the policies do."""
    rng = np.random.default_rng(0)
    start = torch.from_numpy(rng.normal(0, 100, 400))
    difference = played(start + torch.from_numpy(rng.normal(1, 1, 400)), start).differences[RANDOM].total
    assert difference.value == pytest.approx(1, abs=2 * 1.96 * 400**-0.5)
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * 400**-0.5, rel=0.2)


@pytest.mark.parametrize("episodes", [100, 1000])
def test_equal_returns_are_no_proof_that_the_others_return_is_impossible(episodes: int) -> None:
    """An event of chance 3 / n is missing in n episodes in 5 % of all cases; Hanley & Lippman-Hand (1983)."""
    other = torch.zeros(episodes, dtype=torch.float64)
    total = played(torch.ones_like(other), other).policies[MODEL].total
    assert (total.value, 1 - total.low, total.high) == (1, pytest.approx(3 / episodes, rel=0.4), 1)


def test_returns_that_no_policy_varies_have_no_interval() -> None:
    equal = torch.full((1000,), 86.60203251420378, dtype=torch.float64)
    total = played(equal, equal).policies[MODEL].total
    assert (total.value, total.defined) == (pytest.approx(86.60203251420378), False)


@pytest.mark.parametrize(("episodes", "rate"), [(100, 0.02), (1000, 0.004)])
def test_policies_with_the_same_chance_of_an_event_are_seldom_told_apart(episodes: int, rate: float) -> None:
    """The exact chance, over the numbers of events that each of two policies has, in different episodes."""
    chance = 0.0
    episode = torch.arange(episodes)
    for ours in range(1, int(3 * episodes * rate) + 6):
        fewer = [(episode >= episodes - count).double() for count in range(ours)]
        better = [earned.total.low > 0 for earned in played((episode < ours).double(), *fewer).differences.values()]
        chance += binom.pmf(ours, episodes, rate) * binom.pmf(range(ours), episodes, rate).dot(better)
    assert chance < 0.025


@pytest.mark.parametrize(
    "draw",
    [lambda rng: rng.lognormal(0, 1.5, 100), lambda rng: 100 * (rng.random(100) < 0.01) + rng.normal(0, 1, 100)],
    ids=["lognormal", "rare and large"],
)
def test_policies_that_play_alike_are_seldom_told_apart(draw: Callable[[np.random.Generator], np.ndarray]) -> None:
    """A difference is that of a policy that earns nothing to one that earns the difference the other way round."""
    pairs = [[torch.from_numpy(draw(rng)) for _ in range(2)] for rng in map(np.random.default_rng, range(LOGS))]
    differences = played(torch.zeros_like(pairs[0][0]), *(other - ours for ours, other in pairs)).differences
    sides = [earned.total.side for earned in differences.values()]
    assert max(sides.count(1), sides.count(-1)) <= MOST_FALSE
