"""Simulated logs: dynamics, episodes, policies and values against independent truth, and every error of the command."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.special
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.runs import with_config
from helpers.simulated import dense, made
from numpy.typing import NDArray
from oracles import cartpole, gridworld

from reagent_lite.cli import main_alone
from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.tasks.simulate import _prefix, simulate
from workflows.simulate import COMMAND

Array = NDArray[np.float64]
NAMES = ("left", "right")


@pytest.mark.parametrize("limit", [None, 12])
def test_rows_obey_the_dynamics_and_the_limit(tmp_path: Path, limit: int | None) -> None:
    result, log = made(tmp_path, rows=5000, num_envs=100, time_limit=limit)
    after = dense(row["next_state_features"] for row in log.rows)
    led_to, fell = cartpole.step(log.state, (log.action == "right").astype(int))
    assert np.abs(after - led_to).max() < 1e-5  # a truncated row says where it led, too
    np.testing.assert_array_equal(log.terminal, fell)
    np.testing.assert_array_equal(log.truncated, (log.position == (limit or 200) - 1) & ~fell)
    assert bool(log.truncated.any()) == (limit is not None)
    last = np.append(np.diff(log.episode) > 0, True)
    np.testing.assert_array_equal(log.terminal ^ log.truncated, last)
    np.testing.assert_array_equal(after[~last], log.state[1:][~last[:-1]])  # the same numbers, not only close
    expected = [
        {"possible_actions": list(NAMES), "possible_next_actions": [] if row["terminal"] else list(NAMES),
         "next_action": None if ends else following["action"], "time_diff": 1, "reward": 1}
        for row, ends, following in zip(log.rows, last, [*log.rows[1:], None], strict=True)
    ]  # fmt: skip
    assert [{name: row[name] for name in expected[0]} for row in log.rows] == expected
    assert (result.rows, result.episodes) == (len(log.rows), len(log.lengths))


def test_events_are_the_same_decisions(tmp_path: Path) -> None:
    _, log = made(tmp_path, rows=500, num_envs=8, time_limit=25)
    _, events = made(tmp_path, rows=500, num_envs=8, time_limit=25, format="events", ds="2026-01-01")
    same = ["mdp_id", "sequence_number", "state_features", "action", "reward", "possible_actions", "action_probability",
            "terminal", "truncated"]  # fmt: skip
    # where the limit cut an episode, and there alone, its last row says what came then
    after = ("next_state_features", "possible_next_actions")
    assert {row["truncated"] for row in log.rows} == {True, False}
    assert [{name: row[name] for name in (*same, *after, "ds")} for row in events.rows] == [
        {name: row[name] for name in same} | {name: row[name] if row["truncated"] else None for name in after}
        | {"ds": "2026-01-01"} for row in log.rows
    ]  # fmt: skip


def test_the_same_seed_is_the_same_bytes(tmp_path: Path) -> None:
    def log(**changes: Any) -> bytes:
        made(tmp_path, **({"rows": 1000, "num_envs": 16} | changes))
        return (tmp_path / "log.jsonl").read_bytes()

    first = log()
    assert log() == first
    assert first not in (log(seed=1), log(env_parameters={"gravity": 5.0}))
    # an episode depends on seed, environment and number alone: first episodes are the same among more environments
    assert log(rows=None, episodes=10, num_envs=10) == log(rows=None, episodes=10, num_envs=64)


def test_masked_actions_and_the_true_value_of_the_random_policy(tmp_path: Path) -> None:
    truth = gridworld.policy_values(gridworld.random_policy())[gridworld.START]
    assert truth == pytest.approx(0.332371, abs=5e-7)
    wanted = {"kind": "random", "episodes": 4000, "gamma": 0.9, "confidence_level": 0.9999}
    result, log = made(tmp_path, env="gridworld", rows=2000, value_of=wanted)
    value = json.loads((tmp_path / "log.jsonl.truth.json").read_text())
    assert value == result.value_of
    assert value["discounted_return"]["lower"] < truth < value["discounted_return"]["upper"]
    # the path of a terminated episode pays 10 at its end, whatever its length
    assert value["return"]["mean"] == pytest.approx(10 * value["terminated_share"])
    cells, open_here = log.state.argmax(1), gridworld.allowed()
    after = dense(row["next_state_features"] for row in log.rows).argmax(1)
    names = [[gridworld.ACTIONS[k] for k in np.flatnonzero(actions)] for actions in open_here]
    assert [(row["possible_actions"], row["possible_next_actions"]) for row in log.rows] == [
        (names[cell], names[following]) for cell, following in zip(cells, after, strict=True)
    ]
    np.testing.assert_allclose(log.propensity, 1 / open_here[cells].sum(1), rtol=1e-7)
    assert (gridworld.transition_matrix()[cells, [*map(gridworld.ACTIONS.index, log.action)], after] > 0).all()


def test_logs_of_other_settings_share_no_episodes(tmp_path: Path) -> None:
    def begins(**keys: Any) -> str:
        return _prefix(check(SimulateConfig, {"env": "cartpole_v0", "output_path": str(tmp_path / "x.jsonl"), **keys}))

    # the same episodes, seen or counted in another way
    assert begins() == begins(format="transitions", output_path=str(tmp_path / "y.jsonl")) == begins(num_envs=8)
    others = [begins(seed=1), begins(env="cartpole_v1"), begins(time_limit=9), begins(env_parameters={"gravity": 9.0})]
    assert len({begins(), *others}) == 5


def test_each_agent_has_episodes_of_its_own(tmp_path: Path) -> None:
    """Tag with five agents: the log's names, lengths and means by type; runners who are caught end, and early."""
    parameters = {"num_taggers": 2, "num_runners": 3, "tagging_distance": 0.1, "grid_length": 4, "episode_length": 30}
    result, log = made(tmp_path, env="tag_continuous", env_parameters=parameters, episodes=40, num_envs=8)
    rows = pd.DataFrame(log.rows)
    played = rows.assign(tagged=rows["reward"] == -1).groupby("mdp_id", sort=False).agg(
        length=("reward", "size"), earned=("reward", "sum"), caught=("tagged", "any"), ends=("terminal", "sum"),
        terminal=("terminal", "last"),
    )  # fmt: skip
    assert (result.rows, result.episodes, len(played)) == (len(rows), 200, 200)
    names = played.index.str.rsplit("-", n=1)
    longest = played.groupby(names.str[0])["length"].transform("max")
    assert (played["ends"] == played["terminal"]).all()
    assert (played["terminal"] == (played["caught"] | (longest < 30))).all()
    means = played.groupby(np.where(names.str[1].astype(int) < 2, "tagger", "runner"))["earned"].mean()
    assert result.mean_return_of == pytest.approx(means.to_dict(), abs=1e-6)


# values of a model that reads features 2 and 0, in this order: leans left of upright go left
WEIGHT = np.array([[-8.0, -0.5], [8.0, 0.25]])
IDS = (2, 0)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(linear_bundle(tmp_path_factory.mktemp("linear") / "model", WEIGHT, NAMES, IDS))


@pytest.fixture(scope="module")
def bilinear(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Candidates of two features, left (1, 0) and right (0, 1): the same values as `linear`."""
    return str(bilinear_bundle(tmp_path_factory.mktemp("bilinear") / "model", WEIGHT, IDS, (0, 1)))


def values(state: Array) -> Array:
    return state[:, IDS] @ WEIGHT.T


@pytest.mark.parametrize("parametric", [False, True])
def test_softmax_propensities(tmp_path: Path, linear: str, bilinear: str, parametric: bool) -> None:
    policy = {"kind": "softmax", "model": bilinear if parametric else linear, "temperature": 0.5}
    _, log = made(tmp_path, rows=4000, parametric=parametric, policy=policy)
    if parametric:
        assert log.rows[0]["possible_actions"] == [{"0": 1, "1": 0}, {"0": 0, "1": 1}]
    chances = scipy.special.softmax(values(log.state) / 0.5, axis=1)
    right = np.array(["'1': 1" in action for action in log.action]) if parametric else log.action == "right"
    np.testing.assert_allclose(log.propensity, np.where(right, chances[:, 1], chances[:, 0]), rtol=2e-5)
    # drawn as often as said: a sum of independent draws around its mean
    assert abs(right.sum() - chances[:, 1].sum()) < 4 * np.sqrt((chances[:, 0] * chances[:, 1]).sum())


def test_the_true_value_of_a_model(tmp_path: Path) -> None:
    """A model that holds the optimal values, one column a cell."""
    best = gridworld.optimal_q()
    model = linear_bundle(tmp_path / "model", best.T, gridworld.ACTIONS, tuple(range(25)))
    half = {"kind": "epsilon_greedy", "model": str(model), "epsilon": 0.5}
    mask = gridworld.allowed()
    policy = 0.5 * gridworld.random_policy()
    policy[np.arange(25), np.where(mask, best, -1).argmax(1)] += 0.5 * mask.any(1)
    wanted = {**half, "episodes": 2000, "gamma": 0.9, "confidence_level": 0.9999}
    result, log = made(tmp_path, env="gridworld", episodes=50, value_of=wanted, policy=half)
    truth = float(gridworld.policy_values(policy)[gridworld.START])
    assert result.value_of["discounted_return"]["lower"] < truth < result.value_of["discounted_return"]["upper"]
    assert result.value_of["policy"] == {**half, "temperature": 0}
    index = [*map(gridworld.ACTIONS.index, log.action)]
    np.testing.assert_allclose(log.propensity, policy[log.state.argmax(1), index], rtol=1e-6)


def started(folder: Path, tree: dict[str, Any], *arguments: str) -> int:
    base = {"env": "cartpole_v0", "output_path": str(folder / "out" / "log.jsonl"), "rows": 50, "use_gpu": False}
    return main_alone(COMMAND, simulate, [*with_config(folder, base | tree), *arguments])


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"env_parameters": {"gravty": 1.0}}, "gravity"),
        ({"output_path": "file/x.jsonl"}, "output_path: expected a writable folder"),
        ({"output_path": "folder.jsonl"}, "output_path: expected a file, got the folder"),
        ({"policy": {"kind": "softmax", "model": "none"}}, "the folder of an exported model"),
        ({"policy": {"kind": "softmax", "model": "bilinear"}}, "a model of named actions"),
        ({"policy": {"kind": "softmax", "model": "linear"}, "parametric": True}, "a model of candidates"),
        ({"value_of": {"model": "bilinear"}}, "value_of.model"),
        ({"env": "gridworld", "policy": {"kind": "softmax", "model": "linear"}}, "actions L, R, U, D of gridworld"),
        ({"env": "recommend"}, "parametric: expected true"),
        # a pole of no length: its acceleration is infinite, and what follows is no number
        ({"env_parameters": {"half_length": 0.0}}, "expected finite numbers"),
    ],
)
def test_errors_leave_nothing(
    tmp_path: Path, linear: str, bilinear: str, capsys: pytest.CaptureFixture[str],
    tree: dict[str, Any], message: str,
) -> None:  # fmt: skip
    Path("file").touch()
    Path("folder.jsonl").mkdir()
    Path("linear").symlink_to(linear)
    Path("bilinear").symlink_to(bilinear)
    before = {*tmp_path.rglob("*"), tmp_path / "config.json"}
    assert started(tmp_path, tree) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, "expected" in err) == ("", True, True), err
    assert {*tmp_path.rglob("*")} == before


def test_the_last_line_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(tmp_path, {}, "--set", "value_of.kind=random", "--set", "value_of.episodes=50") == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    outcome = json.loads(line)
    log = tmp_path / "out" / "log.jsonl"
    assert {"log", "rows", "episodes", "mean_return", "rows_per_second", "seconds", "value_of"} <= outcome.keys()
    assert (outcome["log"], outcome["rows"]) == (str(log), len(log.read_text().splitlines()))
    assert re.search("(?s)simulating: .*true value of random over 50 episodes", captured.err)
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.jsonl", "log.jsonl.truth.json"]
