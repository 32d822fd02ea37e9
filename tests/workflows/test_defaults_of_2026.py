"""Runs with the defaults of 2026: numbers in config.json, values in the unit of rewards, a run that is continued."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.logs import random_rows, write_lines
from helpers.runs import checked, trained

from reagent_lite import load_bundle
from reagent_lite.run.value_scale import discount_rewards

KEYS = {
    "defaults": "2026",
    "use_gpu": False,
    "actions": ["a", "b"],
    "evaluation": {"calc_cpe_in_training": False, "models": {"final_fit_passes": 1}},
    "training": {"minibatch_size": 64},
    "epochs": 3,
}


def run_of(folder: Path, scale: float = 1.0, **keys: Any) -> Path:
    rows = [{**row, "reward": scale * row["reward"]} for row in random_rows(400)]
    folder.mkdir(exist_ok=True)
    log = write_lines(folder / "log.jsonl", rows)
    trained({**KEYS, **keys, "training_data_path": str(log), "model_output_path": str(folder / "out")})
    return folder / "out"


@pytest.mark.parametrize(
    ("keys", "count", "minutes"),
    [({}, 2, 10), ({}, 1, None), ({"checkpoint": {"every_minutes": None}}, 2, None), ({"defaults": "2019"}, 2, None)],
)
def test_several_machines_save_regularly(keys: dict[str, Any], count: int, minutes: float | None) -> None:
    config = checked({**KEYS, **keys, "training_data_path": "log.jsonl", "model_output_path": "out"}).on_node(0, count)
    assert (config.num_nodes, config.checkpoint.every_minutes) == (count, minutes)
    assert config.restarts == (3 if minutes else 0)


def test_returns_are_discounted_sums_within_episodes() -> None:
    """By hand with discount 1/2: 4; 2 + 4/2; 1 + 4/2; then an episode of 8 and one whose last row is cut off."""
    reward = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    factor = np.array([0.5, 0.5, 0.0, 0.0, 0.5, 0.0])
    assert discount_rewards(reward, factor).tolist() == [3, 4, 4, 8, 32, 32]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_returns_of_long_episodes(gamma: float) -> None:
    rng = np.random.default_rng(0)
    reward = rng.normal(size=1000)
    factor = gamma * (rng.random(1000) > 0.005)
    factor[-1] = 0
    expected = np.zeros(1001)
    for row in reversed(range(1000)):
        expected[row] = reward[row] + factor[row] * expected[row + 1]
    np.testing.assert_allclose(discount_rewards(reward, factor), expected[:-1], atol=0.02 if gamma < 1 else 1e-9)


def test_values_follow_the_unit_of_rewards(tmp_path: Path) -> None:
    small, large = (run_of(tmp_path / str(scale), scale) for scale in (1.0, 1024.0))
    states = np.random.default_rng(1).normal(size=(50, 3))
    before, after = (load_bundle(out / "model").predict(states) for out in (small, large))
    np.testing.assert_allclose(after.q, 1024 * before.q, rtol=1e-3, atol=0.5)
    assert (after.greedy == before.greedy).mean() > 0.95


def test_config_json_has_the_numbers_which_a_resumed_run_keeps(tmp_path: Path) -> None:
    whole = json.loads((run_of(tmp_path / "whole", epochs=2, training={}) / "config.json").read_text())
    assert (whole["defaults"], whole["training"]["minibatch_size"], whole["epochs"]) == ("2026", 128, 2)
    assert whole["training"]["lr_decay"] == pytest.approx(0.05**0.5)
    returns = discount_rewards(
        np.array([row["reward"] for row in random_rows(400)]), np.resize([0.99] * 9 + [0.0], 400)
    )
    assert whole["rl"]["value_scale"] == pytest.approx([returns.mean(), returns.std()], rel=1e-3)
    again = json.loads((run_of(tmp_path / "again", epochs=2, training={}) / "config.json").read_text())
    assert again["rl"] == whole["rl"]
