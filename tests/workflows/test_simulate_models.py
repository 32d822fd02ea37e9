"""Policies of exported models in simulation: propensities, true values, and every error of the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from oracles import gridworld
from oracles.bundles import Habit, bilinear_bundle, linear_bundle
from oracles.simulated import made

from reagent_lite.algorithms.bcq import LikelyInTheLog
from reagent_lite.cli import main_alone
from reagent_lite.tasks.simulate import simulate
from workflows.simulate import COMMAND

Array = NDArray[np.float64]
NAMES = ("left", "right")
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
    result: Array = state[:, IDS] @ WEIGHT.T
    return result


def test_epsilon_greedy_propensities(tmp_path: Path, linear: str) -> None:
    epsilon = 0.3
    _, log = made(tmp_path, rows=5000, policy={"kind": "epsilon_greedy", "model": linear, "epsilon": epsilon})
    q = values(log.state)
    clear = np.abs(q[:, 0] - q[:, 1]) > 1e-5
    assert clear.mean() > 0.99
    greedy = (q.argmax(1) == (log.action == "right"))[clear]
    expected = np.where(greedy, np.float32(1 - epsilon + epsilon / 2), np.float32(epsilon / 2))
    np.testing.assert_allclose(log.propensity[clear], expected, rtol=1e-7)
    assert len(np.unique(log.propensity)) == 2
    share, chance = greedy.mean(), 1 - epsilon / 2
    assert abs(share - chance) < 4 * (chance * (1 - chance) / clear.sum()) ** 0.5


@pytest.mark.parametrize(
    "policy", [{"kind": "epsilon_greedy", "epsilon": 0.0}, {"kind": "softmax", "temperature": 9.0}]
)
def test_a_restricted_model_plays_what_its_log_takes(tmp_path: Path, policy: dict[str, Any]) -> None:
    """Right is taken with 0.05 of what left is: never played, whatever its value."""
    habit = LikelyInTheLog(Habit([0.95, 0.0475]), 0.1)
    model = str(linear_bundle(tmp_path / "model", WEIGHT, NAMES, IDS, restriction=habit))
    _, log = made(tmp_path, rows=500, policy={**policy, "model": model})
    assert (values(log.state).argmax(1) == 1).any()
    assert set(log.action) == {"left"}
    assert (log.propensity == 1).all()


@pytest.mark.parametrize("parametric", [False, True])
def test_softmax_propensities(tmp_path: Path, linear: str, bilinear: str, parametric: bool) -> None:
    policy = {"kind": "softmax", "model": bilinear if parametric else linear, "temperature": 0.5}
    _, log = made(tmp_path, rows=4000, parametric=parametric, policy=policy)
    scores = values(log.state) / 0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    chances = weights / weights.sum(1, keepdims=True)
    right = np.array(["'1': 1" in one for one in log.action]) if parametric else log.action == "right"
    np.testing.assert_allclose(log.propensity, np.where(right, chances[:, 1], chances[:, 0]), rtol=2e-5)
    # drawn as often as said: a sum of independent draws around its mean
    spread = np.sqrt((chances[:, 0] * chances[:, 1]).sum())
    assert abs(right.sum() - chances[:, 1].sum()) < 4 * spread


def test_the_true_value_of_a_model(tmp_path: Path) -> None:
    """A model that holds the optimal values, one column a cell."""
    model = linear_bundle(tmp_path / "model", gridworld.optimal_q().T, gridworld.ACTIONS, tuple(range(25)))
    wanted = {"model": str(model), "episodes": 2000, "gamma": 0.9, "confidence_level": 0.9999}
    best = gridworld.optimal_q()
    mask = gridworld.allowed()
    policy = 0.5 * gridworld.random_policy()
    policy[np.arange(25), np.where(mask, best, -1).argmax(1)] += 0.5 * mask.any(1)
    truth = float(gridworld.policy_values(policy)[gridworld.START])
    noisy, log = made(
        tmp_path, env="gridworld", episodes=50, value_of=wanted | {"kind": "epsilon_greedy", "epsilon": 0.5},
        policy={"kind": "epsilon_greedy", "model": str(model), "epsilon": 0.5},
    )  # fmt: skip
    assert noisy.value_of is not None
    assert noisy.value_of["discounted_return"]["lower"] < truth < noisy.value_of["discounted_return"]["upper"]
    assert noisy.value_of["policy"] == {"kind": "epsilon_greedy", "model": str(model), "epsilon": 0.5, "temperature": 0}
    index = [gridworld.ACTIONS.index(row["action"]) for row in log.rows]
    np.testing.assert_allclose(log.propensity, policy[log.state.argmax(1), index], rtol=1e-6)


def started(tmp_path: Path, tree: dict[str, Any], *arguments: str) -> int:
    base = {"env": "cartpole_v0", "output_path": str(tmp_path / "out" / "log.jsonl"), "rows": 50, "use_gpu": False}
    (tmp_path / "c.json").write_text(json.dumps(base | tree))
    return main_alone(COMMAND, simulate, ["--config", str(tmp_path / "c.json"), *arguments])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"env_parameters": {"gravty": 1.0}}, "gravity"),
        ({"output_path": "FOLDER/file/x.jsonl"}, "output_path: expected a writable folder"),
        ({"output_path": "FOLDER/folder.jsonl"}, "output_path: expected a file, got the folder"),
        ({"policy": {"kind": "softmax", "model": "FOLDER/none"}}, "the folder of an exported model"),
        ({"policy": {"kind": "softmax", "model": "FOLDER/altered"}}, "model.onnx"),
        ({"policy": {"kind": "softmax", "model": "BILINEAR"}}, "a model of named actions"),
        ({"policy": {"kind": "softmax", "model": "LINEAR"}, "parametric": True}, "a model of candidates"),
        ({"value_of": {"model": "BILINEAR"}}, "value_of.model"),
        ({"env": "gridworld", "policy": {"kind": "softmax", "model": "LINEAR"}}, "actions L, R, U, D of gridworld"),
        ({"env": "recommend"}, "parametric: expected true"),
    ],
)
def test_errors(
    tmp_path: Path, linear: str, bilinear: str, capsys: pytest.CaptureFixture[str],
    tree: dict[str, Any], message: str,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "altered").mkdir()
    for file in Path(linear).iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= file.name == "model.onnx"
        (tmp_path / "altered" / file.name).write_bytes(bytes(data))
    names = {"FOLDER": str(tmp_path), "BILINEAR": bilinear, "LINEAR": linear}
    text = json.dumps(tree)
    for name, path in names.items():
        text = text.replace(name, path)
    before = sorted(tmp_path.rglob("*"))
    assert started(tmp_path, json.loads(text)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "expected" in captured.err
    assert captured.out == ""
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [tmp_path / "c.json"]


def test_a_log_that_cannot_be_finished_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pole of no length: its acceleration is infinite, and what follows is no number."""
    assert started(tmp_path, {"env_parameters": {"half_length": 0.0}}) == 2
    assert "expected finite numbers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_last_line_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(tmp_path, {}, "--set", "value_of.kind=random", "--set", "value_of.episodes=50") == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    outcome = json.loads(line)
    assert {"log", "rows", "episodes", "mean_return", "rows_per_second", "seconds", "value_of"} <= outcome.keys()
    assert outcome["log"] == str(tmp_path / "out" / "log.jsonl")
    assert outcome["rows"] == len((tmp_path / "out" / "log.jsonl").read_text().splitlines())
    assert outcome["value_of"]["policy"]["kind"] == "random"
    assert "simulating: " in captured.err
    assert "true value of random over 50 episodes" in captured.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.jsonl", "log.jsonl.truth.json"]
