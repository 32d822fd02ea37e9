"""Rows that share one draw of the action are found, and independent rows are not taken for such."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from oracles.shared_draws import SharedDraws as Log

import reagent_lite
from reagent_lite.errors import DataError
from reagent_lite.evaluation.cpe import find_shared_draws, repeats_of
from reagent_lite.evaluation.shared_draws import SharedDraws, is_sorted, shared_draws

RNG = np.random.default_rng(0)


def found(
    weight: np.ndarray, unit: np.ndarray, column: np.ndarray | None = None, context: np.ndarray | None = None
) -> SharedDraws:
    rows = torch.arange(len(weight))
    contexts = None if context is None else torch.from_numpy(context)
    ordered = column is not None and is_sorted(torch.from_numpy(column), rows)
    return shared_draws(torch.from_numpy(weight) - 1, rows, torch.from_numpy(unit), contexts, is_sorted=ordered)


def weights(draws: int, rows: int, shape: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights with mean 1, and the number of each row's draw."""
    draw = np.repeat(np.arange(draws), rows)
    return shape(RNG.random(draws))[draw], draw


SHAPES = {"of two": lambda u: 2.0 * (u < 0.5), "rare": lambda u: 20.0 * (u < 0.05), "heavy": lambda u: 0.5 / u**0.5}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbors_of_one_draw_are_found_unless_they_are_a_unit(shape: Callable[[np.ndarray], np.ndarray]) -> None:
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
    assert not found(weight, rows, action, context=rows % 5).between
    assert found(weight, rows, np.roll(action, 1)).between


@pytest.mark.parametrize("actions", [2, 5])
@pytest.mark.parametrize("kind", ["independent", "adaptive", "drift", "context", "hour", "interleaved"])
def test_shared_draws_of_whole_logs_are_found(kind: str, actions: int) -> None:
    """The policy follows features of rows: in an hour its mean weight may be 1 for every action."""
    for seed in range(10):
        log = Log(kind=kind, units=60, rows=20, actions=actions).draw(np.random.default_rng(seed))
        shared = find_shared_draws(log.page, log.features)
        assert shared == SharedDraws(between=kind in ("hour", "interleaved"))


def test_repeats_of_impossible_actions_do_not_count() -> None:
    """Weights of the policy that repeats: 1 / p - 1 for an equal action, -1 for another, 0 if it is not possible."""
    log = Log(kind="independent", units=4, rows=1).draw(np.random.default_rng(0))
    page = replace(
        log.page,
        action=torch.tensor([0, 0, 1, 1]),
        propensity=torch.tensor([0.5, 0.25, 0.5, 0.75]).double(),
        mask=torch.tensor([[True, True], [True, True], [False, True], [True, True]]),
    )
    differences = repeats_of(page, torch.arange(4))(torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 3, 3]))
    assert differences.tolist() == pytest.approx([3.0, 0.0, 1 / 3, -1.0])


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
