"""Exported models that play: exact values of the gridworld, Gymnasium's CartPole, a recommender in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles import gridworld
from oracles.bundles import bilinear_bundle, linear_bundle
from oracles.played import around, played, world

Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.mark.parametrize(
    ("epsilon", "keys"),
    [(0.5, {}), (0.0, {}), (0.2, {"policy": "greedy"}), (0.2, {"policy": "softmax", "temperature": 2.0})],
)
def test_exact_values_are_inside_the_intervals(
    tmp_path: Path, worlds: Path, epsilon: float, keys: dict[str, Any]
) -> None:
    """Models whose softmax is epsilon-greedy around their largest value; at twice the temperature its square root."""
    policy = gridworld.epsilon_greedy(0.0 if keys.get("policy") == "greedy" else epsilon)
    if "temperature" in keys:
        policy = np.sqrt(policy) / np.maximum(np.sqrt(policy).sum(1, keepdims=True), 1e-30)
    truth = float(gridworld.policy_values(policy)[gridworld.START])
    _, report = played(tmp_path, world(worlds, epsilon), "gridworld", 4000,
                       evaluation={"confidence_level": 0.99}, **keys)  # fmt: skip
    earned, random = report["model"]["simulated"], report["simulation"]["random"]
    assert around(earned["discounted_return"], truth, 0.25)
    assert around(random["discounted_return"], 0.332371, 0.1)
    # 10 on entering the goal, which nothing but the limit of 1000 steps keeps anyone from
    assert earned["return"]["value"] == pytest.approx(10 * (1 - earned["truncated_share"]))
    assert report["simulation"]["time_limit"] == 1000
    if epsilon == 0:
        assert earned["mean_length"] < 8.5  # 8 steps, but for slips


def test_a_limit_and_a_discount_by_hand(tmp_path: Path) -> None:
    """No pole falls within 5 steps: 1 + .5 + .25 + .125 + .0625, always, at a constant that does not matter."""
    model = linear_bundle(tmp_path / "model", np.zeros((2, 1)), ("left", "right"), (2,))
    settings = {"time_limit": 5, "env_parameters": {"gravity": 9.5}}
    outcome, report = played(tmp_path, model, "cartpole_v0", 50, gamma=0.5, simulation=settings)
    assert report["model"]["simulated"] == {
        "return": {"value": 5, "low": 5, "high": 5},
        "discounted_return": {"value": 1.9375, "low": 1.9375, "high": 1.9375},
        "mean_length": 5, "truncated_share": 1,
    }  # fmt: skip
    assert report["simulation"]["env_parameters"]["gravity"] == 9.5
    assert (outcome.episodes, outcome.rows, outcome.difference) == (0, 0, None)
    assert outcome.scores["simulation/return/mean"] == 5
    assert outcome.scores["simulation/discounted_return/upper"] == 1.9375
    assert {"log", "difference"}.isdisjoint(report)
    assert {"cpe", "actions"}.isdisjoint(report["model"])


def test_fixed_actions_are_candidates_too(tmp_path: Path) -> None:
    """CartPole's actions as features (1, 0) and (0, 1): the same decisions as by name, the same luck and return."""
    weight = np.array([[-8.0, -0.5], [8.0, 0.25]])
    named = linear_bundle(tmp_path / "named", weight, ("left", "right"), (2, 0))
    listed = bilinear_bundle(tmp_path / "listed", weight, (2, 0), (0, 1))
    by_name, other = (played(tmp_path, model, "cartpole_v0", 300)[1]["model"]["simulated"] for model in (named, listed))
    assert by_name["return"]["value"] > 22
    assert other["return"]["value"] == pytest.approx(by_name["return"]["value"], rel=1e-3)


def test_the_difference_of_two_models(tmp_path: Path, worlds: Path) -> None:
    """4.003114 - 1.028097; that of near policies is far narrower than two intervals apart from each other."""
    settings: dict[str, Any] = {"evaluation": {"confidence_level": 0.99}}
    better, other, near = (world(worlds, epsilon) for epsilon in (0.2, 0.8, 0.22))
    outcome, report = played(tmp_path, better, "gridworld", 4000, against=str(other), **settings)
    assert around(report["simulation"]["difference"]["discounted_return"], 4.003114 - 1.028097, 0.25)
    assert around(report["against"]["simulated"]["discounted_return"], 1.028097, 0.2)
    assert outcome.difference is not None
    assert set(outcome.difference) == {"simulation/return", "simulation/discounted_return"}
    figure = report["simulation"]["difference"]["discounted_return"]
    assert outcome.difference["simulation/discounted_return"] == [figure["value"], figure["low"], figure["high"]]
    _, report = played(tmp_path, better, "gridworld", 4000, against=str(near), **settings)
    exact = 4.003114 - float(gridworld.policy_values(gridworld.epsilon_greedy(0.22))[gridworld.START])
    difference = report["simulation"]["difference"]["discounted_return"]
    assert around(difference, exact, 0.1)
    alone = report["model"]["simulated"]["discounted_return"]
    assert difference["high"] - difference["low"] < 0.6 * 2**0.5 * (alone["high"] - alone["low"])
