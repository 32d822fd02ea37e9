"""Rows that share one draw of the action are found, and independent rows are not taken for such."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from oracles.shared_draws import SharedDraws as Log

import reagent_lite
from reagent_lite.errors import DataError
from reagent_lite.evaluation.shared_draws import SharedDraws, shared_draws

RNG = np.random.default_rng(0)


def found(weight: np.ndarray, unit: np.ndarray, *columns: np.ndarray, context: np.ndarray | None = None) -> SharedDraws:
    weights, units, *by = (torch.from_numpy(values) for values in (weight, unit, *columns))
    rows = torch.arange(len(weights))
    return shared_draws(weights, rows, units, None if context is None else torch.from_numpy(context), tuple(by))


def weights(draws: int, rows: int, shape: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights with mean 1, and the number of each row's draw."""
    draw = np.repeat(np.arange(draws), rows)
    return shape(RNG.random(draws))[draw], draw


SHAPES = {"of two": lambda u: 2.0 * (u < 0.5), "rare": lambda u: 20.0 * (u < 0.05), "heavy": lambda u: 0.5 / u**0.5}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbours_of_one_draw_are_found_unless_they_are_a_unit(shape: Callable[[np.ndarray], np.ndarray]) -> None:
    weight, draw = weights(400, 5, shape)
    rows = np.arange(len(draw))
    assert found(weight, rows).between
    assert not found(weight, draw).between
    assert not found(*weights(2000, 1, shape)).between


def test_rows_of_a_user_in_any_order_are_found_by_equal_features() -> None:
    weight, user = weights(400, 5, SHAPES["of two"])
    order = RNG.permutation(len(user))
    rows = np.arange(len(user))
    assert not found(weight[order], rows).between
    assert found(weight[order], rows, context=user[order]).between
    assert not found(weight[order], user[order], context=user[order]).between


def test_a_file_that_is_sorted_by_an_action_has_no_shared_draws() -> None:
    action = np.sort(RNG.integers(0, 3, 3000))
    weight = np.array([2.0, 0.5, 0.5])[action]
    rows = np.arange(3000)
    assert found(weight, rows).between
    assert not found(weight, rows, action).between


@pytest.mark.parametrize("kind", ["independent", "adaptive", "drift", "context"])
def test_nothing_is_found_in_honest_logs(kind: str) -> None:
    logs = [Log(kind=kind, units=150, rows=10, actions=3).draw(np.random.default_rng(seed)) for seed in range(20)]
    alarms = [
        found(log.page.weight.numpy(), np.arange(len(log.page)), context=log.features.context(log.page.number.numpy()))
        for log in logs
        if log.features is not None and log.page.number is not None
    ]
    assert alarms == [SharedDraws()] * 20


def log_of_users(users: int = 300, rows: int = 6) -> pd.DataFrame:
    """Each user has one arm; half of them would have the other one."""
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(users), rows)
    arm = rng.integers(0, 2, users)[user]
    reward = (rng.random(users * rows) < (0.2 + 0.6 * rng.random(users))[user]).astype(float)
    return pd.DataFrame({
        "user": [f"u{number}" for number in user], "x": rng.random(len(user)), "action": np.where(arm, "b", "a"),
        "reward": reward, "action_probability": 0.5, "wanted": np.where(arm, 0.9, 0.1),
    })  # fmt: skip


def test_a_log_of_shared_draws_is_trusted_once_it_names_units(tmp_path: Path) -> None:
    log = log_of_users()
    columns = {"state_features": ["x"]}
    config = {"columns": columns, "actions": ["a", "b"], "output_path": tmp_path / "e.json"}
    unnamed = reagent_lite.evaluate("column:wanted", log, config=config)
    assert "rows share a draw of the action" in unnamed.decision["reason"]
    assert "data.columns.unit" in unnamed.decision["next"]
    named = reagent_lite.evaluate("column:wanted", log, config=config | {"columns": {**columns, "unit": "user"}})
    (ips,) = (row for row in named.estimate_rows if row["estimator"] == "IPS_Reward")
    assert ips["verdict"] == "trustworthy"
    # by hand: the standard error of the mean of users' weighted rewards, given that their mean weight is 1
    of_users = (2 * log.wanted * log.reward).groupby(log.user).mean()
    of_weights = (2 * log.wanted).groupby(log.user).mean()
    deviation = of_users - np.polyval(np.polyfit(of_weights, of_users, 1), of_weights)
    half = 1.96 * deviation.std() / len(of_users) ** 0.5
    assert ips["estimate"] == pytest.approx(of_users.mean(), rel=1e-6)
    assert (ips["high"] - ips["low"]) / 2 == pytest.approx(half, rel=0.05)


@pytest.mark.parametrize("paired_first", [False, True])
def test_episodes_of_a_unit_are_drawn_together(tmp_path: Path, paired_first: bool) -> None:
    """Sessions of two rows; a user has three of them. Bootstrap of users: the deviation of their mean weights."""
    log = log_of_users(200)
    count = np.arange(len(log))
    log = log.assign(session=(count // 2).astype(str), number=count % 2)
    columns = {"state_features": ["x"], "mdp_id": "session", "sequence_number": "number", "unit": "user"}
    config = {"columns": columns, "actions": ["a", "b"], "output_path": tmp_path / "e.json", "gamma": 0.9}
    config["timeline"] = {"addTerminalStateRow": True}
    if paired_first:
        config["timeline"]["outputTableName"] = str(tmp_path / "paired")
    evaluated = reagent_lite.evaluate("column:wanted", log, config=config)
    overlap = json.loads(Path(evaluated.report).read_text())["model"]["cpe"]["overlap"]
    assert (overlap["num_units"], overlap["num_episodes"], evaluated.rows) == (200, 600, 1200)
    of_users = 2 * log.wanted.groupby(log.user).mean()
    half = 1.96 * of_users.std() / 200**0.5
    low, high = overlap["mean_weight"]["low"], overlap["mean_weight"]["high"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "nobody"}, "nobody"),
        ({"unit": "holes"}, "a unit in every row"),
        ({"unit": "user", "mdp_id": "session", "sequence_number": "number"}, "one user for all rows of an episode"),
    ],
)
def test_faults_of_units_say_where(tmp_path: Path, change: dict[str, str], message: str) -> None:
    log = log_of_users(20, 3)
    count = np.arange(len(log))
    log = log.assign(holes=log.user.where(count > 5), session=(count // 6).astype(str), number=count % 6)
    columns = {"state_features": ["x"], **change}
    config = {"columns": columns, "actions": ["a", "b"], "output_path": tmp_path / "e.json", "gamma": 0.9}
    with pytest.raises(DataError, match=message):
        reagent_lite.evaluate("column:wanted", log, config=config)
